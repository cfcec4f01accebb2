"""What follows from the depth and the token budget; anything set by hand wins."""

import math
from collections.abc import Sequence
from typing import Any

from jaxtrain.config import Config, Sections, TrainConfig, apply_override, to_yaml, validate
from jaxtrain.data import DataConfig
from jaxtrain.data.tokenizer import build_tokenizer
from jaxtrain.model import ResolvedModel, Transformer, count, resolve_model, split
from jaxtrain.parallel.mesh import batch_ways, make_mesh
from jaxtrain.settings import UserError

REFERENCE_TOKENS = 2**19  # tokens a step that suit the reference model, a d12 at ratio 12
BATCH_POWER = 0.383  # how the best batch grows with the horizon (Bergsma et al. 2025)


class ResolvedTrain(TrainConfig):
    """Train settings with nothing left open."""

    batch_size: int
    device_batch_size: int
    steps: int


class Resolved(Sections):
    """A configuration with nothing left open: what a run is made from, and saved with."""

    model: ResolvedModel
    train: ResolvedTrain


def vocab_size_of(data: DataConfig) -> int:
    """The vocabulary that the tokenizer has or will have."""
    if data.tokenizer.name == "sentencepiece" and data.tokenizer.path is None:
        return data.tokenizer.vocab_size
    return build_tokenizer(data.tokenizer, ()).vocab_size


def horizon(model: ResolvedModel, vocab_size: int, ratio: float) -> float:
    """Training tokens: ratio x (matrices + head), nanochat's scaling parameters."""
    _, specs = split(Transformer(model, vocab_size))
    head = 0 if not model.tied_head else specs["embed"].size
    return ratio * (count(specs, "matrix") + count(specs, "head") + head)


def resolve(c: Config, vocab_size: int, devices: Sequence[Any] | None = None) -> Resolved:
    """Fill in every open field of the configuration."""
    t = c.train
    model = resolve_model(c.model, t.sequence_length)
    ways = batch_ways(make_mesh(c.mesh, devices))
    tokens = horizon(model, vocab_size, t.tokens_per_parameter)
    if t.steps and t.batch_size:
        tokens = t.steps * t.batch_size * t.sequence_length
    reference = horizon(resolve_model(c.model.model_copy(update={
        "depth": 12, "width": None, "heads": None, "kv_heads": None, "hidden": None,
    }), t.sequence_length), vocab_size, 12.0)  # fmt: skip
    power = round(math.log2(REFERENCE_TOKENS * (tokens / reference) ** BATCH_POWER))
    batch = t.batch_size or max(ways, 2**power // t.sequence_length)
    if batch % ways:
        raise UserError(
            f"train.batch_size {batch} does not divide over {ways} devices (mesh data x fsdp); "
            f"use {max(ways, batch // ways * ways)}"
        )
    device_batch = t.device_batch_size or batch // ways
    if batch % (ways * device_batch):
        raise UserError(
            f"train.batch_size {batch} is not a multiple of {ways} devices x "
            f"train.device_batch_size {device_batch}"
        )
    train = {
        "batch_size": batch,
        "device_batch_size": device_batch,
        "steps": t.steps or max(1, round(tokens / (batch * t.sequence_length))),
    }
    return Resolved.model_validate(
        {**c.model_dump(), "model": model.model_dump(), "train": {**t.model_dump(), **train}}
    )


def override(c: Resolved, overrides: Sequence[str]) -> Resolved:
    """A resolved configuration with `key.path=value` overrides; nothing is derived again."""
    tree = c.model_dump(mode="json")
    for line in overrides:
        apply_override(tree, line)
    return validate(Resolved, tree)


def resolved_text(c: Config) -> str:
    """The resolved tree as YAML, for --print-config."""
    return to_yaml(resolve(c, vocab_size_of(c.data)))
