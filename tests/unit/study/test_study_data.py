"""A study's Parquet files: what is written is read, and what doesn't fit is refused."""

from dataclasses import replace

import pandas as pd
import pyarrow.parquet as pq
import pytest

from qerl.results.store import ResultError
from qerl.study.data import read_studies, read_study, write_study
from tests.unit.study.test_dose import study


@pytest.fixture
def made():
    return study({"nvfp4": 0.05}, seeds=1, problems=5)


def test_what_is_written_is_read(made, tmp_path):
    write_study(tmp_path, made)
    read = read_study(tmp_path)
    assert read.header == made.header
    for name, frame in made.frames():
        pd.testing.assert_frame_equal(dict(read.frames())[name], frame, check_dtype=False, rtol=1e-6)


def test_files_of_several_studies_are_refused(made, tmp_path):
    write_study(tmp_path, made)
    other = type(made)(made.header.model_copy(update={"study": "other"}), made.runs, made.steps, made.outcomes)
    write_study(tmp_path / "other", other)
    (tmp_path / "other/runs.parquet").replace(tmp_path / "runs.parquet")
    with pytest.raises(ResultError, match="several studies"):
        read_study(tmp_path)


def test_runs_in_several_folders_are_one_study(made, tmp_path):
    runs = made.runs["run"].tolist()
    for name, share in (("early", runs[:2]), ("late", runs[2:])):
        frames = [frame[frame["run"].isin(share)] for frame in (frame for _, frame in made.frames())]
        write_study(tmp_path / name, type(made)(made.header, *frames))
    whole = read_studies([tmp_path / "early", tmp_path / "late"])
    write_study(tmp_path / "all", made)
    assert dict(zip(whole.runs["run"], whole.runs["part"], strict=True)) == {
        run: "early" if run in runs[:2] else "late" for run in runs
    }
    whole = replace(whole, runs=whole.runs.drop(columns=["part", "protocol"]))
    for (_, frame), (_, expected) in zip(whole.frames(), read_study(tmp_path / "all").frames(), strict=True):
        columns = [*expected.columns[:2], *expected.columns[-2:]]
        frames = (one.sort_values(columns).reset_index(drop=True) for one in (frame, expected))
        pd.testing.assert_frame_equal(*frames)
    with pytest.raises(ResultError, match=f"{runs[0]} is in several"):
        read_studies([tmp_path / "early", tmp_path / "all"])
    write_study(
        tmp_path / "late",
        type(made)(made.header.model_copy(update={"study": "other"}), *(frame for _, frame in made.frames())),
    )
    with pytest.raises(ResultError, match="several studies"):
        read_studies([tmp_path / "early", tmp_path / "late"])


def test_other_files_are_refused(made, tmp_path):
    file = tmp_path / "runs.parquet"
    with pytest.raises(ResultError, match=r"runs\.parquet doesn't exist"):
        read_study(tmp_path)
    file.write_text("no table")
    with pytest.raises(ResultError, match="no Parquet file"):
        read_study(tmp_path)
    write_study(tmp_path, made)
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("seed"), file)
    with pytest.raises(ResultError, match="other columns"):
        read_study(tmp_path)
    pq.write_table(table.replace_schema_metadata({}), file)
    with pytest.raises(ResultError, match="doesn't state its study"):
        read_study(tmp_path)
