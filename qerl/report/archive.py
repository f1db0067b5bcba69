"""An archive of a configuration's results that somebody else can check: its files, their checksums, and how to cite it.

It is a ZIP with an RO-Crate (https://w3id.org/ro/crate/1.1), which lists each file with its SHA-256. `verify` compares
them and makes each table anew from the stored results and samples, so that a number in a table is one of its samples'.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from mimetypes import guess_type
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import pandas as pd

from qerl.data.hub import sha256_of
from qerl.host.provenance import VERSION, write_json, write_text, writing
from qerl.report.tables import TABLES, make_table
from qerl.report_jobs import TableJob
from qerl.results import paths, printed
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import ResultError

CRATE = "ro-crate-metadata.json"
#: Folders of results that stay at home: weights, which are large, and what only this machine's owner reads.
_LEFT_OUT = {paths.CHECKPOINT, paths.POLICY, paths.MODELS, paths.LOGS, paths.TRACKED}
#: The folder of further files in an archive, such as the configuration and the lock of its libraries.
_INPUTS = "inputs"
#: A table of another machine may differ by the rounding of its arithmetic.
_RTOL = 1e-9


def write_archive(folder: Path, out: Path, inputs: Sequence[Path] = ()) -> int:
    """Write the results in `folder`, and the files `inputs`, to the ZIP `out`; the number of files.

    Equal results make equal bytes. Raises ResultError for results that lie outside of the folder or aren't finished.
    """
    if not (folder / paths.LISTED).is_file():
        raise ResultError(
            f"{folder} has no {paths.LISTED}: it is no folder of the workflow's results, or isn't finished"
        )
    home = folder.resolve()
    if out.resolve().is_relative_to(home):
        raise ResultError(f"{out} lies in {folder}, whose archive it would be; write it elsewhere")
    results = [path.resolve() for path in listed(folder / paths.LISTED)]
    # The paper's printed numbers are the package's, wherever it is.
    results = [path for path in results if path.parts[-4:-1] != printed.FOLDER.parts[-3:]]
    for path in results:
        if not path.is_file() or not path.is_relative_to(home):
            raise ResultError(
                f"{path} isn't among the files of {folder}; make the archive in the folder where Snakemake ran"
            )
    names = [file.name for file in inputs]
    for file in inputs:
        if not file.is_file():
            raise ResultError(f"{file} is no file that the archive could hold; name one that exists")
        if names.count(file.name) > 1:
            raise ResultError(f"two of the further files are called {file.name}; rename one of them")
    files = {
        str(file.relative_to(home)): file
        for file in home.rglob("*")
        if file.is_file() and not file.name.startswith(".") and not _LEFT_OUT & {*file.relative_to(home).parts}
    }
    files |= {f"{_INPUTS}/{file.name}": file for file in inputs}
    with TemporaryDirectory() as name:
        files[paths.LISTED], files[CRATE] = Path(name, paths.LISTED), Path(name, CRATE)
        write_text(files[paths.LISTED], "".join(f"{path.relative_to(home)}\n" for path in results))
        others = {path: file for path, file in sorted(files.items()) if path != CRATE}
        write_json(files[CRATE], _crate(home.name, StoredResults(results), others))
        partial = out.with_name(f"{out.name}.partial")
        with writing(out), ZipFile(partial, "w") as archive:
            for member, file in sorted(files.items()):
                entry = ZipInfo(member)  # of 1980: no time of this machine
                entry.compress_type = ZIP_DEFLATED
                with file.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                    copyfileobj(source, target)
        partial.replace(out)
    return len(files)


def _crate(name: str, stored: StoredResults, contents: Mapping[str, Path]) -> dict[str, Any]:
    """The description of an archive in JSON-LD."""
    stamps = stored.stamps.drop_duplicates().to_dict("records")
    files = [
        {
            "@id": path,
            "@type": "File",
            "contentSize": str(file.stat().st_size),
            "encodingFormat": guess_type(path)[0] or "application/octet-stream",
            "sha256": sha256_of(file),
        }
        for path, file in contents.items()
    ]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Results of {name}",
        "description": "; ".join(f"made on {row['machine']} by commit {row['commit']}" for row in stamps),
        "hasPart": [{"@id": file["@id"]} for file in files],
        "mentions": {"@id": "#qerl"},
    }
    about = {"@id": CRATE, "@type": "CreativeWork", "about": {"@id": "./"}}
    about["conformsTo"] = {"@id": "https://w3id.org/ro/crate/1.1"}
    software = {"@id": "#qerl", "@type": "SoftwareApplication", "name": "qerl", "softwareVersion": VERSION}
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": [about, root, software, *files]}


def verify(archive: Path) -> dict[str, int]:
    """Check an archive; the number of its files, and of the tables that were made anew with equal values.

    Raises ResultError with the first file that is missing, not listed or other than its checksum says, and with the
    first table that its results and samples don't give.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with ZipFile(archive) as packed:
                packed.extractall(folder)
        # A damaged ZIP may also claim encryption (RuntimeError) or an unknown method (NotImplementedError).
        except (BadZipFile, OSError, zlib.error, EOFError, RuntimeError) as error:
            raise ResultError(f"{archive} can't be unpacked: {error or 'it ends too early'}") from error
        files = _check_sums(archive, folder)
        return {"files": files, "tables": _check_tables(archive, folder)}


def _check_sums(archive: Path, folder: Path) -> int:
    for file in (CRATE, paths.LISTED):
        if not (folder / file).is_file():
            raise ResultError(f"{archive} has no {file}: it is no archive of `qerl archive`")
    try:
        graph = json.loads((folder / CRATE).read_text(encoding="utf-8"))["@graph"]
        sums = {entry["@id"]: entry["sha256"] for entry in graph if entry["@type"] == "File"}
    except (ValueError, KeyError, TypeError):
        raise ResultError(f"{CRATE} of {archive} lists no checksums of files; make the archive again") from None
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {CRATE}
    for path in sorted(there ^ sums.keys()):
        raise ResultError(f"{archive} {'lists no' if path in there else 'has no'} {path}")
    for path, expected in sums.items():
        if sha256_of(folder / path) != expected:
            raise ResultError(f"{path} of {archive} isn't the file whose checksum {CRATE} has")
    return len(sums)


def _check_tables(archive: Path, folder: Path) -> int:
    tables = sorted((folder / paths.TABLES).glob("*.csv"))
    made = folder / "made anew"
    made.mkdir()
    results = made / paths.LISTED
    results.write_text("".join(f"{folder / path}\n" for path in listed(folder / paths.LISTED)), encoding="utf-8")
    for table in tables:
        if table.stem not in (*TABLES, *printed.TABLES):
            raise ResultError(f"{archive} has the table {table.stem}, which this version of qerl doesn't make")
        make_table(TableJob(name=table.stem, results=results, out=made))
        try:
            stored = pd.read_csv(table)
        except ValueError as error:
            raise ResultError(f"{table.stem} of {archive} is no table: {error}") from None
        try:
            pd.testing.assert_frame_equal(stored, pd.read_csv(made / table.name), rtol=_RTOL)
        except AssertionError as error:
            differs = " ".join(str(error).split())
            raise ResultError(f"{table.stem} of {archive} isn't what its results and samples give: {differs}") from None
    return len(tables)
