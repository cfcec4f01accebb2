"""Public functions say what they take and give: few have a bare `Any`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = [
    path
    for root in ("jaxtrain", "kernels/jaxtrain_kernels")
    for path in sorted((ROOT / root).rglob("*.py"))
]
WITHOUT_ANY = ("benchmarks/products.py", "kernels/jaxtrain_kernels/matmul/fp8_epilogue/hopper.py")
MOST = 0.03  # share of the public functions that may have one; it goes down, never up
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree):
    """The public functions of a module, and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield node


def has_bare_any(function):
    """Whether a parameter, `*args` and `**kwargs` left out, or the result is `Any` itself."""
    a = function.args
    annotations = [one.annotation for one in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return any(
        isinstance(one, ast.Name) and one.id == "Any" for one in (*annotations, function.returns)
    )


def test_few_public_functions_have_a_bare_any():
    functions = [
        (path, f) for path in MODULES for f in public_functions(ast.parse(path.read_text()))
    ]
    bare = [
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}" for path, f in functions if has_bare_any(f)
    ]
    share = len(bare) / len(functions)
    assert share <= MOST, "\n".join([f"{len(bare)} of {len(functions)}, {share:.1%}", *bare])


def test_a_bare_any_is_found():
    source = (
        "def a(x: Any): ...\n"
        "def b(x: dict[str, Any], **rest: Any) -> None: ...\n"
        "def _c() -> Any: ...\n"
        "class D:\n"
        "    def e(self) -> Any: ...\n"
        "    def f(self, *, x: int) -> None: ...\n"
    )
    functions = {f.name: has_bare_any(f) for f in public_functions(ast.parse(source))}
    assert functions == {"a": True, "b": False, "e": True, "f": False}


def test_some_modules_have_no_any():
    for name in WITHOUT_ANY:
        nodes = ast.walk(ast.parse((ROOT / name).read_text()))
        assert not [
            f"{name}:{x.lineno}" for x in nodes if isinstance(x, ast.Name) and x.id == "Any"
        ]
