"""Log-probabilities of the kernels against float64, on the same logits: exact products, rounded once."""

import pytest
import torch

from qerl.kernels.triton import tile_gradient, tile_statistics
from qerl.models import logprobs as linear_logprobs

DEVICE = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: Standard deviation of the logits over 29, and the error that float32 leaves in values as large as theirs.
SHAPES = {"flat": (2.0**-10, 3e-6), "usual": (2.0**-4, 1e-5), "peaked": (1.0, 6e-5)}
#: Of gradients in a dtype: a rounding of the tile, one of the sum and, of the head's, one a block of rows.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}


def case(dtype, rows, vocabulary, scale, width=64):
    """Small integers by a power of two: float32 sums their products exactly, in whichever order."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda limit, *shape: torch.randint(-limit, limit + 1, shape, generator=generator)  # noqa: E731
    hidden = (scale * draw(2, rows, width)).to(DEVICE, dtype).requires_grad_()
    head = draw(4, vocabulary, width).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    return hidden, head, targets.to(DEVICE), torch.randn(rows, generator=generator).to(DEVICE)


def rounded_logits(hidden, head, dtype):
    return (hidden.detach().double() @ head.detach().double().T).to(dtype).double()


def statistics(logits, targets):
    """The targets' log-probabilities, the entropy and the probabilities."""
    full = torch.log_softmax(logits, -1)
    probabilities = full.exp()
    return full.gather(-1, targets[:, None])[:, 0], -(probabilities * full).sum(-1), probabilities


