"""How the nodes of a Ray cluster load the model of a command: from its folder, or from its URL."""

from pathlib import Path
from typing import NamedTuple

from jaxtrain.cluster.ray_worker import missing_on_node
from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import Resolved, override
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.storage.fetch import source_of
from jaxtrain.storage.location import local


class RemoteModel(NamedTuple):
    """What a command was told about its model."""

    run: str  # an absolute path or a URL
    step: int | None
    overrides: tuple[str, ...]
    fields: tuple[str, ...]  # that may be overridden

    def load(self) -> tuple[Saved, Resolved]:
        """The model, and its configuration with the overrides."""
        folder = local(self.run)
        if not folder.is_dir():
            raise missing_on_node(
                "folder", folder, "put the run on a disk that all nodes share, or name its URL"
            )
        start(quiet=True)
        saved = load_saved(folder, self.step)
        return saved, override(saved.config, list(self.overrides), self.fields)


def place_of_run(folder: Path) -> str:
    """Where nodes find the run of a folder: at the URL that it is a copy of, or there."""
    remote = source_of(folder)
    return str(folder.absolute()) if remote is None else remote.url
