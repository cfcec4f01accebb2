"""Configuration of a run's directory, checkpoints and metrics."""

from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from jaxtrain.settings import Settings
from jaxtrain.storage.location import RUNS, cached, is_url, location_fault, path_of


class Notice(Settings):
    """Source of a spot instance's preemption notice."""

    every: float = Field(5.0, gt=0, description="seconds between two queries")


class AwsNotice(Notice):
    """EC2's instance metadata service, version 2."""

    name: Literal["aws"] = "aws"
    endpoint: str = Field("http://169.254.169.254", description="URL of the metadata service")


class GcpNotice(Notice):
    """Compute Engine's metadata server."""

    name: Literal["gcp"] = "gcp"
    endpoint: str = Field(
        "http://metadata.google.internal", description="URL of the metadata server"
    )


class AzureNotice(Notice):
    """Azure's Scheduled Events."""

    name: Literal["azure"] = "azure"
    endpoint: str = Field("http://169.254.169.254", description="URL of the metadata service")


class FileNotice(Notice):
    """A file that the scheduler's script creates as the notice."""

    name: Literal["file"] = "file"
    path: str = Field(min_length=1, description="file whose existence is the preemption notice")


PreemptionConfig = Annotated[
    AwsNotice | GcpNotice | AzureNotice | FileNotice, Field(discriminator="name")
]


class RunConfig(Settings):
    """Directory, seed and preemption notice of a run."""

    name: str = Field("run", min_length=1, description="folder of the run inside `directory`")
    directory: str = Field(
        "runs",
        description="folder that contains the runs: a path, or s3://, gs:// or another URL of "
        "fsspec. With a URL, the run works in a local folder below $JAXTRAIN_CACHE/runs",
    )
    seed: int = Field(42, ge=0, description="random seed of the initialization and the samples")
    preemption: PreemptionConfig | None = Field(
        None,
        description="source of the preemption notice of a spot instance; on notice the run saves "
        "and stops as after SIGTERM. null: none",
    )

    @field_validator("name")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                "it must be a folder inside run.directory; set run.directory to use another folder"
            )
        if max(len(part.encode()) for part in path.parts) > 255:
            raise ValueError("a folder's name has at most 255 bytes")
        return name

    @field_validator("directory")
    @classmethod
    def _can_be_written(cls, directory: str) -> str:
        if why := location_fault(directory):
            raise ValueError(why)
        return path_of(directory)

    @property
    def folder(self) -> Path:
        """The local folder that holds the runs."""
        if is_url(self.directory):
            return cached(RUNS, self.directory)
        return Path(self.directory)

    @property
    def url(self) -> str | None:
        """The URL of this run; None if its directory is a path."""
        return f"{self.directory.rstrip('/')}/{self.name}" if is_url(self.directory) else None


class MirrorConfig(Settings):
    """Copies of checkpoints at a second location."""

    url: str | None = Field(
        None,
        min_length=1,
        description="folder of the copies, which are in url/run.name: s3://, gs:// or another URL "
        "of fsspec (credentials from the environment), or a path. null: run.directory, if it is a "
        "URL",
    )
    every: int = Field(
        1,
        ge=1,
        description="minimum steps between two copies; 1: each checkpoint is copied. The last one "
        "always is",
    )

    @field_validator("url")
    @classmethod
    def _can_be_written(cls, url: str | None) -> str | None:
        if url and (why := location_fault(url)):
            raise ValueError(why)
        return url


class CheckpointConfig(Settings):
    """Saving of the training state, and the checkpoints that are kept."""

    every: int | None = Field(
        500, ge=1, description="steps between checkpoints; null: only at the end"
    )
    keep: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    keep_every: int | None = Field(
        None,
        ge=1,
        description="keep checkpoints at multiples of this many steps forever; null: none",
    )
    mirror: MirrorConfig | None = Field(
        None,
        description="second location, to which checkpoints are copied in the background; a run "
        "without a checkpoint of its own restores the newest copy. null: none",
    )
    final: bool = Field(
        True,
        description="save the state and the model at the end; false: for trials of which only the "
        "metrics are needed",
    )


class MetricsConfig(Settings):
    """Logging of metrics."""

    every: int = Field(10, ge=1, description="steps between logged and printed training metrics")
    tensorboard: bool = Field(True, description="also write TensorBoard event files")
    wandb: bool = Field(
        False, description="also log to the W&B project `jaxtrain` (needs the extra `wandb`)"
    )