def logits_gradient(probabilities, targets, weights):
    return weights[:, None] * (torch.nn.functional.one_hot(targets, probabilities.shape[1]) - probabilities)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tile", "rows", "vocabulary"),
    [((2048, 16384), 300, 40_961), ((64, 5000), 150, 12_007), ((64, 512), 128, 1024), ((2048, 16384), 5, 37)],
)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(monkeypatch, dtype, keep, tile, rows, vocabulary, shape, temperature):
    monkeypatch.setattr(linear_logprobs, "ROWS", tile[0])
    monkeypatch.setattr(linear_logprobs, "COLUMNS", tile[1])
    scale, tolerance = SHAPES[shape]
    hidden, head, targets, weights = case(dtype, rows, vocabulary, scale)
    logprobs, entropy = linear_logprobs.logprobs_and_entropy(hidden, head, targets, temperature, keep)
    chosen, spread, probabilities = statistics(rounded_logits(hidden, head, dtype) / temperature, targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), chosen, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.double(), spread, rtol=0, atol=tolerance)
    found = torch.autograd.grad((logprobs * weights).sum(), (hidden, head))
    grad = logits_gradient(probabilities, targets, weights.double() / temperature).to(dtype).double()
    expected = grad @ head.detach().double(), grad.T @ hidden.detach().double()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert relative(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("cap", [None, linear_logprobs.SoftCap(5.0, 0.2)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_and_a_cap(monkeypatch, dtype, keep, cap):
    monkeypatch.setattr(linear_logprobs, "ROWS", 64)
    monkeypatch.setattr(linear_logprobs, "COLUMNS", 512)
    hidden, head, targets, weights = case(dtype, 150, 1500, SHAPES["usual"][0])
    bias = torch.linspace(-1, 1, len(head), device=head.device, dtype=dtype)
    logprobs, _ = linear_logprobs.logprobs_and_entropy(hidden, head, targets, 0.7, keep, bias=bias, cap=cap)
    wide = hidden.detach().double().requires_grad_()
    logits = wide @ head.detach().double().T + bias.double()
    if cap is not None:
        logits = 5.0 * (0.2 * logits).tanh()
    exact = torch.log_softmax(logits / 0.7, -1)[torch.arange(150, device=head.device), targets]
    rounding = torch.finfo(dtype).eps
    assert relative(logprobs, exact) < max(rounding, 1e-6)
    (found,) = torch.autograd.grad((logprobs * weights).sum(), hidden)
    (expected,) = torch.autograd.grad((exact * weights.double()).sum(), wide)
    assert relative(found, expected) < max(4 * rounding, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_is_rounded_once_to_nearest_in_the_place_of_its_tile(dtype):
    """The tile is the second of two: some targets lie in it, some before it."""
    hidden, head, targets, weights = case(dtype, 200, 1500, SHAPES["usual"][0])
    raw = rounded_logits(hidden, head, dtype)
    _, _, probabilities = statistics(raw / 0.7, targets)
    exact = logits_gradient(probabilities, targets, weights.double() / 0.7)[:, 500:]
    tile = raw[:, 500:].to(dtype).contiguous()
    found = tile_gradient(tile, 500, targets, torch.logsumexp(raw / 0.7, -1).float(), weights, 0.7)
    assert found.data_ptr() == tile.data_ptr()
    assert found.dtype == dtype
    rtol = torch.finfo(dtype).eps / 2 + 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_entropies_is_that_of_autograd(dtype):
    hidden, head, targets, weights = case(dtype, 200, 1500, SHAPES["usual"][0])
    raw = rounded_logits(hidden, head, dtype).requires_grad_()
    logprobs = torch.log_softmax(raw / 0.7, -1)
    spread = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    [exact] = torch.autograd.grad((chosen * weights.double() + spread * weights.double().flip(0)).sum(), raw)
    tile = raw.detach().to(dtype)
    _, lse, entropy = tile_statistics([(0, tile)], targets, 0.7)
    found = tile_gradient(tile, 0, targets, lse, weights, 0.7, entropy, weights.flip(0))
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero(shift):
    """The maximum rises from tile to tile, and exp of any logit is 0 or infinite."""
    logits = torch.linspace(-20, 20, 999, device=DEVICE).expand(4, -1) + shift
    targets = torch.tensor([0, 499, 500, 998], device=DEVICE)
    tiles = [(first, logits[:, first : first + 300].contiguous()) for first in range(0, 999, 300)]
    chosen, lse, entropy = tile_statistics(tiles, targets, 1.0)
    expected, spread, _ = statistics(logits.double(), targets)
    torch.testing.assert_close((chosen - lse).double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(entropy.double(), spread, rtol=0, atol=1e-5)


def test_a_logit_that_is_no_number_shows():
    logits = torch.randn(3, 100, device=DEVICE)
    logits[1, 70] = torch.nan
    _, lse, entropy = tile_statistics([(0, logits)], torch.zeros(3, dtype=torch.int64, device=DEVICE), 1.0)
    assert lse.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype", "tolerances"),
    [
        # Summed up in float32; entries of the tile that float32 and float64 round to two sides differ by a bit.
        (torch.bfloat16, torch.float32, (4e-3, 3e-4)),
        (torch.float32, torch.bfloat16, (1e-5, 4e-3)),
        (torch.float64, torch.float64, (1e-12, 1e-12)),
    ],
)
def test_a_head_of_another_dtype_and_float64(hidden_dtype, head_dtype, tolerances):
    """A float32 head is that of full fine-tuning; float64 goes through PyTorch."""
    hidden, head, targets, weights = case(hidden_dtype, 100, 3001, SHAPES["usual"][0])
    head = head.detach().to(head_dtype).requires_grad_()
    logprobs, _ = linear_logprobs.logprobs_and_entropy(hidden, head, targets, 0.7)
    chosen, _, probabilities = statistics(rounded_logits(hidden, head, hidden_dtype) / 0.7, targets)
    torch.testing.assert_close(logprobs.double(), chosen, rtol=0, atol=1e-5)
    found = torch.autograd.grad((logprobs * weights).sum(), (hidden, head))
    grad = logits_gradient(probabilities, targets, weights.double() / 0.7).to(hidden_dtype).double()
    expected = grad @ head.detach().double(), grad.T @ hidden.detach().double()
    assert [part.dtype for part in found] == [hidden_dtype, head_dtype]
    for ours, theirs, tolerance in zip(found, expected, tolerances, strict=True):
        assert relative(ours, theirs) < tolerance


def test_no_float32_tensor_of_the_size_of_a_tile_is_made():
    hidden, head, targets, weights = case(
        torch.bfloat16, 2 * linear_logprobs.ROWS + 5, 2 * linear_logprobs.COLUMNS + 7, 2.0**-4
    )
    head.requires_grad_(False)

    def both_ways():
        logprobs, _ = linear_logprobs.logprobs_and_entropy(hidden, head, targets)
        torch.autograd.grad((logprobs * weights).sum(), hidden)

    both_ways()  # cuBLAS takes its workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_ways()
    tile = linear_logprobs.ROWS * linear_logprobs.COLUMNS * torch.bfloat16.itemsize
    assert torch.cuda.max_memory_allocated() - before < 1.25 * tile
