"""Validation while a run trains."""

from pydantic import Field

from jaxtrain.settings import Settings


class EvalConfig(Settings):
    """Validation during training; the last step always validates the whole split."""

    every: int | None = Field(
        250, ge=1, description="steps between validations; null: only at the end"
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="validation tokens used before the last step; default the whole split",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="sequences per validation or scoring batch, summed over all devices; "
        "default train.device_batch_size on each",
    )
