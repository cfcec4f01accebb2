"""Where a run lives, and what it keeps and reports."""

from pathlib import PurePath

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


class CheckpointConfig(Settings):
    """When the state is saved, and what is kept."""

    every: int | None = Field(
        500, ge=1, description="steps between checkpoints; null: only the end"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints at multiples of this many steps are kept forever"
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
