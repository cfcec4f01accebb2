"""Strict YAML: constructs that a reader of the file would misread are errors."""

import re
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.settings import UserError

MOST_VALUES = 100_000  # values of a document after its aliases are expanded
MOST_DEPTH = 100  # nesting depth of lists and sections
MOST_SHOWN = 120  # characters of a value in a message
END = "...\n"  # YAML's end-of-document marker
TAG = "tag:yaml.org,2002:"
EMPTY = "has no value: null is none, '' an empty text, and a space goes behind `key:`"


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, missing values, integers beyond 64 bits, and aliases
    that are recursive or expand too far. 010, 1:30 and 2024-01-01 are strings, not 8, 90, a date.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _size(node, {}, 0)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{TAG}merge":
                if key.value in seen:
                    raise _error(f"{key.value} is given twice", key)
                seen.add(key.value)
                if value.tag == f"{TAG}null" and not value.value:
                    raise _error(f"{key.value} {EMPTY}", key)
        found = super().construct_mapping(node, deep)
        if others := [key for key in found if not isinstance(key, str)]:
            raise _error(f"the key {others[0]!r} is no text: quote it", node)
        return found

    def construct_sequence(self, node: yaml.SequenceNode, deep: bool = False) -> list[Any]:
        for value in node.value:
            if value.tag == f"{TAG}null" and not value.value:
                raise _error(f"an entry of a list {EMPTY}", value)
        return super().construct_sequence(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) < 80 and abs(number := int(node.value.replace("_", ""), 0)) < 2**64:
            return number
        raise _error("a whole number is beyond 64 bits", node)


def _error(what: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _size(node: yaml.Node, known: dict[Any, int | None], depth: int) -> int:
    """Number of values in a node after its aliases are expanded."""
    if node in known:
        if (size := known[node]) is None:
            raise _error("an alias stands for what it is part of", node)
        return size
    known[node] = None
    parts = [] if isinstance(node, yaml.ScalarNode) else node.value
    parts = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    size = 1 + sum(_size(part, known, depth + 1) for part in parts)
    if depth > MOST_DEPTH or size > MOST_VALUES:
        raise _error(f"more than {MOST_VALUES:,} values, or {MOST_DEPTH} levels", node)
    known[node] = size
    return size


PLAIN = {
    f"{TAG}int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"),
    f"{TAG}float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9]+([eE][-+][0-9]+)?|\.(inf|Inf|INF))\Z"
        r"|\.(nan|NaN|NAN)\Z"
    ),
}
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, PLAIN.get(tag, rule)) for tag, rule in rules if tag != f"{TAG}timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_constructor(f"{TAG}int", StrictLoader.construct_yaml_int)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises a one-line UserError that begins with `where`."""
    try:
        return yaml.load(text, StrictLoader)
    except RecursionError:
        raise UserError(f"{where}: not readable as YAML: it is nested too deep") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise UserError(f"{where}: not readable as YAML: {reason}{position}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises UserError as `parse_yaml` does."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error


def read_saved(path: Path) -> dict[str, Any]:
    """The sections of a saved configuration, whose last line is END.

    Raises UserError for a truncated or damaged file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not text.endswith(END):
        raise UserError(
            f"{path} is cut short: its last line must be {END.strip()!r} (if it is whole, written "
            "by an older version, add that line); a run's stands in its model/config.yaml as well"
        )
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it holds no sections")
    return tree


def shown(value: object) -> str:
    """A value for a message; the middle of a long one is elided."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:60]} ... {text[-20:]}"
