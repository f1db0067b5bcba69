"""The job that prepares a data set."""

from __future__ import annotations

from qerl.data.hub_lock import key_of, read_lock
from qerl.data.sources import prepare
from qerl.jobs.prepare import DataJob
from qerl.settings.data import HubData


def prepare_data(job: DataJob) -> None:
    """Prepare a data set: generated, from a local file or from the hub."""
    origin = job.settings.origin
    entry = read_lock(job.lock_file).get(key_of(origin)) if isinstance(origin, HubData) else None
    prepare(job.settings, job.out, {"revision": entry.revision, "files": entry.files} if entry else None)
