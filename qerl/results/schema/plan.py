"""Schema of plan.json: the long jobs of a configuration, as the workflow started with them."""

from __future__ import annotations

from qerl.results.schema.stored import Stored


class ListedJob(Stored):
    """A job of a rule. Its log is logs/RULE/ID.log in the results."""

    rule: str
    id: str
    #: The file that the job writes last, within the folder of results.
    result: str
    gpus: int
    #: Experiment and arm of a run, else empty; jobs of a group take about the same time.
    group: list[str]
    steps: int | None = None
    #: The absolute path of the state of an unfinished run.
    work: str | None = None


class StoredPlan(Stored):
    """results/NAME/plan.json."""

    name: str
    jobs: list[ListedJob]
