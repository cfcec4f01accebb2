"""Model loading on the nodes of a Ray cluster, from a folder or from a URL."""

from pathlib import Path
from typing import NamedTuple

from jaxtrain.cluster.ray_worker import missing_on_node
from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import Resolved, override
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.storage.fetch import source_of
from jaxtrain.storage.location import local


class RemoteModel(NamedTuple):
    """Arguments by which a node loads the model of a command."""

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
    """Location of a run for nodes: the URL that its folder is a copy of, or else the folder."""
    remote = source_of(folder)
    return str(folder.absolute()) if remote is None else remote.url
