"""Command-line overrides `key.path=value`, applied to the plain tree of a configuration."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import parse_yaml, shown


class Override(NamedTuple):
    """A parsed override such as `optim.matrix_lr=0.01`."""

    key: str
    value: object
    given: str


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides in the order given, but each section's `name` before its fields."""
    parsed = [parse_override(override) for override in overrides]
    named = lambda k: (0, k.count(".")) if k.endswith(".name") else (1, 0)
    for one in sorted(parsed, key=lambda one: named(one.key)):
        apply_override(tree, one)


def parse_override(given: str) -> Override:
    key, equals, text = given.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            f"{shown(given)}: an override is key.path=value, as in optim.matrix_lr=0.01"
        )
    if not text.strip():
        raise UserError(
            f"{shown(given)}: there is no value; write null for none, '\"\"' for no text"
        )
    # Values such as `*.txt` or `# {path}` are text here, not YAML aliases or comments.
    as_it_is = text.startswith(tuple("#*&!%@`"))
    return Override(".".join(parts), text if as_it_is else parse_yaml(text, shown(given)), given)


def check_once(overrides: Sequence[str]) -> None:
    """Raise UserError for a field that two overrides of a command line set.

    In code the later one wins instead, since benchmarks add the user's overrides after their own.
    """
    seen: dict[str, Override] = {}
    for one in map(parse_override, overrides):
        paths = list(paths_of(one.value, one.key))
        twice = [key for key in seen if key in paths or key.startswith(f"{one.key}.")]
        if twice:
            raise UserError(
                f"{twice[0]} is given twice, by {shown(seen[twice[0]].given)} and by "
                f"{shown(one.given)}; keep one (and quote {{a..b}}, of which a shell makes several)"
            )
        seen |= dict.fromkeys(paths, one)


def paths_of(value: object, path: str) -> Iterator[str]:
    """Yield the dotted paths of all fields that a plain value sets."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from paths_of(inner, f"{path}.{key}")
    else:
        yield path


def apply_override(tree: dict[str, Any], one: Override) -> None:
    """Apply one override to the tree; a different `name` clears the section first."""
    parts, value, override = one.key.split("."), one.value, one.given
    node = tree
    for depth, part in enumerate(parts[:-1], 1):
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            section = ".".join(parts[:depth])
            raise UserError(
                f"{shown(override)}: {section} is {shown(node[part])} as a whole already; give it "
                f"as {section}={{...}}"
            )
        node = node[part]
    if parts[-1] == "name" and parts[:-1] != ["run"] and node.get("name") != value:
        node.clear()
    node[parts[-1]] = value
