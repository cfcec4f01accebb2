"""Samples while a run trains."""

from typing import Literal

from pydantic import Field

from jaxtrain.settings import Settings


class SampleConfig(Settings):
    """Text samples that the model generates during training and at the end."""

    every: int | None = Field(500, ge=1, description="steps between samples; null: only at the end")
    prompts: tuple[str, ...] = Field(
        ("",), description="prompts to continue; an empty one starts a document, []: no samples"
    )
    tokens: int = Field(256, ge=1, le=2**20, description="new tokens per sample")
    temperature: float = Field(0.8, ge=0, description="softmax temperature; 0: greedy decoding")
    top_k: int | None = Field(
        None, ge=1, description="sample from the k most likely tokens; default all"
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="nucleus sampling: sample from the most likely tokens with this total "
        "probability; default all",
    )
    kv_cache_dtype: Literal["int8", "float8"] | None = Field(
        None, description="dtype of the KV cache; default the compute dtype"
    )
