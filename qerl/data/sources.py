"""Where problems come from: generated, a local file or folder, the Hugging Face hub, a function of the user; and the
prepared folder.

A prepared data set is a folder with train.jsonl, validation.jsonl and test.jsonl (records in their own format, empty
for a split that the origin doesn't have) and dataset.json (format, instruction, form of the answers, origin, rows and
SHA-256 of each file).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from qerl.config import DatasetSettings, FunctionData, Generated, HubData, LocalData, RecordFormat, Split
from qerl.data.arithmetic import generate
from qerl.data.records import DataError, Problem, Record, detect_format, parse_record, question_id
from qerl.userfunction import load

SPLITS: tuple[Split, ...] = get_args(Split)
_SUFFIXES = (".jsonl", ".json", ".parquet")
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_Splits = dict[Split, list[Record]]


def prepare(settings: DatasetSettings, target: Path) -> None:
    """Write the prepared data set into the folder `target`; a `DataError` names the place of a bad record."""
    origin = settings.origin
    if isinstance(origin, Generated):
        splits = generate(settings.format, origin)
    elif isinstance(origin, LocalData):
        splits = _read_local(origin, settings.format)
    elif isinstance(origin, FunctionData):
        splits = _call(origin, settings.format)
    else:
        splits = _load_hub(origin)
    splits = _without_leaks(splits, settings.format)
    target.mkdir(parents=True, exist_ok=True)
    files = {split: _write(splits.get(split, []), split_file(target, split)) for split in SPLITS}
    meta = {
        "format": settings.format,
        "instruction": settings.instruction,
        "answer": settings.answer,
        "rows": {split: len(splits.get(split, [])) for split in SPLITS},
        "sha256": files,
        "origin": origin.model_dump(mode="json"),
    }
    (target / "dataset.json").write_text(json.dumps(meta, indent=2) + "\n")


def split_file(folder: Path, split: Split) -> Path:
    """Path of a split's records in a prepared folder."""
    return folder / f"{split}.jsonl"


def read_meta(folder: Path) -> dict[str, Any]:
    """Read dataset.json of a prepared folder: format, instruction, answer, rows, sha256, origin."""
    meta: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    return meta


def read_split(folder: Path, split: Split) -> list[Problem]:
    """Read the problems of one split of a prepared folder; an empty list if the set has no such split."""
    record_format = read_meta(folder)["format"]
    return [parse_record(record, record_format, where) for where, record in _records(split_file(folder, split))]


def check_problem_file(path: Path, record_format: RecordFormat | None = None) -> RecordFormat:
    """Validate every record of a local file, or of each file of a folder, and return the format.

    Without `record_format` the first record decides. A `DataError` names the file, the line and the missing key.
    """
    found = record_format
    for file in chain(*_split_files(path).values()) if path.is_dir() else [path]:
        rows = 0
        for where, record in _records(file):
            found = found or detect_format(record, where)
            parse_record(record, found, where)
            rows += 1
        if not rows:
            raise DataError(f"{file} holds no records")
    assert found is not None
    return found


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file, each with its place in words (file and line, or file and row)."""
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path} is no file of problems: expected one of {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"file of problems {path} doesn't exist")
    if path.suffix == ".jsonl":
        yield from _lines(path)
        return
    rows = _rows(path)
    for number, record in enumerate(rows, start=1):
        yield f"{path}, record {number}", record


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _as_record(_parse_json(line, where), where)


def _rows(path: Path) -> list[Record]:
    if path.suffix == ".parquet":
        return pd.read_parquet(path).to_dict("records")  # type: ignore[return-value]
    rows = _parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of records (for one record a line, name it .jsonl)")
    return [_as_record(row, f"{path}, record {number}") for number, row in enumerate(rows, start=1)]


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def _as_record(value: Any, where: str) -> Record:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is not a record: expected an object with keys, found {type(value).__name__}")
    return dict(value)


def _split_files(folder: Path) -> dict[Split, list[Path]]:
    """The files of a folder by split: train.jsonl, main/test.parquet, or shards like train-00000-of-00002.parquet"""
    files: dict[Split, list[Path]] = {}
    for split in SPLITS:
        found = sorted(p for p in folder.rglob(f"{split}*") if p.suffix in _SUFFIXES and p.is_file())
        if len(found) > 1 and not all(_SHARD.search(path.stem) for path in found):
            raise DataError(f"{folder} has several files for the split {split}: {', '.join(map(str, found))}; keep one")
        if found:
            files[split] = found
    if not files:
        raise DataError(f"{folder} has no file named train, validation or test ({', '.join(_SUFFIXES)})")
    return files


def _read_local(origin: LocalData, record_format: RecordFormat) -> _Splits:
    check_problem_file(origin.path, record_format)
    if origin.path.is_dir():
        files = _split_files(origin.path)
        return {split: [r for path in paths for _, r in _records(path)] for split, paths in files.items()}
    return _split_by_hash(_records(origin.path), origin, record_format)


def _call(origin: FunctionData, record_format: RecordFormat) -> _Splits:
    """The records that the user's function returns, each validated like one of a file."""
    returned = load(origin.function)()
    if not isinstance(returned, Mapping):
        return _split_by_hash(_numbered(returned, origin.function), origin, record_format)
    if unknown := [name for name in returned if name not in SPLITS]:
        raise DataError(f"{origin.function} returned a split {unknown[0]!r}; the splits are {', '.join(SPLITS)}")
    splits: _Splits = {}
    for split, records in returned.items():
        numbered = list(_numbered(records, f"{origin.function}, split {split}"))
        for where, record in numbered:
            parse_record(record, record_format, where)
        splits[split] = [record for _, record in numbered]
    return splits


