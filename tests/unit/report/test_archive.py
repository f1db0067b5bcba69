"""An archive of results: what somebody else checks, and what the check finds."""

import hashlib
import json
from zipfile import ZIP_DEFLATED, ZipFile

import pandas as pd
import pytest

from qerl.report.archive import CRATE, verify, write_archive
from qerl.results.schema import ResultError
from tests.synthetic_results import listing, write_table, write_tree

TABLES = ("accuracy", "quantization", "memory_speed", "throughput")
#: A sample of a trained policy, which no table shows by itself.
SAMPLES = "evaluate/main-nvfp4-lora-seed1/samples.jsonl"


@pytest.fixture
def results(tmp_path):
    """A folder of results with their tables, and what stays at home."""
    root = tmp_path / "clone/results/mini"
    paths = [path for found in write_tree(root).values() for path in found]
    for name in TABLES:
        write_table(name, paths, root / "tables")
    (root / "tables/results.txt").unlink()
    listing(paths, root)
    (root / "train/main-nvfp4-lora-seed1/policy").mkdir()
    (root / "train/main-nvfp4-lora-seed1/policy/adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "mini.yaml").write_text("name: mini\n")
    return root


def changed(archive, path, change, *, with_sum=False):
    """A copy of the archive in which a file is changed, its checksum too if asked for."""
    with ZipFile(archive) as old:
        contents = {name: old.read(name) for name in old.namelist()}
    contents[path] = change(contents[path])
    if with_sum:
        crate = json.loads(contents[CRATE])
        [entry] = [entry for entry in crate["@graph"] if entry["@id"] == path]
        entry["sha256"] = hashlib.sha256(contents[path]).hexdigest()
        contents[CRATE] = json.dumps(crate).encode()
    copy = archive.with_name("changed.zip")
    with ZipFile(copy, "w") as new:
        for name, content in contents.items():
            new.writestr(name, content)
    return copy


def test_an_archive_is_checked_where_its_results_never_were(results, tmp_path):
    first, second = tmp_path / "first.zip", tmp_path / "second.zip"
    for out in (first, second):
        write_archive(results, out, [tmp_path / "mini.yaml"])
    assert first.read_bytes() == second.read_bytes()
    results.parents[1].rename(tmp_path / "elsewhere")
    found = verify(first)
    assert found["tables"] == len(TABLES)
    with ZipFile(first) as archive:
        names = {*archive.namelist()}
        parts = json.loads(archive.read(CRATE))["@graph"][1]["hasPart"]
    assert {part["@id"] for part in parts} == names - {CRATE}
    assert found["files"] == len(parts)
    assert {SAMPLES, "inputs/mini.yaml", "tables/accuracy.csv"} < names
    assert not [name for name in names if name.endswith("safetensors")]


def test_a_changed_file_is_found_and_named(results, tmp_path):
    archive = tmp_path / "mini.zip"
    write_archive(results, archive)
    with pytest.raises(ResultError, match=SAMPLES):
        verify(changed(archive, SAMPLES, lambda content: content.replace(b'"tokens": 50', b'"tokens": 51', 1)))
    with ZipFile(archive, "a") as more:
        more.writestr("tables/more.csv", "a,b\n1,2\n")
    with pytest.raises(ResultError, match=r"lists no tables/more\.csv"):
        verify(archive)
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ResultError, match="can't be unpacked"):
        verify(tmp_path / "text.zip")


@pytest.mark.parametrize("table", ["accuracy", "throughput"])
def test_a_number_that_its_samples_do_not_give_is_found_though_its_checksum_is_right(results, tmp_path, table):
    def raised(content):
        frame = pd.read_csv(results / f"tables/{table}.csv")
        column = frame.dropna(axis=1, how="all").select_dtypes("float").columns[0]
        frame[column] += 1e-6
        return frame.to_csv(index=False).encode()

    archive = tmp_path / "mini.zip"
    write_archive(results, archive)
    with pytest.raises(ResultError, match=f"{table} of .* isn't what its results and samples give"):
        verify(changed(archive, f"tables/{table}.csv", raised, with_sum=True))


def test_results_that_are_elsewhere_or_unfinished_make_no_archive(results, tmp_path):
    with pytest.raises(ResultError, match="lies in"):
        write_archive(results, results / "mini.zip")
    (results / "quantize").rename(tmp_path / "moved")
    with pytest.raises(ResultError, match="where Snakemake ran"):
        write_archive(results, tmp_path / "mini.zip")
    with pytest.raises(ResultError, match=r"no results\.txt"):
        write_archive(results / "tables", tmp_path / "mini.zip")


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (CRATE, b"[]", "lists no checksums"),
        (CRATE, b"\xff{", "lists no checksums"),
        (CRATE, b'{"@graph": [{"@id": "a", "@type": "File"}]}', "lists no checksums"),
        ("tables/accuracy.csv", b"", "accuracy of .* is no table"),
        ("results.txt", b"", "none of the results given is an evaluation"),
    ],
)
def test_an_unreadable_part_is_named(results, tmp_path, path, content, said):
    write_archive(results, tmp_path / "mini.zip")
    with pytest.raises(ResultError, match=said):
        verify(changed(tmp_path / "mini.zip", path, lambda _: content, with_sum=path != CRATE))


def test_damaged_bytes_are_found(tmp_path):
    """Each byte in turn: a flip may break the compression, claim an unknown method or encryption, or hide an end."""
    whole = tmp_path / "whole.zip"
    with ZipFile(whole, "w", ZIP_DEFLATED) as archive:
        archive.writestr(CRATE, "a text of some words " * 9)
    content = whole.read_bytes()
    for place in range(len(content)):
        for flip in (0x01, 0x80):
            whole.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
            with pytest.raises(ResultError, match=r"can't be unpacked|it is no archive"):
                verify(whole)


def test_further_files_must_exist_under_names_of_their_own(results, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mini.yaml").write_text("name: other\n")
    for inputs, said in (
        (["mini.yaml", "other/mini.yaml"], "called mini.yaml"),
        (["other"], "other is no file"),
        (["none.yaml"], r"none\.yaml is no file"),
    ):
        with pytest.raises(ResultError, match=said):
            write_archive(results, tmp_path / "mini.zip", [tmp_path / name for name in inputs])
