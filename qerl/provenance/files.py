"""Files that are written completely or not at all, and checks for a clock that was set back."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from qerl.settings.base import ConfigError

#: Errors of a write for which there is no room.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: How libraries in Rust ("No space left on device (os error 28)") and Python state an error of the system.
_STATED = re.compile(r"(?:\(os error|\[Errno) (\d+)")
#: Seconds by which the clocks of several machines may differ.
CLOCK_SKEW = 60


def cache_folder(name: str) -> Path:
    """The user's folder for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl" / name


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """A context in which a write that finds no room is an `OSError` that names a file or `place`.

    Python names no file if the disk is full. Libraries in Rust, and copies of folders, state the system's error in
    words alone. All other errors pass as they are.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises no narrower one
        stated = _STATED.search(str(error))
        number = int(stated[1]) if stated else 0
        # A ValueError is a sentence for the user, which may quote such words.
        if number not in NO_ROOM or isinstance(error, ValueError) or _names_a_file(error):
            raise
        raise OSError(number, os.strerror(number), str(place)) from error


def _names_a_file(error: Exception) -> bool:
    """Whether it names the file that was written; that of a copy names its source first."""
    return isinstance(error, OSError) and error.filename is not None and error.filename2 is None


def write_json(path: Path, value: Any) -> None:
    """Write a result completely or not at all."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the process is killed or the power fails."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, with bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with writing(path.parent):
        partial.write_bytes(content)
        put(partial, path)


def share(path: Path) -> None:
    """Give a file, or the safetensors files of a folder, the mode of new files, which the umask decides.

    safetensors writes files that only their owner can read.
    """
    for file in path.rglob("*.safetensors") if path.is_dir() else [path]:
        probe = file.with_name(f".{file.name}.mode")
        with probe.open("xb") as new:
            mode = os.fstat(new.fileno()).st_mode
        probe.unlink()
        file.chmod(stat.S_IMODE(mode))


def put(partial: Path, path: Path) -> None:
    """Rename a finished file or folder after its content has reached the disk."""
    flush(partial)
    partial.replace(path)
    _fsync(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on the disk. Links are ignored."""
    for inner in path.iterdir() if path.is_dir() else ():
        if not inner.is_symlink():
            flush(inner)
    _fsync(path)


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` unless a file can be made at `path`, before hours of work are lost."""
    path = path.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir() or (folder != path and folder.exists()))
    if not folder.is_dir():
        raise ConfigError(f"{path} can't be made, because {folder} is a file; choose another folder")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"can't write to {folder} ({error.strerror}); make it writable, make room, or name another "
            "place (`out`, --out)"
        ) from None


def _files(path: Path) -> Iterator[Path]:
    """A path, and for a folder everything in it."""
    yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in sorted(names))


def check_clock(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` if a file is from the future: after the clock is set back, Snakemake trusts stale files."""
    now = time.time()
    for path in paths:
        for file in _files(path):
            written = file.lstat().st_mtime if os.path.lexists(file) else now
            if written > now + CLOCK_SKEW:
                raise ConfigError(
                    f"{file} is from the future ({datetime.fromtimestamp(written):%Y-%m-%d %H:%M:%S}), so the clock "
                    "was set back; set it right, or date the files anew: "
                    f"find {path} -exec touch -h -d @{now:.0f} {{}} +"
                )
