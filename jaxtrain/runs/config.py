"""Configuration of a run's directory, checkpoints and metrics."""

from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from jaxtrain.settings import Settings
from jaxtrain.storage.location import RUNS, cached, is_url, location_fault, path_of


class Notice(Settings):
    """Source of a spot instance's preemption notice."""

    every: float = Field(5.0, gt=0, description="seconds between two questions")


class AwsNotice(Notice):
    """EC2's instance metadata service, version 2."""

    name: Literal["aws"] = "aws"
    endpoint: str = Field("http://169.254.169.254", description="URL of the service")


class GcpNotice(Notice):
    """Compute Engine's metadata server."""

    name: Literal["gcp"] = "gcp"
    endpoint: str = Field("http://metadata.google.internal", description="URL of the service")


class AzureNotice(Notice):
    """Azure's Scheduled Events."""

    name: Literal["azure"] = "azure"
    endpoint: str = Field("http://169.254.169.254", description="URL of the service")


class FileNotice(Notice):
    """A file that a script of the scheduler creates."""

    name: Literal["file"] = "file"
    path: str = Field(min_length=1, description="the notice is there when this file is")


PreemptionConfig = Annotated[
    AwsNotice | GcpNotice | AzureNotice | FileNotice, Field(discriminator="name")
]


class RunConfig(Settings):
    """Directory, seed and preemption notice of a run."""

    name: str = Field("run", min_length=1, description="folder of this run inside `directory`")
    directory: str = Field(
        "runs",
        description="folder that holds the runs: a path, or s3://, gs:// or another URL of fsspec. "
        "A run at a URL works in a local folder below $JAXTRAIN_CACHE/runs",
    )
    seed: int = Field(42, ge=0, description="of the initial values and the samples")
    preemption: PreemptionConfig | None = Field(
        None,
        description="where a spot machine asks whether it is taken back; the run then saves and "
        "stops as after SIGTERM; null: nowhere",
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
        description="folder for copies, which are in url/run.name: s3://, gs:// or another URL "
        "of fsspec, or a path; credentials come from the environment. null: where run.directory "
        "is a URL, there",
    )
    every: int = Field(
        1,
        ge=1,
        description="least steps from one copy to the next; 1: each checkpoint is copied. The "
        "last one always is",
    )

    @field_validator("url")
    @classmethod
    def _can_be_written(cls, url: str | None) -> str | None:
        if url and (why := location_fault(url)):
            raise ValueError(why)
        return url


class CheckpointConfig(Settings):
    """When the training state is saved, and which checkpoints are kept."""

    every: int | None = Field(
        500, ge=1, description="steps between checkpoints; null: only the end"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints at multiples of this many steps are kept forever"
    )
    mirror: MirrorConfig | None = Field(
        None,
        description="a second place for checkpoints, which are copied there in the background; a "
        "start with none of its own takes the newest from there; null: none",
    )
    final: bool = Field(
        True,
        description="save the state and the model at the end; false: a trial of which only the "
        "metrics count",
    )


class MetricsConfig(Settings):
    """Where metrics are logged, and how often."""

    every: int = Field(10, ge=1, description="Steps between the logged and printed training rows.")
    tensorboard: bool = Field(True, description="Also write TensorBoard event files.")
    wandb: bool = Field(
        False, description="Also log to the W&B project `jaxtrain` (needs the extra `wandb`)."
    )
