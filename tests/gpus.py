"""What runs on which GPU, as the code that chooses says. `python -m tests.gpus` writes the table into the pages."""

import re
from pathlib import Path
from unittest.mock import patch

import torch

from qerl.host.gpus import Gpu, too_old, unsupported_accelerator
from qerl.plan.doctor import asked_model, serving

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/doctor.md"]
#: GPUs of each compute capability.
NAMES = {
    (7, 5): "RTX 20, T4",
    (8, 0): "A100",
    (8, 6): "RTX 30, A40",
    (8, 9): "RTX 40, L40S",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (10, 3): "B300",
    (12, 0): "RTX 50, RTX Pro 6000",
    (12, 1): "DGX Spark",
}
_HEAD = [
    "GPU (compute capability)",
    "NVFP4, MXFP4 in rollouts",
    "NF4 in rollouts",
    "attention, norms, sampling",
    "sampler",
    "`kv_cache_dtype: fp8`",
]
_REFUSED = ("not supported; a sentence at the start says what works instead", "", "", "", "")


def cells(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """What serves 7B on a GPU of a capability, or with None on a CPU, without the names of classes."""
    gpu = capability and Gpu("GPU", capability, 24 * 10**9, 24 * 10**9)
    answers = {weights: serving(gpu or None, asked_model("7B", weights)) for weights in ("nvfp4", "mxfp4", "nf4")}
    one = answers["nvfp4"]
    if one.unsupported:
        return _REFUSED
    products = {weights: re.sub(r".*?: | \(\w+\)", "", answer.products) for weights, answer in answers.items()}
    packed = " / ".join(dict.fromkeys((products["nvfp4"], products["mxfp4"])))
    return packed, products["nf4"], one.attention.partition(",")[0], one.sampler, "yes" if one.fp8_cache else "no"


def other_makers() -> list[str]:
    """The makers of accelerators that aren't supported."""
    fakes = {"AMD": (torch.version, "hip", "6.0"), "Apple": (torch.backends.mps, "is_available", lambda: True)}
    refused = []
    for maker, fake in fakes.items():
        with patch.object(*fake):
            refused += [maker] if maker in (unsupported_accelerator() or "") else []
    return refused


def table() -> str:
    """The table, in which GPUs that are served alike share a row."""
    served: dict[tuple[str, ...], list[str]] = {}
    # Those with kernels of their own first, those that aren't supported last.
    for one in sorted(NAMES, key=lambda one: (too_old("", one) is not None, one != (9, 0), one)):
        served.setdefault(cells(one), []).append(f"{NAMES[one]} ({one[0]}.{one[1]})")
    refused = served.pop(_REFUSED)
    rows = [(", ".join(names), *answer) for answer, names in served.items()]
    rows += [("none", *cells(None)), ("; ".join([*refused, "older", *other_makers()]), *_REFUSED)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [_HEAD, ["---"] * len(_HEAD), *rows])


def pages() -> dict[Path, str]:
    """The pages with the table as the code has it."""
    return {
        page: re.sub(r"\| GPU.*?\n\n", f"{table()}\n\n", page.read_text(), count=1, flags=re.DOTALL) for page in PAGES
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
