"""One name, one meaning: no class and no public function is defined twice in the project."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = [
    path
    for root in ("jaxtrain", "kernels/jaxtrain_kernels")
    for path in sorted((ROOT / root).rglob("*.py"))
]
# Functions that several modules define on purpose: each module is one implementation of a seam.
SEAMS = {
    "main": "entry point of a command",
    "declare": "the parameters of a layer",
}
# A layer of `parallel/` has the name of the kernel that it wraps in `shard_map`.
WRAPPERS = ROOT / "jaxtrain" / "parallel" / "kernels.py"
# Words that say how a thing feels, not what the field calls it: no function, parameter or variable.
PRIVATE = {"begins", "beside", "held", "judged", "place", "serves"}
MOST_CLASSES = 0  # names that have two meanings yet: both figures go down, never up
MOST_FUNCTIONS = 19


@functools.cache
def top_level(path):
    """The statements of a module, parsed once for both kinds of names."""
    return ast.parse(path.read_text()).body


def definitions(kind, paths=MODULES):
    """Where each top-level name of a kind is defined, of those that more than one module defines.

    In `jaxtrain_kernels` the backends of an operation implement the same functions, so that all of
    its files count as one module there.
    """
    found = defaultdict(set)
    for path in paths:
        parts = path.relative_to(ROOT).parts
        for node in top_level(path):
            if isinstance(node, kind) and not node.name.startswith("_"):
                backend = parts[0] == "kernels" and len(parts) > 3 and kind is ast.FunctionDef
                wrapper = path == WRAPPERS and kind is ast.FunctionDef
                found[node.name].add("kernels" if backend or wrapper else "/".join(parts))
    return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def listed(found):
    return "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(found.items()))


def test_a_class_has_one_meaning():
    found = definitions(ast.ClassDef)
    assert len(found) <= MOST_CLASSES, listed(found)


def test_a_public_function_has_one_meaning():
    found = {n: p for n, p in definitions(ast.FunctionDef).items() if n not in SEAMS}
    assert len(found) <= MOST_FUNCTIONS, listed(found)


def test_a_name_with_two_meanings_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class Twice: ...\nclass _Inner: ...\n")
    paths = sorted(tmp_path.glob("*.py"))
    assert definitions(ast.ClassDef, paths) == {"Twice": ["a.py", "b.py"]}
    assert definitions(ast.FunctionDef, paths) == {}


def identifiers(tree):
    """(name, line) of each function, class, parameter, variable, attribute and keyword."""
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, getattr(node, "lineno", 0)


def test_no_identifier_is_a_private_word():
    known, found = re.compile(rf"\b({'|'.join(PRIVATE)})\b"), []
    for root in ("jaxtrain", "kernels", "benchmarks", "tests"):
        for path in sorted((ROOT / root).rglob("*.py")):
            if known.search(text := path.read_text()):
                names = identifiers(ast.parse(text))
                found += [f"{path.relative_to(ROOT)}:{n} {x}" for x, n in names if x in PRIVATE]
    assert not found, "\n".join(found)


def test_a_private_word_is_found():
    tree = ast.parse("def f(beside=1): serves = x.judged(begins=held, place=1)")
    assert {name for name, _ in identifiers(tree)} >= PRIVATE
