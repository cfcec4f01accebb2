"""Fields of the configuration: none stands twice, and none is dead."""

import ast
import functools
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import jaxtrain
from jaxtrain.config import Config, variants_of
from jaxtrain.config.resolve import Resolved
from jaxtrain.evaluation.config import EvalConfig
from jaxtrain.inference.config import SampleConfig
from jaxtrain.optim import MuonConfig
from jaxtrain.runs.config import RunConfig
from jaxtrain.train.config import TrainConfig

ROOT = Path(jaxtrain.__file__).parents[1]


# ---- no field twice --------------------------------------------------------------------------


def shadowed(section):
    """Fields that a class declares and a base of it has too: the base's is silently out of use."""
    own = vars(section).get("__annotations__", {})
    bases = [base for base in section.__mro__[1:] if issubclass(base, BaseModel)]
    theirs = {name for base in bases for name in base.model_fields}
    return [f"{section.__name__}.{name}" for name in own if name in theirs]


def sections(base):
    return {s for sub in base.__subclasses__() for s in (sub, *sections(sub))}


def test_no_class_shadows_a_field_of_its_base():
    ours = [s for s in sections(BaseModel) if s.__module__.startswith("jaxtrain")]
    assert len(ours) > 50 and {Config, Resolved, MuonConfig} <= set(ours)
    assert [line for section in ours for line in shadowed(section)] == []

    class Twice(MuonConfig):
        clip_norm: float | None = None
        matrix_lr: float
        another: int

    assert shadowed(Twice) == ["Twice.clip_norm", "Twice.matrix_lr"]


# ---- no dead field ---------------------------------------------------------------------------

SOURCES = [p for p in (ROOT / "jaxtrain").rglob("*.py") if p.name != "config.py"]
SOURCES += [ROOT / "jaxtrain" / "model" / "config.py"]
ELSEWHERE = (RunConfig, TrainConfig, EvalConfig, SampleConfig)  # read as c.SECTION.FIELD


def reads(source):
    """Attributes that are read, as (name before the dot or None, name), and string constants."""
    nodes = list(ast.walk(ast.parse(source)))
    # `t = c.train` makes t another name of a section
    names = {
        node.targets[0].id: node.value.attr
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of = node.value
            before = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", None)
            yield names.get(before, before), node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield None, node.value


@functools.cache
def all_reads(source):
    return frozenset(reads(source))


def dead_fields(model, sources):
    """Fields that no source reads: of its section, or in the folder where it is declared."""
    found = {path: all_reads(text) for path, text in sources.items()}
    everything = set().union(*found.values())

    @functools.cache
    def read_near(folder):
        return {name for path, pairs in found.items() if folder in path.parents
                for _, name in pairs}  # fmt: skip

    def walk(model, section):
        module = sys.modules[model.__module__].__file__
        near = read_near(ROOT / "jaxtrain" / Path(module).relative_to(ROOT / "jaxtrain").parts[0])
        for name, field in model.model_fields.items():
            parts = [v for v in variants_of(field) if issubclass(v, BaseModel)]
            for part in parts:
                yield from walk(part, name)
            one = section.removesuffix("s")  # `for phase in c.train.phases`
            wanted = not everything.isdisjoint({(section, name), (one, name)})
            if not (parts or wanted or (name in near and model not in ELSEWHERE)):
                yield f"{section}.{name}"

    return sorted(set(walk(model, "")))


@pytest.fixture(scope="module")
def sources():
    return {path: path.read_text() for path in SOURCES}


def test_every_field_is_read(sources):
    assert dead_fields(Config, sources) == []


def test_a_field_that_nobody_reads_is_found(sources):
    def without(text, *files):
        paths = [ROOT / "jaxtrain" / file for file in files]
        assert all(text in sources[path] for path in paths)
        return sources | {path: sources[path].replace(text, "None") for path in paths}

    assert dead_fields(Config, without("s.top_p", "inference/generate.py")) == ["sample.top_p"]
    dead = dead_fields(Config, without("config.keep_every", "runs/checkpoint.py", "runs/mirror.py"))
    assert dead == ["checkpoint.keep_every"]
