"""Sources of problems (generated, files, the hub, a function, Python objects) and a data set's prepared folder."""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np

from qerl.data import generated
from qerl.data.hub import COMPRESSIONS, DATA_SUFFIXES, HubFiles, data_files, hub_files, key_of, read_lock, suffix_of
from qerl.data.records import (
    DataError,
    Located,
    Problem,
    Record,
    Row,
    as_record,
    distinct,
    parse_record,
    parse_records,
    warn_of_notation,
)
from qerl.host.console import log
from qerl.host.imports import call
from qerl.host.provenance import write_text
from qerl.jobs import DataJob
from qerl.results.paths import DATASET
from qerl.results.schema import PreparedDataset, read, write
from qerl.settings.base import ConfigError, Settings, can_name_a_file, check_unicode, not_empty, parse
from qerl.settings.data import (
    DatasetSettings,
    FilterSettings,
    FunctionData,
    GeneratedSplits,
    HubData,
    LocalData,
    RecordFormat,
    Split,
)
from qerl.settings.models import LockedRepo
from qerl.settings.run import RunFile

# The files of a folder of records by split: train.jsonl, main/test.parquet, or shards as the hub has them.

SPLITS: tuple[Split, ...] = get_args(Split)
#: The end of the name of a shard, such as train-00000-of-00002.parquet.
_SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})$")
#: Names of validation and test files elsewhere, which would be left out silently.
_OTHER_NAMES = ("val", "valid", "dev", "eval", "evaluation")
#: Files of records elsewhere, which would be left out silently too.
_OTHER_SUFFIXES = (".tsv", ".arrow", ".bz2", ".xz")
CONVERT = "`to_parquet` of pandas and datasets writes such a file"


def split_files(folder: Path) -> dict[Split, list[Path]]:
    """The files of each split that the folder has. Files in hidden folders don't count.

    Raises `DataError` for a split of several files that aren't all its shards, and for files that would be left out.
    """
    paths = [path for path in data_files(folder) if path.is_file() and suffix_of(path) in DATA_SUFFIXES]
    files: dict[Split, list[Path]] = {}
    for split in SPLITS:
        if not (matches := [path for path in paths if path.name.startswith(split)]):
            continue
        counts = [match and int(match.group(1)) for match in (_SHARD.search(_stem(path)) for path in matches)]
        if len(matches) > 1 and (None in counts or len({path.parent for path in matches}) > 1):
            raise DataError(
                f"{folder} has several files for the split {split}: {', '.join(map(str, matches))}; keep one, name one "
                "of its folders, or (a copy of a hub repository) use source: hub with `folder` and `subset`"
            )
        if counts[0] not in (None, len(matches)):
            raise DataError(f"{folder} has {len(matches)} of {counts[0]} files of the split {split}; download it again")
        files[split] = matches
    for path in paths:
        if _SHARD.sub("", _stem(path)) in _OTHER_NAMES:
            raise DataError(f"{path} names no split; rename it to validation or test, or move it out of {folder}")
    lacking = {*SPLITS, *_OTHER_NAMES} - files.keys()
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _OTHER_SUFFIXES and _SHARD.sub("", _stem(path)) in lacking:
            raise DataError(
                f"{path} isn't read: expected one of {', '.join(DATA_SUFFIXES)}; {CONVERT}; or move it out of {folder}"
            )
    if not files:
        raise DataError(f"{folder} has no file named train, validation or test ({', '.join(DATA_SUFFIXES)}); {CONVERT}")
    return files


def _stem(path: Path) -> str:
    """A file's name up to its first point."""
    return path.name.partition(".")[0]


# Sources of problems (generated, a local file or folder, the Hugging Face hub, a function) and the prepared folder.
#
# A prepared data set is a folder with train.jsonl, validation.jsonl and test.jsonl. These have records in their own
# format and are empty for a split that the origin lacks. dataset.json has format, instruction, answer form, origin, and
# what was renamed and filtered. It also has the rows and SHA-256 of each file, and for the hub the SHA-256 of the
# repository's files.


