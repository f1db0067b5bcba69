"""The files of a folder of records by split: train.jsonl, main/test.parquet, or shards as the hub has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from qerl.data.inputs import DATA_SUFFIXES, data_files
from qerl.data.records import DataError
from qerl.settings.data import Split

#: The end of the name of a shard, such as train-00000-of-00002.parquet.
_SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})$")
#: Names of validation and test files elsewhere, which would be left out silently.
_OTHER_NAMES = ("val", "valid", "dev", "eval", "evaluation")
#: Files of records elsewhere, which would be left out silently too.
_OTHER_SUFFIXES = (".csv", ".tsv", ".ndjson", ".gz", ".zst", ".arrow")
CONVERT = "`to_parquet` of pandas and datasets writes such a file"


def split_files(folder: Path) -> dict[Split, list[Path]]:
    """The files of each split that the folder has. Files in hidden folders don't count.

    Raises `DataError` for a split of several files that aren't all its shards, and for files that would be left out.
    """
    given = [path for path in data_files(folder) if path.is_file()]
    files: dict[Split, list[Path]] = {}
    for split in get_args(Split):
        if matches := [path for path in given if path.name.startswith(split)]:
            _check_shards(folder, split, matches)
            files[split] = matches
    _check_left_out(folder, given, files)
    if not files:
        raise DataError(f"{folder} has no file named train, validation or test ({', '.join(DATA_SUFFIXES)}); {CONVERT}")
    return files


def _check_shards(folder: Path, split: Split, files: list[Path]) -> None:
    """Raise `DataError` unless the files are one, or all shards of one."""
    counts = [match and int(match.group(1)) for match in (_SHARD.search(path.stem) for path in files)]
    if len(files) > 1 and (None in counts or len({path.parent for path in files}) > 1):
        raise DataError(
            f"{folder} has several files for the split {split}: {', '.join(map(str, files))}; keep one, name one "
            "of its folders, or (a copy of a hub repository) use source: hub with `folder` and `subset`"
        )
    if counts[0] not in (None, len(files)):
        raise DataError(f"{folder} has {len(files)} of {counts[0]} files of the split {split}; download it again")


def _check_left_out(folder: Path, given: list[Path], files: dict[Split, list[Path]]) -> None:
    for path in given:
        if _SHARD.sub("", path.stem) in _OTHER_NAMES:
            raise DataError(f"{path} names no split; rename it to validation or test, or move it out of {folder}")
    lacking = {*get_args(Split), *_OTHER_NAMES} - files.keys()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _OTHER_SUFFIXES and _SHARD.sub("", path.name.partition(".")[0]) in lacking:
            raise DataError(
                f"{path} isn't read: expected one of {', '.join(DATA_SUFFIXES)}; {CONVERT}; or move it out of {folder}"
            )
