"""Samples while a run trains."""

from typing import Literal

from pydantic import Field

from jaxtrain.settings import Settings


class SampleConfig(Settings):
    """Text that the model writes while it trains, and at the end."""

    every: int | None = Field(500, ge=1, description="steps between samples; null: only the end")
    prompts: tuple[str, ...] = Field(
        ("",), description="texts to continue; an empty one starts a document; []: no samples"
    )
    tokens: int = Field(256, ge=1, le=2**20, description="new tokens of each sample")
    temperature: float = Field(0.8, ge=0, description="softmax temperature; 0 takes the best token")
    top_k: int | None = Field(None, ge=1, description="sample among this many best tokens")
    top_p: float | None = Field(None, gt=0, le=1, description="sample among this much probability")
    kv_cache_dtype: Literal["int8", "float8"] | None = Field(
        None, description="of the keys and values kept while sampling; default the compute dtype"
    )