def prepare(settings: DatasetSettings, target: Path, locked: LockedRepo | None = None) -> None:
    """Write the prepared data set into the folder `target`. A `DataError` names the place of a bad record.

    `locked` is the lock file's entry for the repository of a `HubData`, if there is one.
    """
    origin = settings.origin
    hub = hub_files(origin, locked) if isinstance(origin, HubData) else None
    splits = distinct(_filter(_read(settings, hub), settings.filter), settings.format)
    target.mkdir(parents=True, exist_ok=True)
    sha256 = {}
    for split in SPLITS:
        rows = splits.get(split, [])
        warn_of_notation(split, [row.problem for row in rows], settings.format, settings.answer, settings.units)
        content = lines_of(row.record for row in rows).encode()
        split_file(target, split).write_bytes(content)
        sha256[split] = hashlib.sha256(content).hexdigest()
    about = PreparedDataset(
        **{**settings.form, "date": settings.date or date.today()},
        format=settings.format,
        rows={split: len(splits.get(split, [])) for split in SPLITS},
        sha256=sha256,
        columns=settings.columns,
        filter=settings.filter.model_dump(mode="json"),
        origin=origin.model_dump(mode="json"),
        repository_files=hub.hashes if hub else {},
    )
    write(target / DATASET, about)


def split_file(folder: Path, split: Split) -> Path:
    """Path of a split's records in a prepared folder."""
    return folder / f"{split}.jsonl"


def read_meta(folder: Path) -> PreparedDataset:
    """Read dataset.json of a prepared folder."""
    return read(PreparedDataset, folder / DATASET)


def read_split(folder: Path, split: Split) -> list[Problem]:
    """Read the problems of one split of a prepared folder, with the data set's system message in their chats.

    The list is empty if the set has no such split.
    """
    meta, file = read_meta(folder), split_file(folder, split)
    located = _records(file)
    problems = [parse_record(record, meta.format, where, meta.units).under(meta.system) for where, record in located]
    if len(problems) != meta.rows[split]:
        raise DataError(
            f"{file} holds {len(problems)} records, not the {meta.rows[split]} that were written; delete {folder}, "
            "to have it prepared again"
        )
    return problems


def read_records(folder: Path, split: Split) -> list[Record]:
    """Read the records of one split of a prepared folder, with all their columns."""
    return [record for _, record in _records(split_file(folder, split))]


def check_problem_file(
    path: Path,
    record_format: RecordFormat | None = None,
    columns: Mapping[str, str] | None = None,
    units: Collection[str] = (),
) -> RecordFormat:
    """Validate every record of a local file, or of each file of a folder, and return the format.

    The parameters are those of `parse_records`. A `DataError` names the file, the line and the missing key.
    """
    data = _local(path)
    located = data if isinstance(data, list) else chain(*data.values())
    return parse_records(located, record_format, columns or {}, units)[0]


def _local(path: Path) -> Mapping[Split, Iterable[Located]] | list[Located]:
    """The records of a file, or of each split of a folder; a folder of `save_to_disk` has one data set or splits."""
    if not path.is_dir():
        return _file(path)
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return {split: chain(*map(_file, paths)) for split, paths in split_files(path).items()}
    import datasets  # takes a second to import
    import pyarrow as pa

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} can't be read by `load_from_disk` of datasets: {error}") from None
    data = saved if isinstance(saved, datasets.DatasetDict) else {"": saved}
    # As tables, so that no image or sound of a column that isn't used is decoded.
    rows = {
        name: [row for table in one.with_format("arrow").iter(1024) for row in _rows(table, path)]
        for name, one in data.items()
    }
    return _locate(rows if data is saved else rows[""], str(path))


def _file(path: Path) -> list[Located]:
    records = list(_records(path))
    if not records:
        raise DataError(f"{path} holds no records")
    return records


