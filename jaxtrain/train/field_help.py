"""Fields of the configuration, read from `configs/schema.json`, so that help and completion import
neither JAX nor a model nor the sections."""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple

from jaxtrain.settings import UserError

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # in a wheel, in a checkout
WIDTH = 80
Schema = dict[str, Any]


class FieldHelp(NamedTuple):
    """One field of one variant of its section."""

    path: str  # dotted
    variant: str  # the section's `name` that has this field; "" if all have it
    type: str
    default: str  # as JSON; "" if it is derived from other fields
    description: str


def shipped_configs() -> dict[str, Path]:
    """Return bare name -> YAML file of each shipped configuration."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))}


def read_schema() -> Schema:
    """Read the shipped JSON schema. Raises UserError if it is missing."""
    for folder in FOLDERS:
        if (folder / "schema.json").is_file():
            return json.loads((folder / "schema.json").read_text())
    raise UserError("configs/schema.json is missing: python -m jaxtrain.config prints it")


def all_fields(schema: Schema) -> Iterator[FieldHelp]:
    """Yield every field of the configuration, section by section."""
    for name, node in schema["properties"].items():
        yield from fields_of(schema["$defs"], node, name, "", frozenset())


def fields_of(
    defs: Schema, node: Schema, path: str, variant: str, outer: frozenset[str], needed: bool = False
) -> Iterator[FieldHelp]:
    """Yield the field `path`, or its fields if it is a section.

    outer: enclosing sections, whose fields are not listed again (a mixture contains sources).
    """
    sections, description = dict(variants_in(node)), node.get("description", "")
    default = "required" if needed else json.dumps(node["default"]) if "default" in node else ""
    if not sections:
        yield FieldHelp(path, variant, type_of(node), default, description)
        return
    path += ".NAME" * ("additionalProperties" in node) + "[]" * ("items" in node)
    if any(sections):
        named = node.get("default")
        chosen = json.dumps(named["name"]) if isinstance(named, dict) else default
        yield FieldHelp(f"{path}.name", variant, " | ".join(sections), chosen, description)
    for tag, name in sections.items() if not outer.issuperset(sections.values()) else ():
        inside, required = outer | set(sections.values()), defs[name].get("required", ())
        for field, inner in defs[name].get("properties", {}).items():
            if not (tag and field == "name"):
                yield from fields_of(
                    defs, inner, f"{path}.{field}", tag or variant, inside, field in required
                )


def variants_in(node: Schema) -> Iterator[tuple[str, str]]:
    """Yield (value of `name`, or "" if there is one section; definition) of a field's sections."""
    if "$ref" in node:
        yield "", node["$ref"].rpartition("/")[2]
    if "discriminator" in node:
        for tag, reference in node["discriminator"]["mapping"].items():
            yield tag, reference.rpartition("/")[2]
        return
    for one in (*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties")):
        if isinstance(one, dict):
            yield from variants_in(one)


def type_of(node: Schema) -> str:
    """Describe the type of a field in a few words: `integer >= 1 | null`."""
    if "anyOf" in node:
        return " | ".join(map(type_of, node["anyOf"]))
    if "enum" in node or "const" in node:
        return " | ".join(map(str, node.get("enum", [node.get("const")])))
    if "items" in node:
        return f"list of {type_of(node['items'])}"
    if isinstance(node.get("additionalProperties"), dict):
        return f"{{NAME: {type_of(node['additionalProperties'])}}}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node]
    kind = node.get("type", "list" if "prefixItems" in node else "section")
    return " ".join([str(kind), *bounds])


# ---- text --------------------------------------------------------------------------------------


def sections_line(schema: Schema) -> str:
    """Return the names of the sections, wrapped to WIDTH columns."""
    names = ", ".join(schema["properties"])
    return fill(f"sections: {names}", WIDTH, subsequent_indent="          ")


def section_help(section: str) -> str:
    """List the fields under the dotted path `section`: type, default, description, variants.

    Raises UserError for a section or field that does not exist, with the nearest name.
    """
    schema = read_schema()
    found = list(all_fields(schema))
    inside = lambda path: f"{path}.".replace("[]", "").startswith(f"{section.strip('.')}.")
    chosen = [field for field in found if inside(field.path)]
    if not chosen:
        paths = {field.path for field in found}
        names = paths | {p.rpartition(".")[0] for p in paths} | set(schema["properties"])
        near = difflib.get_close_matches(section, names, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(schema['properties'])}"
        )
        raise UserError(f"--help {section}: no such section or field; {hint}")
    merged: dict[FieldHelp, list[str]] = {}  # a field that variants share is listed once
    for field in chosen:
        merged.setdefault(field._replace(variant=""), []).append(field.variant)
    lines = [f"{section}: set a field with KEY=value, as in {chosen[0].path}=..."]
    for field, variants in merged.items():
        default = field.default if field.default in ("", "required") else f"default {field.default}"
        everywhere = any(
            set(variants) == set(union.type.split(" | "))
            for union in found
            if union.path.endswith(".name") and field.path.startswith(union.path[: -len("name")])
        )
        shared = "" in variants or everywhere
        only = "" if shared else f"[{', '.join(dict.fromkeys(variants))}]"
        head = f"{field.path}  {', '.join(filter(None, (field.type, default)))}  {only}"
        lines += wrap(head, WIDTH, subsequent_indent="  ")
        lines += wrap(field.description, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
