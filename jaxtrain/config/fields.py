"""Fields of a configuration tree: their dotted paths, and the variants of a section."""

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def variants_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The section models (variants) that a field may hold."""
    return list(models_in(field.annotation))


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of `name` that selects a variant; None if the model has none."""
    field = model.model_fields.get("name")
    choices = get_args(field.annotation) if field else ()
    return choices[0] if len(choices) == 1 else None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, str | None]]:
    """Yield every field of the tree: dotted path, FieldInfo, and the variant that it belongs to."""
    for name, field in model.model_fields.items():
        variants = variants_of(field)
        if not variants:
            yield prefix + name, field, tag_of(model) if name != "name" else None
        many = {dict: ".NAME", tuple: "[]"}.get(get_origin(field.annotation), "")
        for variant in variants:
            yield from fields(variant, f"{prefix}{name}{many}.")
