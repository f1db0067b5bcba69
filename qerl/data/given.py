"""Records given as Python objects: a list, a generator, a function, a `datasets.Dataset`, or splits of these.

They become files in the folder of their run, which a resumed run reads as local data, and which record its training
data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.data.records import DataError, detect_format, parse_record
from qerl.data.sources import SPLITS, as_record, check_records, lines_of, renamed
from qerl.provenance.files import write_text
from qerl.settings.base import ConfigError, Settings
from qerl.settings.data import RecordFormat, Split

#: The folder of these files.
GIVEN = "given"

Records = Iterable[Mapping[str, Any]]
GivenData = Records | Mapping[Split, Records] | Callable[[], Records | Mapping[Split, Records]]


@dataclass(frozen=True)
class Given:
    """Values of `DatasetSettings`, and the files, with their text, that its origin names."""

    values: Any
    files: dict[Path, str]

    def write(self, replace: bool = True) -> None:
        """Write the files. Without `replace`, raises `ConfigError` if they differ from earlier ones."""
        for file, text in self.files.items():
            written = file.read_text(encoding="utf-8") if file.is_file() else None
            if written not in (None, text) and not replace:
                raise ConfigError(
                    f"{file} holds other records than `dataset` gives now; give another folder as `out`, or delete "
                    f"{file.parents[1]}"
                )
            if written != text:
                write_text(file, text)


def given(dataset: Any, folder: Path) -> Given:
    """A data set whose Python objects have become files in `folder`. A data set without objects is unchanged."""
    if is_given(dataset):
        return _as_files({}, dataset, folder / GIVEN)
    if isinstance(dataset, Mapping) and is_given(dataset.get("origin")):
        return _as_files(dataset, dataset["origin"], folder / GIVEN)
    return Given(dataset, {})


def is_given(value: Any) -> bool:
    """Whether a data set, or its origin, is Python objects and no path or settings."""
    if isinstance(value, Mapping):
        return any(is_given(value.get(split)) for split in SPLITS)
    return callable(value) or (isinstance(value, Iterable) and not isinstance(value, (str, bytes, Path, Settings)))


def _as_files(settings: Mapping[str, Any], objects: Any, folder: Path) -> Given:
    data = objects() if callable(objects) else objects
    by_split = isinstance(data, Mapping)
    files: dict[Path, str] = {}
    record_format: RecordFormat | None = settings.get("format")
    for name, records in data.items() if by_split else [("", data)]:
        if by_split and name not in SPLITS:
            raise DataError(f"dataset has a split {name!r}; the splits are {', '.join(SPLITS)}")
        where = f"dataset, split {name}" if by_split else "dataset"
        numbered = enumerate(check_records(records, f"{where} must be"), start=1)
        located = [(f"{where}, record {n}", as_record(r, f"{where}, record {n}")) for n, r in numbered]
        if not located:
            raise DataError(f"{where} holds no records; a generator can be read once only")
        for place, record in renamed(located, settings.get("columns") or {}):
            record_format = record_format or detect_format(record, place)
            parse_record(record, record_format, place, settings.get("units") or ())
        files[folder / f"{name or 'records'}.jsonl"] = lines_of(record for _, record in located)
    origin = {"source": "local", "path": folder if by_split else folder / "records.jsonl"}
    return Given({**settings, "format": record_format, "origin": origin}, files)