def _numbered(records: Any, source: str) -> Iterator[tuple[str, Record]]:
    """Yield the records of a list, each with its place in words."""
    if not isinstance(records, list) or not records:
        found = "an empty one" if records == [] else type(records).__name__
        raise DataError(f"{source} must return a list of records (or a mapping of split names to lists), not {found}")
    for number, record in enumerate(records, start=1):
        yield f"{source}, record {number}", _as_record(record, f"{source}, record {number}")


def _split_by_hash(
    records: Iterator[tuple[str, Record]], origin: LocalData | FunctionData, record_format: RecordFormat
) -> _Splits:
    if origin.test_fraction + origin.validation_fraction > 1:
        raise DataError("origin.test_fraction and origin.validation_fraction add up to more than 1; lower one")
    splits: _Splits = {split: [] for split in SPLITS}
    for where, record in records:
        splits[_hashed_split(parse_record(record, record_format, where), origin)].append(record)
    return splits


def _hashed_split(problem: Problem, origin: LocalData | FunctionData) -> Split:
    """Place a problem by the hash of its question, so that adding records moves none of the others."""
    position = int(problem.id, 16) / 16 ** len(problem.id)
    if position < origin.test_fraction:
        return "test"
    return "validation" if position < origin.test_fraction + origin.validation_fraction else "train"


def _load_hub(origin: HubData) -> _Splits:
    import datasets  # costs a second, and only this origin needs it

    splits: _Splits = {}
    for split, name in origin.splits.items():
        try:
            rows = datasets.load_dataset(origin.repo, origin.subset, revision=origin.revision, split=name)
        except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
            subset = f" --include '{origin.subset}/*'" if origin.subset else ""
            command = f"hf download --repo-type dataset {origin.repo} --revision {origin.revision}{subset}"
            reason = str(error).splitlines()[0]
            raise DataError(f"can't load the data set {origin.repo} ({reason}); fetch it with `{command}`") from error
        splits[split] = [dict(row) for row in rows]
    return splits


def _without_leaks(splits: _Splits, record_format: RecordFormat) -> _Splits:
    """Drop a training record whose question is in another split, and all but the first of equal training questions."""

    def key(record: Record, split: Split, number: int) -> str:
        return question_id(parse_record(record, record_format, f"split {split}, record {number}").question)

    keys = {s: [key(r, s, n) for n, r in enumerate(records, start=1)] for s, records in splits.items()}
    held_out = {k for split in SPLITS if split != "train" for k in keys.get(split, [])}
    first = {k: r for k, r in reversed(list(zip(keys.get("train", []), splits.get("train", []), strict=True)))}
    kept = [first[k] for k in dict.fromkeys(keys.get("train", [])) if k not in held_out]
    return {**splits, "train": kept}


def _write(records: list[Record], path: Path) -> str:
    """Write one record a line; return the file's SHA-256."""
    content = "".join(json.dumps(record, ensure_ascii=False, default=_plain) + "\n" for record in records).encode()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers and arrays of parquet columns as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(f"a record holds a value of type {type(value).__name__}, which can't be written as JSON")
