"""A page with every number of the paper's speed tables beside vLLM's and ours, and the measurements that rows lack."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl.checkpoints.shapes import ARCHITECTURES
from qerl.report import paper
from qerl.report.format import DIFFERENT_MACHINES, NOT_RUN, gpu_label, times, weights_label
from qerl.report.paper import SPEED, Result, beside, ours_text, rollouts, sizes, steps, with_ratios, with_steps
from qerl.report.paper_figures import bars_beside
from qerl.report.tables import caption_text, write_table
from qerl.results import printed
from qerl.results.paths import decode_name, step_name
from qerl.results.printed import BARS, PROMPT, TOKENS
from qerl.results.schema import OK
from qerl.results.speeds import Kind
from qerl.results.store import read

# The table of the measurements that rows of the paper's Tables 3 and 5 to 9 and of Figures 1 and 11 lack.

#: The rank of rows for which the paper states none.
RANK = 16
OF_ANOTHER = "of another machine than BF16's"
_CAPTION = (
    "Measurements that the paper's tables and figures lack here, and those that have no ratio to BF16's. "
    "`qerl grid config/shapes.yaml` lists the jobs that make these files"
)


def rollout_file(cell: Mapping[Any, Any], engine: str) -> str:
    """The name of the decode file that has a cell of `paper.beside`, without its ending."""
    rank = RANK if pd.isna(cell["rank"]) else int(cell["rank"])
    return decode_name(engine, size_of(cell), cell["weights"], rank, PROMPT, TOKENS)


def step_file(cell: Mapping[Any, Any], system: str, group: int) -> str:
    """The name of the file of steps that has a cell of `paper.beside`, without its ending.

    A batch is of prompts of `group` completions, or, with a group of one, of completions of one prompt.
    """
    batch, recompute = settings_of(cell)["bs"], settings_of(cell).get("gc", "on")
    work = f"1x{batch}" if group == 1 else f"{batch}x{group}"
    variant = "recompute" if recompute == "on" else "no-recompute"
    return step_name(system, size_of(cell), cell["weights"], RANK, f"{work}-{PROMPT}x{TOKENS}", variant)


def missing_rollouts(frame: pd.DataFrame, engine: str, sequences: int) -> list[dict[str, Any]]:
    """The decode files and numbers of sequences that rows of `paper.beside` lack, a batch of one being `sequences`."""
    rows = []
    for cell, why in _lacking(frame, "rollout_rate", "rollout_speedup"):
        count = sequences * int(settings_of(cell)["bs"])
        rows.append({"file": rollout_file(cell, engine), "why": why, "sequences": count, "of": cell["table"]})
    return rows


def missing_steps(frame: pd.DataFrame, system: str, group: int) -> list[dict[str, Any]]:
    """The files of steps that rows of `paper.beside` lack, in the reading of `step_file`."""
    rows = []
    for cell, why in _lacking(frame, "step_seconds", "step_speedup"):
        count = int(settings_of(cell)["bs"]) * group
        rows.append({"file": step_file(cell, system, group), "why": why, "sequences": count, "of": cell["table"]})
    return rows


def write_missing(rows: Iterable[dict[str, Any]], out: Path) -> None:
    """Write the table paper-missing with a row per file and reason, or none if nothing is missing."""
    frame = pd.DataFrame(rows)
    if frame.empty:
        return
    joined = frame.groupby(["file", "why"], sort=False).agg(
        sequences=("sequences", lambda counts: ", ".join(map(str, sorted(set(counts))))),
        of=("of", lambda names: ", ".join(sorted(set(names)))),
    )
    table = joined.reset_index().rename(columns={"of": "tables and figures"})
    write_table(table, out / "paper-missing", f"{_CAPTION}.", table)


def _lacking(frame: pd.DataFrame, measured: str, ratio: str) -> Iterator[tuple[dict[Any, Any], str]]:
    """The cells without a measurement, and those without a ratio to BF16's because it is of another machine."""
    for cell in frame.to_dict("records"):
        if cell["metric"] == measured and cell["status"].startswith(NOT_RUN):
            yield cell, NOT_RUN
        elif (cell["metric"], cell["status"]) == (ratio, DIFFERENT_MACHINES):
            yield cell, OF_ANOTHER


