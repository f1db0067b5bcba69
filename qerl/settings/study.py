"""Settings of a study: paired arms, a pilot, and the page of their comparisons."""

from __future__ import annotations

from pathlib import Path

from qerl.settings.base import FilePath, Name, NonEmpty, Settings


class StudiedExperiment(Settings):
    """An experiment whose arms are compared."""

    experiment: str
    size: Name
    """Name of the size of its bases, by which the page shows the trend."""
    pilot: str | None = None
    """Experiment whose runs choose the learning rates and tell the spread of pairs. None: there is no pilot."""


class StudySettings(Settings):
    """The comparison of paired arms by docs/exploration-protocol.md, with its data, tables, figures and page.

    The workflow writes them to the folder `study` of the results.
    """

    decides: bool
    """Whether the numbers decide anything. False marks the page as a run of the pipeline alone."""
    experiments: NonEmpty[StudiedExperiment]
    """The experiments that answer the question, with their sizes and pilots."""
    committed: Path | None = None
    """Folder of the committed data. Each folder in it has the data of some runs, from the target `study_finished`. The
    target `study_published` makes the page in docs/results from all of them."""
    real: FilePath | None = None
    """Configuration of real models, whose arms and costs the page lists."""
