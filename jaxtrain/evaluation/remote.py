"""How the nodes of a Ray cluster load the model of a command: from the folder that they share."""

from pathlib import Path
from typing import NamedTuple

from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import Resolved, override
from jaxtrain.runs.saved import Saved, load_saved


class RemoteModel(NamedTuple):
    """What a command was told about its model."""

    run: Path  # absolute
    step: int | None
    overrides: tuple[str, ...]
    fields: tuple[str, ...]  # that may be overridden

    def load(self) -> tuple[Saved, Resolved]:
        """The model, and its configuration with the overrides."""
        start(quiet=True)
        saved = load_saved(self.run, self.step)
        return saved, override(saved.config, list(self.overrides), self.fields)
