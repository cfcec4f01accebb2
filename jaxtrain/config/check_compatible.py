"""Check of a configuration against the tables of `features.py` and `compatible.py`."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config.compatible import REFUSALS, Refusal
from jaxtrain.config.features import FEATURES
from jaxtrain.config.tree import Sections
from jaxtrain.data import sources_of
from jaxtrain.settings import UserError


def check_compatible(c: Sections, mesh_shape: Mapping[str, int]) -> None:
    """Raise UserError with one line, including the fix, for each refused pair of features.

    c: a configuration, resolved or not. mesh_shape: devices along each axis, `auto` resolved.
    """
    lines = [shown(c, mesh_shape, refusal) for refusal in refusals(c, mesh_shape)]
    if lines:
        raise UserError(*lines)


def refusals(c: Sections, mesh_shape: Mapping[str, int]) -> list[Refusal]:
    """The entries of REFUSALS that a configuration violates."""
    has = {name: f.active(value_at(c, mesh_shape, f.key)) for name, f in FEATURES.items()}
    return [refusal for refusal in REFUSALS if has[refusal.feature] and has[refusal.other]]


def shown(c: Sections, mesh_shape: Mapping[str, int], refusal: Refusal) -> str:
    one, other = (setting(c, mesh_shape, FEATURES[name].key) for name in refusal[:2])
    return f"{one} does not go with {other}: {refusal.why}; set {refusal.fix}"


def setting(c: Sections, mesh_shape: Mapping[str, int], key: str) -> str:
    """`key=value` in command-line syntax."""
    value = value_at(c, mesh_shape, key)
    if isinstance(value, BaseModel):
        changed = {"name"} | value.model_dump(exclude_defaults=True).keys()
        fields = value.model_dump(mode="json", include=changed).items()
        return f"{key}={{{', '.join(f'{name}: {field}' for name, field in fields)}}}"
    if isinstance(value, tuple):
        return f"{key}=[{', '.join(getattr(entry, 'name', str(entry)) for entry in value)}]"
    if value is None or isinstance(value, bool):
        value = "null" if value is None else str(value).lower()
    return f"{key}={value}"


def value_at(c: Sections, mesh_shape: Mapping[str, int], key: str) -> object:
    """The value at a dotted path; None if its section is null or has no such field."""
    section, _, name = key.rpartition(".")
    if section == "mesh" and name in mesh_shape:
        return mesh_shape[name]
    if key == "data.train.name":  # a mixture's sources are all preferences or none is
        return next(iter(sources_of(c.data.train).values())).name
    found: Any = c
    for part in key.split("."):
        found = getattr(found, part, None) if isinstance(found, BaseModel) else None
    return compute_dtype(found).name if key == "train.precision" else found