def size_of(cell: Mapping[Any, Any]) -> str:
    """The size of the model of a cell of `paper.beside`, such as 7B."""
    return str(cell["model"]).removeprefix("qwen2.5-").upper()


def settings_of(cell: Mapping[Any, Any]) -> dict[str, str]:
    """The settings of a cell, such as the batch size `bs`."""
    return dict(part.split("=") for part in cell["setting"].split("; ") if part)


# The paper's speeds beside those of the speed grid: rollouts (Tables 5 to 9, Figures 1 and 11) and GRPO steps (Tables 3
# and 5 to 8).
#
# The paper's lengths are prompts of 256 tokens and completions of 2,048. It doesn't state what its batch size counts:
# one reading takes it as concurrent sequences, another as prompts of 8 completions each. It measured with vLLM; here
# each engine has its own tables. So has each system that makes steps, compared with its own BF16 LoRA. Rates are those
# of whole rollouts, including the prompts' time.

#: By reading of the paper's batch size: the number of sequences that a batch size of one means.
READINGS = {"sequences": 1, "prompts": 8}

ROLLOUT_TABLES = ("table5", "table6", "table7", "table8", "table9")
STEP_TABLES = ("table5", "table6", "table7", "table8")
#: Gradient checkpointing by the step's stored `recompute`; a step whose system chooses by itself has neither value.
_CHECKPOINTING = {"true": "on", "false": "off"}
#: What a batch size counts in each reading.
COUNTED = {"sequences": "concurrent sequences", "prompts": f"prompts of {READINGS['prompts']} completions"}


def write_rollout_tables(points: pd.DataFrame, out: Path) -> list[dict[str, Any]]:
    """Write the tables and figures <name>-<engine>-<reading> that have at least one measured point.

    points: from `speed_readers.load`; those of other models and lengths are ignored. Returns what
        `write_missing` takes: the measurements that rows lack, of this project's engine and of vLLM; nothing without a
        point.
    """
    missing: list[dict[str, Any]] = []
    of_paper = points_of_paper(points)
    if of_paper.empty:
        return missing
    for engine in dict.fromkeys(["native", "vllm", *of_paper["engine"]]):
        for reading, sequences in READINGS.items():
            bench = as_rollouts(of_paper, str(engine), sequences)
            for name in ROLLOUT_TABLES:
                title = f"Rollout throughput beside the paper's {_told(name, str(engine), reading)}"
                frame = beside_printed([name], ["rollout"], rollouts(bench))
                _write(frame, out / f"{name}-{engine}-{reading}", title, bench)
                missing += missing_rollouts(frame, engine, sequences)
            for name, files in printed.BARS.items():
                frame = beside_printed(files, ["rollout"], rollouts(bench))
                missing += missing_rollouts(frame, engine, sequences)
                if (frame["status"] == OK).any():
                    bars_beside(frame, out / f"{name}-{engine}-{reading}")
    return missing


def write_step_tables(measured: pd.DataFrame, out: Path) -> list[dict[str, Any]]:
    """Write table5 to table8-<system>-<reading>, and table3-<system>-<reading>-gc-on and -off.

    Table 3 has both because the paper doesn't state its gradient checkpointing. Tables without a measured step are left
    out.

    measured: from `speed_readers.load`; steps of other models, of other or mixed lengths, under a memory cap
        or with equal rewards are ignored. Returns the measurements of this project that rows lack, as
        `write_rollout_tables` does.
    """
    of_paper = steps_of_paper(measured)
    missing: list[dict[str, Any]] = []
    if of_paper.empty:
        return missing
    for system in dict.fromkeys(["qerl", *_systems(of_paper)]):
        for reading, sequences in READINGS.items():
            bench, stem = as_steps(of_paper, system, sequences), f"{system.lower()}-{reading}"
            for name in STEP_TABLES:
                frame = _write_steps(name, bench, out / f"{name}-{stem}", _told(name, system, reading))
                missing += missing_steps(frame, system, sequences) if system == "qerl" else []
            for on in (True, False):
                group = bench[bench["gradient_checkpointing"] == on] if len(bench) else bench
                title = f"{_told('table3', system, reading)}, {'with' if on else 'without'} gradient checkpointing"
                frame = _write_steps("table3", group, out / f"table3-{stem}-gc-{'on' if on else 'off'}", title)
                missing += missing_steps(frame, system, sequences) if system == "qerl" and on else []
    return missing


