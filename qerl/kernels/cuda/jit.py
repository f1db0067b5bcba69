"""CUDA C++ sources, compiled at first use by the NVRTC in PyTorch, so that no compiler and no headers are needed."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from qerl.host.provenance import cache_folder
from qerl.kernels.state import compile_later


class KernelError(RuntimeError):
    """A kernel can't be compiled, loaded or launched."""


@cache
def load(
    sources: tuple[Path, ...], entry: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int
) -> Any:
    """The function `entry` of source files, which are concatenated in order and compiled with -D options, on a GPU.

    `shared_bytes` is the dynamic shared memory of a thread block. Machine code is stored in the user's cache folder.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes PyTorch's CUDA context current
        library = _check(driver.cuLibraryLoadData(_machine_code(sources, entry, defines, device), [], [], 0, [], [], 0))
        function = _check(driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, entry.encode()))))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


def launch(
    kernel: tuple[tuple[Path, ...], str, tuple[tuple[str, int], ...], int, int],
    grid: int,
    threads: int,
    params: ctypes.Structure,
) -> None:
    """Launch the kernel with these arguments of `load` on PyTorch's current stream.

    It may start before the previous one has ended, so it must execute griddepcontrol.wait before it accesses memory
    that other kernels write. In a `dry_run` it is compiled and not launched.
    """
    from cuda.bindings import driver

    sources, entry, defines, shared_bytes, device = kernel
    # Launches of one kernel can differ in shared memory, which its machine code doesn't depend on.
    if compile_later(_machine_code, sources, entry, defines, device):
        return
    function = load(*kernel)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [early], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))


def _machine_code(sources: tuple[Path, ...], entry: str, defines: tuple[tuple[str, int], ...], device: int) -> bytes:
    from cuda.bindings import nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    # The "a" of sm_90a enables the instructions that only this generation has.
    architecture = f"sm_{major}{minor}" + ("a" if major == 9 else "")
    options = [f"-arch={architecture}", "-std=c++17", *(f"-D{name}={value}" for name, value in defines)]
    # #line makes the compiler's messages name the file and its line.
    text = "".join(f'#line 1 "{source.name}"\n{source.read_text(encoding="utf-8")}' for source in sources).encode()
    key = hashlib.sha256(repr((options, nvrtc.nvrtcVersion()[1:])).encode() + text).hexdigest()[:32]
    file = cache_folder("kernels") / f"{entry}-{key}.cubin"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as partial:
            partial.write(_compile(text, sources[-1].name, options))
        Path(partial.name).replace(file)
    return file.read_bytes()


def _compile(text: bytes, name: str, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelError(f"{name} doesn't compile with {' '.join(options)}:\n{log.decode()}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _check(returned: Any) -> Any:
    """The value returned by the driver or NVRTC as (status, value). Raises KernelError for a failed call."""
    status, *values = returned
    if int(status):
        raise KernelError(f"a CUDA call returned {status!r}")
    return values[0] if values else None


def params_struct(**fields: Any) -> type[ctypes.Structure]:
    """A structure that a kernel takes by value, with `fields` in the source's order and a size that 64 divides."""
    size = ctypes.sizeof(type("Unpadded", (ctypes.Structure,), {"_fields_": list(fields.items())}))
    return type(
        "Params", (ctypes.Structure,), {"_fields_": [*fields.items(), ("padding", ctypes.c_uint8 * (-size % 64))]}
    )


def tensor_map(matrix: torch.Tensor, box_rows: int, box_columns: int) -> ctypes.Array[ctypes.c_uint8]:
    """The descriptor with which bulk copies read boxes of a contiguous bfloat16 matrix [rows, columns].

    A box arrives as [box_columns / 64, box_rows, 64] with the 128-byte swizzle; rows outside the matrix are zero.
    """
    rows, columns = matrix.shape
    return _tensor_map(matrix, (64, rows, columns // 64), (2 * columns, 128), (64, box_rows, box_columns // 64))


def flat_tensor_map(matrix: torch.Tensor, box_rows: int) -> ctypes.Array[ctypes.c_uint8]:
    """The same for boxes of 64 columns, for any number of columns that is a multiple of 8: [box_rows, 64]."""
    rows, columns = matrix.shape
    return _tensor_map(matrix, (columns, rows), (2 * columns,), (64, box_rows))


def _tensor_map(
    matrix: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_uint8]:
    from cuda.bindings import driver

    result = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        matrix.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    descriptor = _check(result)
    return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(int(descriptor.getPtr()), 128))


def address(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's data; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()
