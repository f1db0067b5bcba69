"""Modes of the files that this package and its libraries write."""

import os
import stat
from contextlib import contextmanager

import pytest
import torch

from qerl.models.export import export, merge, write_dense
from qerl.models.policy import trained_in_full, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.settings.run import AdapterSettings
from tests.tiny import tiny_qwen2, write_template

CPU = torch.device("cpu")


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_every_file_has_the_mode_of_the_umask(tmp_path, mask):
    base = tiny_qwen2(tmp_path / "base")
    write_template(base)
    with umask(mask):
        policy = with_adapter(base, AdapterSettings(rank=2), "float32", seed=0, device=CPU)
        policy.save(tmp_path / "adapter")
        trained_in_full(base, "float32", CPU).save(tmp_path / "full")
        for weights in ("nvfp4", "nf4"):
            quantize_checkpoint(base, tmp_path / weights, weights)
        write_dense(tmp_path / "nvfp4", tmp_path / "dense", torch.bfloat16)
        export(base, tmp_path / "adapter", tmp_path / "export")
        merge(base, tmp_path / "adapter", tmp_path / "merged", "bf16")
        modes = {
            path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
            for folder in tmp_path.iterdir()
            if folder != base
            for path in folder.rglob("*.safetensors")
        }
    assert len(modes) == 8
    assert set(modes.values()) == {0o666 & ~mask}, modes
