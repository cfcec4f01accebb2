"""The entry types of the table in `compatible.py` (Feature, Refusal), and tests of values."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from jaxtrain.objectives import PREFERENCES

EVERY_DEVICE = "CPU, GPU, TPU"
PAIRS = (
    "data.train={name: preference, path: pairs.jsonl} data.packing.name=padded "
    "model.document_mask=true"
)


class Feature(NamedTuple):
    """A feature that a configuration uses or not."""

    label: str  # in the support matrix; "" for features without a row there
    key: str
    active: Callable[[Any], bool]  # test of the value at `key`, which is None if there is none
    example: str = ""  # overrides that switch it on
    devices: str = EVERY_DEVICE


class Refusal(NamedTuple):
    """Two features that exclude each other."""

    feature: str
    other: str
    why: str
    fix: str  # key=value


def more_than_one(value: int | None) -> bool:
    return value is not None and value > 1


def given(value: object) -> bool:
    return value not in (None, False, 0)


def absent(value: object) -> bool:
    return not given(value)


def equals(name: str) -> Callable[[Any], bool]:
    return lambda value: value == name


def axis(name: str, example: str = "") -> Feature:
    return Feature(
        f"mesh.{name}", f"mesh.{name}", more_than_one, f"mesh.{name}=2 {example}".strip()
    )


def optimizer(name: str) -> Feature:
    return Feature(f"optimizer {name}", "optim.name", equals(name), f"optim.name={name}")


def tuning(label: str, name: str, more: str = "") -> Feature:
    example = f"finetune.name={name} train.steps=2 {more}".strip()
    return Feature(label, "finetune.name", equals(name), example)


def objective(name: str) -> Feature:
    example = f"objective.name={name} {PAIRS if name in PREFERENCES else ''}".strip()
    return Feature(f"objective {name}", "objective.name", equals(name), example)


def packs_ffn(c: BaseModel) -> bool:
    """Whether a `finetune` section quantizes the FFN matrices of the base."""
    trained = " ".join(getattr(c, "trainable", ()))
    return given(getattr(c, "base_quantization", None)) and "experts" not in trained


def any_named(*names: str) -> Callable[[Any], bool]:
    """A test whether a list has an entry with one of these names."""
    return lambda entries: any(entry.name in names for entry in entries or ())