def _records(path: Path) -> Iterator[Located]:
    """Yield the records of a file, each with its place as text (file and line, or file and row)."""
    if not path.exists():
        raise DataError(f"file of problems {path} doesn't exist (a data set of the hub needs `source: hub`, `repo`)")
    if (suffix := suffix_of(path)) not in DATA_SUFFIXES:
        raise DataError(f"{path} is no file of problems: expected one of {', '.join(DATA_SUFFIXES)}; {CONVERT}")
    if suffix in (".jsonl", ".ndjson"):
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    # A line that is a part of one JSON text, such as a list over several lines.
                    is_part = line.removeprefix(BOM_UTF8).strip() in (b"[", b"{")
                    hint = "; write one record a line, or name a file that holds one list .json" if is_part else ""
                    # Without its end, as an error would else be placed on a second line.
                    yield where, as_record(_parse_json(line.rstrip(), where, hint), where)
        return
    if suffix in (".parquet", ".csv"):
        rows: Any = _table_rows(path, suffix)
    else:
        with _opened(path) as file:
            rows = _parse_json(file.read(), str(path), "; name a file with one record a line .jsonl")
        if not isinstance(rows, list):
            raise DataError(f"{path} must hold a list of records (for one record a line, name it .jsonl)")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, record {number}", as_record(row, f"{path}, record {number}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, without the compression that its name states."""
    if (compression := COMPRESSIONS.get(path.suffix.lower())) is None:
        with path.open("rb") as file:
            yield file
        return
    import pyarrow as pa

    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            yield BufferedReader(stream)
    except OSError as error:
        raise DataError(f"{path} isn't compressed as its name says: {error}") from None


def _table_rows(path: Path, suffix: str) -> list[Record]:
    """The rows of a parquet or CSV file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with _opened(path) as file:
            return _rows(parquet.ParquetFile(file).read() if suffix == ".parquet" else _csv_table(file.read()), path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a valid {suffix[1:]} file: {error}") from None


def _csv_table(content: bytes) -> Any:
    """The table of a CSV file with a line of names. Columns are numbers, truth values or text, not dates or times.

    A column is text, too, if one of its numbers has more digits than a float keeps.
    """
    import pyarrow as pa
    from pyarrow import csv

    parsing = csv.ParseOptions(newlines_in_values=True)
    table = csv.read_csv(pa.py_buffer(content), parse_options=parsing)
    if binary := [field.name for field in table.schema if pa.types.is_binary(field.type)]:
        raise ValueError(f"the column `{binary[0]}` is not in UTF-8; save the file as UTF-8")
    texts = {f.name: pa.string() for f in table.schema if pa.types.is_temporal(f.type) or pa.types.is_floating(f.type)}
    options = csv.ConvertOptions(column_types=texts)
    written = csv.read_csv(pa.py_buffer(content), parse_options=parsing, convert_options=options) if texts else table
    for index, name in enumerate(table.column_names):
        # Written again, as 10:30:00, a time wouldn't be the text that it was, nor would a large whole number.
        if any(map(_is_another, table.column(index).to_pylist(), written.column(index).to_pylist())):
            table = table.set_column(index, name, written.column(index))
    return table


def _is_another(value: Any, text: str) -> bool:
    """Whether a value of a CSV file, which is a float, a date or a time, isn't what the text says."""
    if isinstance(value, float):
        return abs(value) >= 2**53 and Decimal(text) != Decimal(str(value))
    return isinstance(value, (date, time))


def _rows(table: Any, path: Path) -> list[Record]:
    """The rows of a table with each number as it was written, also in a column with gaps or of 32 bits."""
    import pyarrow as pa

    if len(names := table.column_names) > len(set(names)):
        raise DataError(f"{path} has the column `{Counter(names).most_common(1)[0][0]}` twice; keep one")
    for index, field in enumerate(table.schema):
        if pa.types.is_float32(field.type):  # as text 0.1, and 0.10000000149011612 as a number of 64 bits
            exact = table.column(index).cast(pa.string()).cast(pa.float64())
            table = table.set_column(index, field.name, exact)
    return table.to_pylist()  # type: ignore[no-any-return]


def _parse_json(text: bytes, where: str, hint: str = "") -> Any:
    """The value of a JSON text in UTF-8 that can be written as such again; errors end in `hint`.

    A mark of byte order before it, as some editors write, is no part of it.
    """
    try:
        value = json.loads(text.removeprefix(BOM_UTF8).decode(), object_pairs_hook=partial(_object, where))
        json.dumps(value, ensure_ascii=False).encode()
    except DataError:
        raise
    # Broken JSON, other encodings, lone surrogates, numbers with thousands of digits and deep nesting.
    except (ValueError, RecursionError) as error:
        hint = "; save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else hint
        raise DataError(f"{where} is not valid JSON in UTF-8: {error}{hint}") from None
    return value


def _object(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `DataError` for one with a key twice, of which only one value could count."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise DataError(f"{where} has the key `{twice}` twice in one object; keep one")
    return value


def _read(settings: DatasetSettings, hub: HubFiles | None) -> dict[Split, list[Row]]:
    """The records of the origin by split, under the names of the format's columns."""
    origin, columns = settings.origin, settings.columns
    data: Mapping[Split, Iterable[Located]] | list[Located]
    if isinstance(origin, GeneratedSplits):
        made, columns = generated.generate(origin, settings.format), {}
        data = {split: [(f"generated {split}", record) for record in records] for split, records in made.items()}
    elif isinstance(origin, FunctionData):
        data = _locate(call(origin.function, key="origin.function"), origin.function)
    elif isinstance(origin, LocalData):
        data = _local(origin.path)
    else:
        data = {split: chain(*map(_file, paths)) for split, paths in (hub.splits if hub else {}).items()}

    def parse(located: Iterable[Located]) -> list[Row]:
        return parse_records(located, settings.format, columns, settings.units)[1]

    if not isinstance(data, list):
        fields = type(origin).model_fields
        for name in ("validation_fraction", "test_fraction"):
            if name in fields and getattr(origin, name) != fields[name].default:
                raise DataError(
                    f"origin.{name} divides one list of records, and these come in splits already; remove it, or name "
                    "one file"
                )
        return {split: parse(located) for split, located in data.items()}
    assert isinstance(origin, (LocalData, FunctionData))
    if origin.test_fraction + origin.validation_fraction > 1:
        raise DataError("origin.test_fraction and origin.validation_fraction add up to more than 1; lower one")
    divided: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    for row in parse(data):
        # By the hash of its question, so that new records don't move others.
        position = int(row.problem.id, 16) / 16 ** len(row.problem.id)
        held_out = position < origin.test_fraction + origin.validation_fraction
        split: Split = "test" if position < origin.test_fraction else "validation" if held_out else "train"
        divided[split].append(row)
    return divided


def _locate(data: Any, source: str) -> dict[Split, list[Located]] | list[Located]:
    """Records that Python code gives, or splits of records, each with its place as text."""
    if not isinstance(data, Mapping):
        return _locate_all(data, source)
    if unknown := [name for name in data if name not in SPLITS]:
        raise DataError(f"{source} has a split {unknown[0]!r}; the splits are {', '.join(SPLITS)}")
    return {split: _locate_all(records, f"{source}, split {split}") for split, records in data.items()}


def _locate_all(records: Any, source: str) -> list[Located]:
    if hasattr(records, "iterrows"):  # a DataFrame, which iterates over the names of its columns
        raise DataError(f'{source} must be records, not a {type(records).__name__}; give its `.to_dict("records")`')
    if isinstance(records, (str, bytes, Mapping)) or not isinstance(records, Iterable):
        raise DataError(
            f"{source} must be records, such as a list of them (or a mapping of split names to such), not "
            f"{type(records).__name__}"
        )
    places = ((f"{source}, record {number}", record) for number, record in enumerate(records, start=1))
    located = [(where, as_record(record, where)) for where, record in places]
    if not located:
        raise DataError(f"{source} holds no records; a generator can be read once only")
    return located


def _filter(splits: dict[Split, list[Row]], conditions: FilterSettings) -> dict[Split, list[Row]]:
    """Apply the filter to the training records."""
    training = splits.get("train", [])
    most, levels = conditions.max_characters, conditions.levels
    rest = [
        row
        for row in training
        if (most is None or len(row.problem.question) <= most)
        and (levels is None or row.problem.level in levels)
        and all(_is_within(row.record, *each) for each in conditions.within.items())
    ]
    if training and not rest:
        raise DataError(f"`filter` leaves none of {len(training)} training records; widen it")
    return {**splits, "train": rest}


def _is_within(record: Record, column: str, bounds: tuple[float, float]) -> bool:
    if column not in record:
        raise DataError(
            f"filter.within names {column!r}, which no column is called; there are {', '.join(map(str, record))}"
        )
    value = record[column]
    if value is not None and not isinstance(value, (int, float)):
        raise DataError(f"filter.within names {column!r}, which holds {value!r} and not numbers")
    return value is not None and bounds[0] <= value <= bounds[1]


def lines_of(records: Iterable[Record]) -> str:
    """Records as text, one JSON object per line, without values that JSON lacks, such as images; the log names them."""
    lines, dropped = [], dict[str, str]()
    for record in records:
        values = []
        for column, value in record.items():
            try:
                text = json.dumps(value, ensure_ascii=False, default=_plain)
            except _NoJsonError as error:
                dropped[str(column)] = str(error)
            else:
                values.append(f"{json.dumps(str(column), ensure_ascii=False)}: {text}")
        lines.append(f"{{{', '.join(values)}}}\n")
    for column, kind in dropped.items():
        log.info("left out the column %r, since JSON has no values of type %s", column, kind)
    check_unicode(text := "".join(lines), "a record")
    return text


class _NoJsonError(Exception):
    """JSON has no such value; the message is its type."""


def _plain(value: Any) -> Any:
    """A number, array or date as a JSON value."""
    if isinstance(value, np.floating):  # of 32 bits 0.1 is 0.1, and not 0.10000000149011612
        return float(str(value))
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise _NoJsonError(type(value).__name__)


# Records given as Python objects: a list, a generator, a function, a `datasets.Dataset`, or splits of these.
#
# They become files in the folder of their run, which a resumed run reads as local data, and which record its training
# data.

#: The folder of these files.
RECORDS = "given"

Records = Iterable[Mapping[str, Any]]
RecordObjects = Records | Mapping[Split, Records] | Callable[[], Records | Mapping[Split, Records]]


@dataclass(frozen=True)
class RecordFiles:
    """Values of `DatasetSettings`, and the files, with their text, that its origin names."""

    values: Any
    files: dict[Path, str]

    def write(self, replace: bool = True) -> None:
        """Write the files. Without `replace`, raises `ConfigError` if they differ from earlier ones."""
        for file, text in self.files.items():
            earlier = file.read_text(encoding="utf-8") if file.is_file() else None
            if earlier not in (None, text) and not replace:
                raise ConfigError(
                    f"{file} holds other records than `dataset` gives now; give another folder as `out`, or delete "
                    f"{file.parents[1]}"
                )
            if earlier != text:
                write_text(file, text)


def is_objects(value: Any) -> bool:
    """Whether a data set, or its origin, is Python objects and no path or settings."""
    if isinstance(value, Mapping):
        return any(is_objects(value.get(split)) for split in SPLITS)
    return callable(value) or (isinstance(value, Iterable) and not isinstance(value, (str, bytes, Path, Settings)))


def as_files(dataset: Any, folder: Path) -> RecordFiles:
    """A data set whose Python objects have become files in `folder`. A data set without objects is unchanged."""
    if is_objects(dataset):
        settings, objects = dict[str, Any](), dataset
    elif isinstance(dataset, Mapping) and is_objects(dataset.get("origin")):
        settings, objects = dict(dataset), dataset["origin"]
    else:
        return RecordFiles(dataset, {})
    located = _locate(objects() if callable(objects) else objects, "dataset")
    splits = located if isinstance(located, dict) else {"records": located}
    columns, units = settings.get("columns") or {}, settings.get("units") or ()
    record_format, _ = parse_records(chain(*splits.values()), settings.get("format"), columns, units)
    target = folder / RECORDS
    files = {target / f"{name}.jsonl": lines_of(record for _, record in rows) for name, rows in splits.items()}
    path = target if isinstance(located, dict) else target / "records.jsonl"
    return RecordFiles({**settings, "format": record_format, "origin": {"source": "local", "path": path}}, files)


# Settings of runs and data sets by hand, in which a path of records may replace a data set's settings.


def local_dataset(path: Path, **origin: Any) -> dict[str, Any]:
    """Values of `DatasetSettings` for a file or folder of records, with the format that its records have."""
    return {"format": check_problem_file(path), "origin": {"source": "local", "path": path, **origin}}


def parse_run(values: Mapping[str, Any], where: str) -> RunFile:
    """The settings of a run by hand, whose `dataset` may be a path. Raises `ConfigError`, which names the key."""
    dataset = values.get("dataset")
    if isinstance(dataset, (str, Path)):
        try:
            values = {**values, "dataset": local_dataset(can_name_a_file(Path(not_empty(dataset))))}
        except ValueError as error:
            raise ConfigError(f"{where}: `dataset`: {error}") from None
    return parse(RunFile, values, where)


def prepare_data(job: DataJob) -> None:
    """Prepare a data set: generated, from a local file or from the hub."""
    origin = job.settings.origin
    locked = read_lock(job.lock_file).get(key_of(origin)) if isinstance(origin, HubData) else None
    prepare(job.settings, job.out, locked)