def _write_steps(name: str, bench: pd.DataFrame, stem: Path, reading: str) -> pd.DataFrame:
    sized = bench.dropna(subset="size_bytes") if len(bench) else bench
    frame = beside_printed([name], ["step", "size"], [*steps(bench), *sizes(sized, "weights in memory")])
    _write(frame, stem, f"GRPO step beside the paper's {reading}; our sizes are those in memory", bench)
    return frame


def _told(table: str, system: str, reading: str) -> str:
    return f"Table {table.removeprefix('table')}: {system}, batch size read as {COUNTED[reading]}"


def _write(frame: pd.DataFrame, stem: Path, title: str, bench: pd.DataFrame) -> None:
    if not any(map(paper.measured, frame.to_dict("records"))):
        return
    shown, footnotes = paper.paper_shape(frame)
    write_table(frame, stem, caption_text(f"{title}. {SPEED}", bench[["machine", "commit"]]), shown, footnotes)


def beside_printed(files: Sequence[str], kinds: Collection[str], results: Iterable[Result]) -> pd.DataFrame:
    """Printed numbers of these kinds and files beside ours, for the models of the first file."""
    cells = [cell for file in files for cell in printed.read_cells(printed.FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    cells = [cell for cell in cells if cell.kind in kinds and cell.model in models]
    return beside(with_steps(with_ratios(cells)), results)


def points_of_paper(points: pd.DataFrame) -> pd.DataFrame:
    """The points of the paper's models and lengths; none of an empty frame."""
    return points[_of_paper(points)] if len(points) else points


def steps_of_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """The steps of the paper's models, lengths and rewards, without a cap, with all blocks recomputed or none."""
    if measured.empty:
        return measured
    alike = (measured["equal_groups"] == 0) & (measured["median"] == 0)
    plain = alike & (measured["cap"] == "") & measured["recompute"].isin(_CHECKPOINTING)
    return measured[plain & _of_paper(measured)]


def _of_paper(measured: pd.DataFrame) -> pd.Series:
    """Whether points or steps are of the paper's models and lengths."""
    of_lengths = (measured["prompt"] == printed.PROMPT) & (measured["tokens"] == printed.TOKENS)
    return of_lengths & measured["size"].isin(ARCHITECTURES)


def as_rollouts(points: pd.DataFrame, engine: str, sequences: int) -> pd.DataFrame:
    """An engine's points in the columns of `readers.load_benches`; a batch of one in the paper is `sequences` here."""
    whole = points[(points["engine"] == engine) & (points["sequences"] % sequences == 0)]
    return pd.DataFrame([_rollout(point, sequences) for point in whole.to_dict("records")])


def _rollout(point: dict[Any, Any], sequences: int) -> dict[str, Any]:
    drawn = point["sequences"] * point["tokens"]
    return _identity(point, point["engine"]) | {
        "sequences": point["sequences"] // sequences,
        "samples": [drawn / (drawn / rate + point["prompt_seconds"]) for rate in point["samples"]],
    }


def _systems(measured: pd.DataFrame) -> pd.Series:
    return measured["system"].str.split().str[0]


def as_steps(measured: pd.DataFrame, system: str, sequences: int) -> pd.DataFrame:
    """A system's steps in the columns of `readers.load_benches`.

    sequences: completions that a batch of one means. With more than one, only steps with groups of that size count.
    """
    of_system = measured[_systems(measured) == system]
    whole = of_system[(of_system["group_size"] == sequences) | (sequences == 1)]
    return pd.DataFrame([_step(step, system, sequences) for step in whole.to_dict("records")])


def _step(step: dict[Any, Any], system: str, sequences: int) -> dict[str, Any]:
    return _identity(step, system) | {
        "arm": step["weights"],
        "method": "lora",
        "prompts": step["prompts"],
        "group_size": step["group_size"],
        "gradient_checkpointing": _CHECKPOINTING[step["recompute"]] == "on",
        "sequences": step["prompts"] * step["group_size"] // sequences,
        "samples": step["samples"],
        "size_bytes": 1e9 * step.get("weights/gb", np.nan),
    }


def _identity(row: dict[Any, Any], system: str) -> dict[str, Any]:
    return {
        # Only points of one bench are compared, and so of one machine.
        "bench": f"{system} on {row['machine']}",
        "model": f"qwen2.5-{row['size'].lower()}",
        "weights": row["weights"],
        "rank": row["rank"],
        "status": row["status"],
        "machine": row["machine"],
        "commit": row["commit"],
    }


# A page with every number of the paper's speed tables beside vLLM's and ours, whose numbers lead to their samples.

#: The cells of one printed row, by metric.
_Row = dict[str, dict[Any, Any]]
_ROLLOUTS = {**{name: (name,) for name in ROLLOUT_TABLES}, **BARS}
_HEAD = """# The paper's speed tables, number by number

Numbers of vLLM and of this project lead to their samples, each with its stamp. All have LoRA on every projection, at
rank {rank} where the paper states none, prompts of {prompt} tokens, completions of {tokens}, and random weights. The
paper measured on an H100 of 80 GB, rollouts with vLLM.

Samples are of an {gpu}, or of the GPU in brackets. Tokens/s and seconds depend on the machine. Ratios, to BF16 LoRA of
the same system, can be compared, and sizes are those of the weights in memory. Where a cell is empty, the paper prints
nothing, or there is nothing to compare. The paper contradicts a number with * elsewhere; the other tables of the
workflow say where.
"""


class _Samples:
    """The files of samples by name, their GPUs, and the folder in which the page will be."""

    def __init__(self, kinds: Mapping[Path, Kind], folder: Path) -> None:
        self._files = {file.stem: file for file in kinds}
        self._folder = folder
        self._machines = {file.stem: kind.provenance.machine.label for file, kind in kinds.items()}
        self.usual = Counter(self._machines.values()).most_common(1)[0][0]

    def machine(self, name: str) -> str | None:
        """The machine of a file, if it is there."""
        return self._machines.get(name)

    def linked(self, name: str, cell: Mapping[Any, Any]) -> str:
        """Our number in a cell, or why there is none, with a link to its file and the GPU if it isn't the usual one."""
        text = ours_text(cell)
        if name not in self._files or text.startswith(NOT_RUN):
            return text
        link = f"[{text}]({os.path.relpath(self._files[name], self._folder)})"
        return link if self._machines[name] == self.usual else f"{link} ({_gpu(self._machines[name])})"


def paper_page(points: pd.DataFrame, measured: pd.DataFrame, files: Sequence[Path], folder: Path) -> str:
    """The page in Markdown, with links to the files, relative to the folder in which it will be.

    points, measured: of `speed_readers.load`, from the files; each may be empty. Without work
    of the paper's models and lengths the page is empty.
    """
    points, measured = points_of_paper(points), steps_of_paper(measured)
    if points.empty and measured.empty:
        return ""
    samples = _Samples({file: read(Kind, file) for file in files}, folder)
    head = _HEAD.format(prompt=PROMPT, tokens=f"{TOKENS:,}", rank=RANK, gpu=_gpu(samples.usual))
    return "\n".join([head, *_sections(points, measured, samples)])


def _sections(points: pd.DataFrame, measured: pd.DataFrame, samples: _Samples) -> Iterator[str]:
    """For each reading of a batch its tables, with headings."""
    for reading, sequences in READINGS.items():
        yield f"## Batch size read as {COUNTED[reading]}\n"
        for name in () if points.empty else _ROLLOUTS:
            yield _table(f"{_title(name)}: rollouts", _rollout_rows(name, points, sequences, samples))
        for name in () if measured.empty else ("table3", *STEP_TABLES):
            yield _table(f"{_title(name)}: GRPO steps", _step_rows(name, measured, sequences, samples))


def _gpu(machine: str) -> str:
    return gpu_label(machine).split()[0]


def _title(name: str) -> str:
    return name.replace("table", "Table ").replace("figure", "Figure ")


def _table(title: str, rows: Iterable[dict[str, str]]) -> str:
    return f"### {title}\n\n{pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)}\n"


def _rollout_rows(name: str, points: pd.DataFrame, sequences: int, samples: _Samples) -> Iterator[dict[str, str]]:
    """A row for each rate that the table or figure prints."""
    theirs, ours = (
        _printed_rows(_ROLLOUTS[name], ["rollout"], rollouts(as_rollouts(points, engine, sequences)))
        for engine in ("vllm", "native")
    )
    for place, row in ours.items():
        rate, stock = row.get("rollout_rate"), theirs[place]
        if rate is None or rate["table"] != name:
            continue
        files = [rollout_file(rate, engine) for engine in ("vllm", "native")]
        yield {
            **_key(rate),
            "paper, tokens/s": _printed(row, "rollout_rate"),
            "vLLM, tokens/s": samples.linked(files[0], stock["rollout_rate"]),
            "ours, tokens/s": samples.linked(files[1], rate),
            "ours over vLLM": _lead(rate, stock["rollout_rate"], *map(samples.machine, files)),
            "over BF16: paper": _printed(row, "rollout_speedup"),
            "over BF16: vLLM": _ours(stock, "rollout_speedup"),
            "over BF16: ours": _ours(row, "rollout_speedup"),
        }


def _step_rows(name: str, measured: pd.DataFrame, sequences: int, samples: _Samples) -> Iterator[dict[str, str]]:
    """A row for each step whose speed-up or seconds the table prints; Table 3 with gradient checkpointing."""
    bench = as_steps(measured, "qerl", sequences)
    if name == "table3" and len(bench):
        bench = bench[bench["gradient_checkpointing"]]
    sized = bench.dropna(subset="size_bytes") if len(bench) else bench
    rows = _printed_rows([name], ["step", "size"], [*steps(bench), *sizes(sized)])
    of_size = {place[:2]: row for place, row in rows.items() if "size" in row}
    for place, row in rows.items():
        if "step_seconds" not in row:
            continue
        seconds, size = row["step_seconds"], of_size[place[:2]]
        yield {
            **_key(seconds),
            "paper, GB": _printed(size, "size"),
            "ours, GB": _ours(size, "size"),
            "paper, s/step": _printed(row, "step_seconds"),
            "ours, s/step": samples.linked(step_file(seconds, "qerl", sequences), seconds),
            "over BF16: paper": _printed(row, "step_speedup"),
            "over BF16: ours": _ours(row, "step_speedup"),
        }


def _printed_rows(files: Sequence[str], kinds: list[str], results: Iterable[Result]) -> dict[tuple[Any, ...], _Row]:
    """The cells of each printed row beside some results, by what identifies the row: model and weights first."""
    rows: dict[tuple[Any, ...], _Row] = {}
    for cell in beside_printed(files, kinds, results).to_dict("records"):
        place = cell["model"], cell["weights"], str(cell["rank"]), cell["setting"]
        rows.setdefault(place, {})[cell["metric"]] = cell
    return rows


def _key(cell: Mapping[Any, Any]) -> dict[str, str]:
    setting = settings_of(cell)
    rank = {} if pd.isna(cell["rank"]) else {"rank": str(cell["rank"])}
    checkpointing = {"gradient checkpointing": setting["gc"]} if "gc" in setting else {}
    return {
        "model": size_of(cell),
        "weights": weights_label(cell["weights"]),
        **rank,
        **checkpointing,
        "batch": setting["bs"],
    }


def _printed(row: _Row, metric: str) -> str:
    cell = row.get(metric, {"printed": "", "inconsistent": ""})
    return f"{cell['printed']}{'*' if cell['inconsistent'] else ''}"


def _ours(row: _Row, metric: str) -> str:
    return ours_text(row[metric]) if metric in row else ""


def _lead(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], *machines: str | None) -> str:
    """Our rate over vLLM's of the same weights, if both are of one kind of machine."""
    if (ours["status"], theirs["status"]) != (OK, OK):
        return ""
    return times(ours["ours"] / theirs["ours"]) if len({*machines}) == 1 else DIFFERENT_MACHINES
