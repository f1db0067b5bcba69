"""AdamW in 8 bits against bitsandbytes' update of one whole tensor after the other: small tensors, and shards."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes import optim
from bitsandbytes.functional import dequantize_blockwise
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qerl.rl import optimizer as adamw8bit
from qerl.rl.checkpoint import Checkpoints, restore, whole_state
from qerl.rl.optimizer import AdamW8bit
from qerl.rl.parallel import Processes, start_processes

#: Both kinds of state: 8 bits from 4,096 elements on, whole blocks of 256, and others.
JOINED = [(16, 256), (8, 256), (768, 16), (4, 1024), (128, 16), (70, 70), (256,), (33,)]


def groups(parameters):
    matrices, vectors = parameters[:6], parameters[6:]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def some_gradients(generator, without=()):
    gradients = [torch.randn(shape, generator=generator) for shape in JOINED]
    return [None if place in without else gradient for place, gradient in enumerate(gradients)]


def test_small_tensors_are_updated_together_bit_for_bit(monkeypatch):
    monkeypatch.setattr(adamw8bit, "MOST", 12288)  # not all fit together
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in JOINED]
    theirs = copy.deepcopy(ours)
    joined = AdamW8bit(groups(ours), lr=1e-2, betas=(0.9, 0.99))
    alone = optim.AdamW8bit(groups(theirs), lr=1e-2, betas=(0.9, 0.99))
    calls = []
    update_step = AdamW8bit.update_step
    monkeypatch.setattr(AdamW8bit, "update_step", lambda *args: calls.append(args[2]) or update_step(*args))
    for step in range(8):
        if step == 5:  # as a resumed run
            state = joined.state_dict()
            joined = AdamW8bit(groups(ours), lr=1e-2, betas=(0.9, 0.99))
            joined.load_state_dict(state)
        gradients = some_gradients(generator, without=[1, 3] if step == 2 else [])
        for place, gradient in enumerate(gradients):
            for parameters in (ours, theirs):
                parameters[place].grad = None if gradient is None else gradient.clone()
        for optimizer in (joined, alone):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        states = [[one.state[p] for p in tensors] for one, tensors in ((joined, ours), (alone, theirs))]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    assert len(joined.state) == len(JOINED)
    assert len(calls) < 8 * len(JOINED) - 2


# --- shards of several processes (gloo, on the CPU) ---


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
#: Unequal shards; fewer rows than four processes; experts; too few numbers for 8 bits.
OF_BLOCKS = {"uneven": (7, 768), "few rows": (3, 2048), "experts": (4, 3, 512), "small": (5, 6)}
#: These have no rows of whole blocks.
OTHERS = {"odd": (64, 96), "vector": (5000,)}
SHAPES = {**OF_BLOCKS, **OTHERS}


def drawn(step: int, device: str) -> dict[str, torch.Tensor]:
    """Weights (step 0), or the gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def sharded(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    if count == 1:
        return tensors
    mesh = init_device_mesh(next(iter(tensors.values())).device.type, (count,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def train(folder: Path, last: int, out: Path, device: str) -> None:
    """Continue the state of `folder` to a step, in each process, and save state and whole weights."""
    torch.set_num_threads(1)
    processes = Processes()
    weights = {name: torch.nn.Parameter(w) for name, w in sharded(drawn(0, device), processes.count).items()}
    optimizer = AdamW8bit(weights.values(), **SETTINGS)
    checkpoints = Checkpoints(folder, "")
    state = restore(checkpoints.load() if processes.writes else None, weights, optimizer, processes)
    rows = state["rows"] if state else []
    while len(rows) < last:
        rows.append({"step": len(rows) + 1})
        for name, gradient in sharded(drawn(len(rows), device), processes.count).items():
            weights[name].grad = gradient
        optimizer.step()
    state = whole_state(weights, optimizer, processes)
    if processes.writes:
        checkpoints.save(len(rows), {**state, "rows": rows})
    if processes.count > 1:
        check_bytes(weights, optimizer)
    whole = {n: (w.full_tensor() if isinstance(w, DTensor) else w).detach() for n, w in weights.items()}
    if processes.writes:
        torch.save(whole, out)


def check_bytes(weights: dict[str, torch.nn.Parameter], optimizer: AdamW8bit) -> None:
    """A number's moments have two codes and its part of two scales, or else two floats."""
    for name, weight in weights.items():
        state = {key: value.to_local() for key, value in optimizer.state[weight].items() if isinstance(value, DTensor)}
        taken = sum(part.numel() * part.itemsize for part in state.values())
        each = 2 + 8 / 256 if name in OF_BLOCKS and name != "small" else 8
        assert taken == each * weight.to_local().numel(), name


def trained(
    folder: Path, processes: int, last: int, state: Path | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The weights after a step, continued from a copy of another state, if there is one."""
    mine = folder / f"{state.name if state else 'begun'}-{processes}-{last}"
    if state:
        shutil.copytree(state, mine)
    given = mine, last, folder / "weights.pt", device
    start_processes(processes, train, *given) or train(*given)
    return torch.load(folder / "weights.pt")


def alone(kind: type[torch.optim.Optimizer], first: int, last: int, start=None, state=None, device: str = "cpu"):
    """Weights and optimizer of the steps between, with a library's optimizer of whole weights."""
    weights = {name: torch.nn.Parameter(w.clone()) for name, w in (start or drawn(0, device)).items()}
    optimizer = kind(weights.values(), **SETTINGS)
    for parameter, values in zip(weights.values(), state or [], strict=False):
        optimizer.state[parameter] = values
    for step in range(first, last + 1):
        for name, gradient in drawn(step, device).items():
            weights[name].grad = gradient
        optimizer.step()
    return {name: w.detach() for name, w in weights.items()}, optimizer


def unpacked(state: dict) -> dict[str, torch.Tensor]:
    """torch's AdamW state of bitsandbytes' state."""
    moments = {"exp_avg": 1, "exp_avg_sq": 2}
    values = {
        name: state[f"state{n}"]
        if f"qmap{n}" not in state
        else dequantize_blockwise(state[f"state{n}"], absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=256)
        for name, n in moments.items()
    }
    return {"step": torch.tensor(float(state["step"])), **values}


def assert_like(found, exact, close) -> None:
    """Rows of whole blocks are as in 8 bits, bit for bit; all others as with float32 moments."""
    for name in OF_BLOCKS:
        assert torch.equal(found[name], exact[name]), name
    for name in OTHERS:
        torch.testing.assert_close(found[name], close[name], atol=1e-6, rtol=1e-6, msg=name)


def after_three_steps(device: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights with bitsandbytes' unsharded optimizers, in 8 bits and with float32 moments."""
    # On a GPU its kernel decays weights after the step, where torch's decays before, so torch's isn't the oracle here.
    kinds = optim.AdamW8bit, optim.AdamW
    exact, close = (alone(kind, 1, 3, device=device)[0] for kind in kinds)
    assert all((exact[name] - close[name]).abs().max() > 1e-4 for name in SHAPES if name != "small")
    return exact, close


@pytest.fixture(scope="module")
def wanted() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return after_three_steps("cpu")


@pytest.mark.usefixtures("forking")
def test_shards_are_updated_as_whole_weights_and_continue_on_other_numbers_of_processes(tmp_path, wanted):
    trained(tmp_path, 2, 2)
    for processes in (1, 2, 4):
        assert_like(trained(tmp_path, processes, 3, tmp_path / "begun-2-2"), *wanted)


@pytest.mark.usefixtures("forking")
def test_a_run_of_one_process_continues_on_two(tmp_path, wanted):
    """Blocks that go over the ends of rows are unpacked."""
    begun, optimizer = alone(optim.AdamW8bit, 1, 2)
    same = trained(tmp_path, 1, 2)
    torch.testing.assert_close(same, begun, rtol=0, atol=0)
    state = [unpacked(state) for state in optimizer.state.values()]
    continued, _ = alone(torch.optim.AdamW, 3, 3, begun, state)
    exact, _ = wanted
    assert_like(trained(tmp_path, 2, 3, tmp_path / "begun-1-2"), exact, continued)
    again = trained(tmp_path, 1, 3, tmp_path / "begun-1-2")
    torch.testing.assert_close(again, exact, rtol=0, atol=0)
