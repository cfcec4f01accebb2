"""Folder of a sweep: its saved configuration, and a check that it is still the requested one."""

import fcntl

from jaxtrain.config import save_yaml
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_saved, shown
from jaxtrain.sweep.config import SweepConfig
from jaxtrain.sweep.load import base_config
from jaxtrain.train.run_directory import check_writable, differences

# Fields that say how the trials are run, not what they are.
FREE = (
    "name", "directory", "workers", "isolate", "heartbeat", "storage", "confirm", "trials",
    "population", "transfer",
)  # fmt: skip


def open_folder(c: SweepConfig) -> None:
    """Make the folder, or check that the sweep there is this one.

    Raises UserError that names what differs.
    """
    check_writable(c.folder)
    c.folder.mkdir(parents=True, exist_ok=True)
    base = base_config(c)
    with (c.folder / "sweep.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if (c.folder / "sweep.yaml").is_file():
            if changed := changes(c):
                more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
                raise UserError(
                    f"{c.folder} is another sweep: {'; '.join(changed[:4])}{more}. Set name=... to "
                    "start another one, or undo the change to resume this one"
                )
        elif any(path.suffix in (".yaml", ".jsonl") for path in c.folder.iterdir()):
            raise UserError(
                f"{c.folder} exists and is not a sweep; set name=... for another folder"
            )
        save_yaml(c.folder / "config.yaml", base)
        save_yaml(c.folder / "sweep.yaml", c)


def changes(c: SweepConfig) -> list[str]:
    """`field: before -> now` for each change that makes other trials than those of the folder."""
    saved = read_saved(c.folder / "sweep.yaml")
    old, new = leaves(saved), leaves(c.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*old, *new]) if key.split(".")[0] not in FREE]
    found = [
        f"{key}: {shown(old.get(key))} -> {shown(new.get(key))}"
        for key in keys
        if old.get(key) != new.get(key) and key not in ("config", "overrides")
    ]
    before = saved.get("trials")
    if c.trials is not None and before is not None and c.trials < before:
        found.append(f"trials: {before} -> {c.trials} (more is possible)")
    config = base_config(c).model_dump(mode="json")
    return [*found, *differences(read_saved(c.folder / "config.yaml"), config)]
