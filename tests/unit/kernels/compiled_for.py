"""Compilation of launches for a GPU that isn't here: a driver for Triton that compiles and starts nothing."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qerl.kernels.triton import launch

#: Multiprocessors of a GPU of each capability, by which launches are divided.
PROCESSORS = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


class _Driver:
    """As much of a driver as a launch asks for before it compiles."""

    def __init__(self, capability):
        self.number = 10 * capability[0] + capability[1]

    def get_current_device(self):
        # Triton keeps compiled kernels by device.
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.number, 32)


@contextmanager
def launches_for(capability, shared_bytes, monkeypatch, *, all_variants=True):
    """A list to which every launch in the context adds its compiled kernel, instead of running it.

    Without `all_variants` only the last launch of each kernel is compiled for each precision of its tensors, at the end
    of the context.
    """
    compiled, last, run = [], {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        if all_variants:
            compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        else:
            dtypes = tuple(getattr(argument, "dtype", None) for argument in args)
            last[self, dtypes] = partial(run, self, *args, grid=grid, warmup=True, **kwargs)

    with monkeypatch.context() as patch:
        properties = SimpleNamespace(
            multi_processor_count=PROCESSORS[capability],
            shared_memory_per_block_optin=shared_bytes,
            shared_memory_per_multiprocessor=shared_bytes + 1024,
        )
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(launch, "_supported", lambda device: capability >= (9, 0))
        patch.setattr(JITFunction, "run", compile_only)
        triton.runtime.driver.set_active(_Driver(capability))
        try:
            yield compiled
            compiled += [compile_one() for compile_one in last.values()]
        finally:
            triton.runtime.driver._active = None
