"""Where a run lives, and what it keeps and reports."""

from pathlib import PurePath
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from jaxtrain.settings import Settings


class RunConfig(Settings):
    """Where the run lives."""

    name: str = Field("run", min_length=1, description="folder of this run inside `directory`")
    directory: str = Field("runs", description="folder that holds the runs")
    seed: int = Field(42, ge=0, description="of the initial values and the samples")

    @field_validator("name")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                "it must be a folder inside run.directory; set run.directory for another place"
            )
        if max(len(part.encode()) for part in path.parts) > 255:
            raise ValueError("a folder's name has at most 255 bytes")
        return name


class MirrorConfig(Settings):
    """A second place for checkpoints."""

    url: str = Field(
        min_length=1,
        description="folder for copies, which are in url/run.name: s3://, gs:// or another URL "
        "of fsspec, or a path; credentials come from the environment",
    )
    every: int = Field(
        1,
        ge=1,
        description="least steps from one copy to the next; 1: each checkpoint is copied. The "
        "last one always is",
    )

    @field_validator("url")
    @classmethod
    def _has_no_secret(cls, url: str) -> str:
        parts = urlsplit(url) if "://" in url else None
        if parts and (parts.password is not None or parts.query):
            raise ValueError(
                "it must not hold a password or a query; the store's own environment variables "
                "or files hold credentials"
            )
        if url.startswith(("http://", "https://")) or "::" in url:
            raise ValueError("nothing can be written there; take s3://, gs:// or a path")
        return url


class CheckpointConfig(Settings):
    """When the state is saved, and what is kept."""

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
    """Where the numbers go, and how often."""

    every: int = Field(10, ge=1, description="Steps between the logged and printed training rows.")
    tensorboard: bool = Field(True, description="Also write TensorBoard event files.")
    wandb: bool = Field(
        False, description="Also log to the W&B project `jaxtrain` (needs the extra `wandb`)."
    )
