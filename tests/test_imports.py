"""Imports point down only: each module reads what stands below it, and nothing reads upwards."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Below first. Folders of a line do not import each other; a folder is one module.
LAYERS = (
    ("jaxtrain.settings",),
    ("jaxtrain.storage",),
    ("jaxtrain.parallel",),
    ("jaxtrain.cluster",),
    ("jaxtrain.weights",),
    ("jaxtrain.data", "jaxtrain.model", "jaxtrain.optim"),
    ("jaxtrain.finetune", "jaxtrain.interop", "jaxtrain.objectives"),
    # Sections of the configuration: they import the settings alone, whatever their folder does.
    (
        "jaxtrain.evaluation.config",
        "jaxtrain.inference.config",
        "jaxtrain.runs.config",
        "jaxtrain.train.config",
    ),
    ("jaxtrain.config",),
    ("jaxtrain.runs",),
    ("jaxtrain.inference",),
    ("jaxtrain.evaluation",),
    ("jaxtrain.compress",),
    ("jaxtrain.train",),
    ("jaxtrain.estimate",),
    ("jaxtrain.scaling", "jaxtrain.sweep"),
    ("jaxtrain.main",),
    ("jaxtrain.cli",),
)
RANK = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))


def module_of(dotted):
    """The line's entry that a dotted name belongs to."""
    three = ".".join(dotted.split(".")[:3])
    return three if three in RANK else ".".join(dotted.split(".")[:2])


def test_what_is_listed_exists():
    for name in RANK:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


def imported(source):
    """Every module that a source text imports, also inside functions, as dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(module, name):
    package, target = name.split(".")[0], module_of(name)
    if name == "jaxtrain.__version__":
        return False
    if package == "jaxtrain":
        return target != module and RANK.get(target, len(RANK)) >= RANK[module]
    return package == "configs" or (module == "jaxtrain.data" and package in ("jax", "jaxlib"))


def violations(module, source):
    """What a module may not import, of all that it does import."""
    return [name for name in imported(source) if forbidden(module, name)]


def test_imports_point_down():
    upwards = {}
    for file in FILES:
        dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if dotted == "jaxtrain.__init__":
            continue  # test_api.py: it imports nothing until a name is asked for
        module = dotted if dotted in RANK else module_of(dotted)
        assert module in RANK, f"say in LAYERS where {module} stands"
        if found := violations(module, file.read_text()):
            upwards[dotted] = found
    assert upwards == {}


def test_kernels_do_not_know_jaxtrain():
    for file in KERNELS:
        packages = {name.split(".")[0] for name in imported(file.read_text())}
        assert not packages & {"jaxtrain", "flax"}, file


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("jaxtrain.model", "from jaxtrain.optim import muon"),
        ("jaxtrain.model", "from jaxtrain import data"),
        ("jaxtrain.data", "import jax.numpy as jnp"),
        ("jaxtrain.parallel", "import jaxtrain.model"),
        ("jaxtrain.objectives", "def f():\n    from jaxtrain.train.loop import train"),
        ("jaxtrain.settings", "from jaxtrain.newcomer import thing"),
        ("jaxtrain.main", "import configs"),
    ],
)
def test_an_import_upwards_is_seen(module, line):
    assert len(violations(module, line)) == 1


def test_downwards_and_inside_is_free():
    assert violations("jaxtrain.model", "from jaxtrain.model.plan import make_plan") == []
    assert violations("jaxtrain.train", "from jaxtrain import data\nimport jax") == []
