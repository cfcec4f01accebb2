"""The directive `config-reference SECTION`: each field of a section with type, default, meaning."""

import types
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx

from jaxtrain.config import Config
from jaxtrain.config.fields import models_in, tag_of, variants_of


def kind_of(annotation: Any) -> str:
    """A type as a user writes its values: `int | null`, `"adamw"`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value)
                          for value in arguments)  # fmt: skip
    if origin in (Union, types.UnionType):
        return " | ".join(map(kind_of, arguments))
    if origin in (tuple, list):
        inner = [kind_of(part) for part in arguments if part is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"map of {kind_of(arguments[1])}"
    if origin is not None and arguments:  # Annotated
        return kind_of(arguments[0])
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return f"`{tag_of(type(value)) or '{}'}`"
    shown = {None: "null", True: "true", False: "false"}
    plain = isinstance(value, bool) or value is None
    return f"`{shown[value] if plain else value}`"


def escaped(text: str) -> str:
    """Text of a description in a cell of a table."""
    for sign in "\\|*_<>[]`$":
        text = text.replace(sign, "\\" + sign)
    return text


def tables(model: type[BaseModel], path: str, seen: dict[type[BaseModel], str]) -> list[str]:
    """MyST lines of a section: its own fields, then those of the sections within it.

    A section that stands in several places is written once; `seen` has the path of each.
    """
    tag = tag_of(model)
    title = f"{path}.name={tag}" if tag else path
    if model in seen:
        return [f"`{title}`: the fields of `{seen[model]}`.", ""]
    seen[model] = title
    lines = [f"## `{title}`", "", *summary(model)]
    own = [(name, f) for name, f in model.model_fields.items() if name != "name" or not tag]
    if own:
        lines += ["```{list-table}", ":header-rows: 1", ":widths: 30 18 14 38", ""]
        lines += ["* - field", "  - type", "  - default", "  - meaning"]
        for name, field in own:
            text = escaped(field.description or "") or "a section, below"
            kind = "section" if variants_of(field) else kind_of(field.annotation)
            lines += [f"* - `{path}.{name}`", f"  - {escaped(kind)}"]
            lines += [f"  - {default_of(field)}", f"  - {text}"]
        lines += ["```", ""]
    for name, field in own:
        many = {dict: ".NAME", tuple: "[]"}.get(get_origin(field.annotation), "")
        for inner in dict.fromkeys(models_in(field.annotation)):
            lines += tables(inner, f"{path}.{name}{many}", seen)
    return lines


def summary(model: type[BaseModel]) -> list[str]:
    """The docstring of a section's model."""
    return [escaped(line.strip()) for line in (model.__doc__ or "").splitlines()] + [""]


def of_section(name: str) -> list[str]:
    lines: list[str] = []
    seen: dict[type[BaseModel], str] = {}
    for model in dict.fromkeys(models_in(Config.model_fields[name].annotation)):
        lines += tables(model, name, seen)
    return lines


class ConfigReference(Directive):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        holder = nodes.Element()
        lines = StringList(of_section(self.arguments[0]), source="config")
        self.state.nested_parse(lines, self.content_offset, holder, match_titles=True)
        return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("config-reference", ConfigReference)
    return {"parallel_read_safe": True}
