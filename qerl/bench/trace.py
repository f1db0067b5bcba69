"""Traces: the token ids of logged completions, for rollouts that replay them.

    python -m qerl.bench.trace SAMPLES.jsonl CHECKPOINT TRACE.jsonl

SAMPLES is the samples.jsonl of an evaluation with several completions per problem; CHECKPOINT has the tokenizer of the
evaluated policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import typer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.host.provenance import check_writable
from qerl.results.schema import SampleRow
from qerl.results.speeds import TraceRow
from qerl.results.store import read_rows, write_rows


def traces(samples: Iterable[SampleRow], tokenizer: PreTrainedTokenizerBase) -> Iterator[TraceRow]:
    """One row per problem, in the order of the samples; a finished completion ends with the stop token."""
    for _, group in groupby(samples, key=lambda sample: (sample.dataset, sample.problem)):
        rows = list(group)
        completions = [_ids(tokenizer, row.completion, row.finished) for row in rows]
        yield TraceRow(prompt=_ids(tokenizer, rows[0].prompt, False), completions=completions)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, ended: bool) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.eos_token_id] if ended else ids


def main(samples: Path, checkpoint: Path, out: Path) -> None:
    """Write the trace of SAMPLES, tokenized by CHECKPOINT's tokenizer, to OUT."""
    check_writable(out)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    write_rows(out, traces(read_rows(SampleRow, samples), tokenizer))


if __name__ == "__main__":
    typer.run(main)
