"""What the gates compare: results of one workload only."""

from __future__ import annotations

import hashlib
import json

from qerl.settings.config import Config

#: What `workload_key` calls the folder of every local model: its content counts, its place doesn't. With another name
#: here, all committed baselines would be of another workload.
_ANY_FOLDER = "config/gates/policy"


def workload_key(config: Config) -> str:
    """A hash of what is run: another one makes results that can't be compared.

    The files of the base and of the stored policies count; timings and the places of files don't.
    """
    assert config.gates is not None
    values = config.model_dump(mode="json", include={"models", "datasets", "evaluation"})
    for task in values["evaluation"]["tasks"]:
        # Younger than the baselines, whose tasks all ask the test split.
        if task["split"] == "test":
            del task["split"]
    for model in values["models"].values():
        model |= {"path": _ANY_FOLDER} if "path" in model else {}
    values["experiment"] = config.experiments[config.gates.experiment].model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for folder in [getattr(model, "path", None) for model in config.models.values()] + [config.gates.stored]:
        for file in sorted(folder.rglob("*")) if folder else ():
            if file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]
