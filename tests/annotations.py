"""An import hook: calls of a module's functions are checked against their annotations.

jaxtyping's own hook checks arguments twice, binds them at each call, and decorates what has no
annotation: this takes a fourth of the time.
"""

import ast
import dataclasses
import functools
import hashlib
import sys
import warnings
from collections import Counter
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, ForwardRef, Literal, TypeAliasType, get_args, get_origin

from beartype import beartype
from jaxtyping import jaxtyped

NAME = "_check_annotations"  # what decorates, in each module
# A nested function is new at each call of the outer one, and its checks take two milliseconds to
# make: so only its first instances in a process are checked.
FIRST = 3
made: Counter[tuple[str, str, CodeType]] = Counter()
# A test calls small functions thousands of times, with what it has shown to them before: of each
# function its first calls in each test are checked.
CALLS = 3
test = 0  # how many have begun


def begin_test():
    global test
    test += 1


def install(*packages):
    sys.meta_path.insert(0, Finder(packages))


class Finder:
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    def get_code(self, fullname):
        """Its bytecode has a place of its own: a process without the hook would read it."""
        before, sys.pycache_prefix = sys.pycache_prefix, bytecode_folder()
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix = before

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data, path)
        decorate(tree.body)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module):
        setattr(module, NAME, check)
        super().exec_module(module)


@functools.cache
def bytecode_folder():
    """Another one where this file has changed."""
    here = Path(__file__)
    made_by = hashlib.sha256(here.read_bytes()).hexdigest()[:16]
    return str(here.parents[1] / ".cache" / "annotated" / made_by)


def decorate(body):
    """Functions are checked below their other decorators, dataclasses above theirs."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            if annotated(node):
                node.decorator_list.append(decorator(node))
        elif isinstance(node, ast.ClassDef) and node.decorator_list:
            node.decorator_list.insert(0, decorator(node))
        for name in ("body", "orelse", "finalbody"):
            decorate(getattr(node, name, ()))
        for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            decorate(inner.body)


def decorator(node):
    location = dict(lineno=node.lineno, col_offset=0, end_lineno=node.lineno, end_col_offset=0)
    return ast.Name(NAME, ast.Load(), **location)


def annotated(node):
    a = node.args
    given = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
    return node.returns is not None or any(x is not None and x.annotation for x in given)


def check(x):
    """A function with its checks, or a class, of which a dataclass checks what it is made of."""
    if isinstance(x, type):
        if dataclasses.is_dataclass(x) and "__init__" in vars(x):
            type.__setattr__(x, "__init__", check(vars(x)["__init__"]))
        return x
    mine = x.__module__, x.__qualname__, x.__code__
    if made[mine] >= FIRST:
        return x
    checked, last, calls = None, -1, 0

    @functools.wraps(x)
    def call(*args, **kwargs):
        nonlocal checked, last, calls
        if last != test:
            last, calls = test, 0
        elif calls >= CALLS:
            return x(*args, **kwargs)
        calls += 1
        if checked is None:
            made[mine] += 1
            checked = with_checks(x)
        return checked(*args, **kwargs)

    return call


def with_checks(x):
    """A function with its checks, which are made when it is first called: most never are."""
    hints = {name: tuple(parts(hint)) for name, hint in x.__annotations__.items()}
    known = {k: Any if any(map(unresolved, v)) else v[0] for k, v in hints.items()}
    x.__annotations__, written = known, x.__annotations__
    with warnings.catch_warnings(action="ignore"):  # of names that libraries take from typing
        checked = beartype(x)
    x.__annotations__ = checked.__annotations__ = written
    if not any(of_shapes(part) for v in hints.values() for part in v):
        return checked
    return jaxtyped(typechecker=None)(checked)


def parts(hint):
    """A hint, and those that it is made of."""
    yield hint
    if isinstance(hint, list | tuple):
        inner = hint
    elif isinstance(hint, TypeAliasType):
        inner = (hint.__value__,)
    else:
        inner = () if get_origin(hint) is Literal else get_args(hint)
    for x in inner:
        yield from parts(x)


def unresolved(hint):
    """Names of classes that are not there yet, or in the module of another library."""
    return isinstance(hint, str | ForwardRef)


def of_shapes(hint):
    """Names in it mean one size each during a call."""
    return isinstance(hint, type) and hint.__module__.split(".")[0] == "jaxtyping"
