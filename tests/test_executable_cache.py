"""Compiled steps on disk: which are read, which are not, and that they are the same."""

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import QUICK, SAMPLES, assert_same_run, mesh_of, run_overrides

from jaxtrain.main import main
from jaxtrain.train import executable_cache, program


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of the cache, in a process that runs a command of ours."""
    monkeypatch.setattr(executable_cache, "runs_command", lambda: True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield tmp_path / "cache" / "steps"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def forget_programs():
    jax.clear_caches()
    for file in Path(jax.config.jax_compilation_cache_dir or ".").glob("*-cache"):
        file.unlink()


def update(state, batch, hyperparams, frozen):
    """A step: sums over all rows, a donated state."""
    w = state["w"] - hyperparams["rate"] * jnp.tanh(batch @ state["w"]).mean(0)[:, None]
    return {"w": w, "step": state["step"] + 1}, {"loss": jnp.sum(w**2)}


class Step:
    """A step on a mesh, and how often it was compiled."""

    def __init__(self, devices=1, rows=8):
        self.mesh, self.count = mesh_of(data=devices), 0
        self.everywhere = NamedSharding(self.mesh, P())
        batch = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)
        self.rest = (
            jax.device_put(batch, NamedSharding(self.mesh, P("data"))),
            jax.device_put({"rate": jnp.float32(0.1)}, self.everywhere),
            None,
        )

    def state(self):
        state = {"w": jnp.ones((16, 16)), "step": jnp.int32(0)}
        return jax.device_put(state, self.everywhere, may_alias=False)

    def compile(self, origin="a configuration", options=None, forget=True):
        """forget: JAX's own cache has no program."""

        def compile_step():
            self.count += 1
            logging.getLogger("jaxtrain_kernels").info("attention %s: xla", "T 2048")
            if forget:
                forget_programs()
            step = jax.jit(update, donate_argnums=0, out_shardings=self.everywhere)
            return step.lower(self.state(), *self.rest).compile(options or None)

        arguments = self.state(), *self.rest
        with jax.set_mesh(self.mesh):
            return executable_cache.cached_executable(
                compile_step, origin, arguments, options or {}
            )

    def run(self, compiled):
        """The results of two steps; the first state is donated."""
        first = self.state()
        with jax.set_mesh(self.mesh):
            done = compiled(compiled(first, *self.rest)[0], *self.rest)
        assert all(x.is_deleted() for x in jax.tree.leaves(first))
        return jax.tree.map(np.asarray, done)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_from_disk_is_the_compiled_one_bit_for_bit(folder, devices):
    step = Step(devices)
    compiled, kept = step.compile(), step.compile()
    assert step.count == 1 and len(list(folder.iterdir())) == 1
    assert kept is not compiled
    jax.tree.map(np.testing.assert_array_equal, step.run(compiled), step.run(kept))
    assert program.memory_needed(kept) == program.memory_needed(compiled)
    assert kept.output_shardings == compiled.output_shardings


def other_package():
    folder = tempfile.mkdtemp()
    (Path(folder) / "flax-9.9.dist-info").mkdir()
    return folder


CHANGES = {
    "configuration": lambda step, patch: {"origin": "another"},
    "compiler option": lambda step, patch: {"options": {"xla_cpu_enable_fast_math": True}},
    "source": lambda step, patch: patch.setattr(executable_cache, "SOURCES", ("another", "hash")),
    "flag": lambda step, patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_min_max"),
    "package": lambda step, patch: patch.setattr(
        executable_cache.sys, "path", [*executable_cache.sys.path, other_package()]
    ),
    "batch": lambda step, patch: vars(step).update(rest=Step(rows=16).rest),
    "sharding": lambda step, patch: vars(step).update(vars(Step(devices=2)) | {"count": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_compiled_anew(folder, monkeypatch, change):
    step = Step()
    step.compile()
    more = CHANGES[change](step, monkeypatch) or {}
    step.compile(**more)
    assert step.count == 2
    step.compile(**more)
    assert step.count == 2 and len(list(folder.iterdir())) == 2


def test_kernel_choices_are_logged_without_a_trace(folder, caplog):
    step = Step()
    with caplog.at_level(logging.INFO, "jaxtrain_kernels"):
        step.compile()
        step.compile()
    assert caplog.messages == ["attention T 2048: xla"] * 2 and step.count == 1


def test_a_setting_of_jax_is_in_the_key(folder):
    step = Step()
    step.compile()
    with jax.default_matmul_precision("highest"):
        step.compile()
    assert step.count == 2


@pytest.mark.parametrize("damage", ["cut", "another pickle", "empty"])
def test_a_damaged_file_is_replaced(folder, damage):
    step = Step()
    step.compile()
    (file,) = folder.iterdir()
    if damage == "another pickle":
        executable_cache.write_file(file, executable_cache.pickle.dumps(1))
    else:
        file.write_bytes(file.read_bytes()[:-9] if damage == "cut" else b"")
    step.run(step.compile())
    assert step.count == 2
    step.compile()
    assert step.count == 2


def test_a_program_of_jax_own_cache_is_not_kept(folder):
    """It cannot be serialized again."""
    step = Step()
    step.compile()
    shutil.rmtree(folder)
    jax.clear_caches()
    step.run(step.compile(forget=False))
    assert step.count == 2 and not folder.exists()


@pytest.mark.parametrize(
    "case", ["no command", "no origin", "several processes", "no folder", "fa4"]
)
def test_where_the_key_is_not_sure_nothing_is_kept(folder, monkeypatch, case):
    if case == "no command":
        monkeypatch.undo()
    if case == "several processes":
        monkeypatch.setattr(executable_cache.jax, "process_count", lambda: 2)
    if case == "fa4":
        monkeypatch.setitem(sys.modules, "fa4_jax", SimpleNamespace())
    if case == "no folder":
        jax.config.update("jax_compilation_cache_dir", None)
    step, origin = Step(), None if case == "no origin" else "a configuration"
    step.compile(origin)
    step.compile(origin)
    assert step.count == 2 and not folder.exists()


@pytest.mark.parametrize(
    "main, ours",
    [
        (SimpleNamespace(__spec__=SimpleNamespace(name="jaxtrain.main")), True),
        (SimpleNamespace(__spec__=SimpleNamespace(name="pytest.__main__")), False),
        (SimpleNamespace(__spec__=None, __file__="/usr/bin/jaxtrain"), True),
        (SimpleNamespace(__spec__=None, __file__="train.py"), False),
        (SimpleNamespace(), False),  # an interactive shell
    ],
)
def test_the_processes_that_run_our_functions_alone(monkeypatch, main, ours):
    monkeypatch.setitem(executable_cache.sys.modules, "__main__", main)
    assert executable_cache.runs_command() == ours


def test_a_second_run_neither_traces_nor_lowers_its_step(folder, tmp_path, monkeypatch):
    """Its name is another; what it logs and its weights are the same."""
    lowered, ended = [], []
    real = program.compiling_kernels
    monkeypatch.setattr(program, "compiling_kernels", lambda one: lowered.append(one) or real(one))
    monkeypatch.setattr(program, "stop_workers", lambda: ended.append("workers"))
    fields = QUICK | SAMPLES

    def run(name, **more):
        assert main(run_overrides(tmp_path, **fields | more, run__name=name)) == 0
        return tmp_path / name

    first, second = run("first"), run("second")
    assert len(lowered) == 1 and len(ended) == 2
    assert_same_run(first, second)
    forget_programs()
    run("third", train__steps=5)
    assert len(lowered) == 2


def test_a_step_compiles_before_anything_is_on_the_device(tmp_path, monkeypatch):
    """While its memory is reserved, and the state is initialized."""
    real, given = program.compile_step, []
    note = lambda step, *arguments: given.extend(arguments[:3]) or real(step, *arguments)
    monkeypatch.setattr(program, "compile_step", note)
    assert main(run_overrides(tmp_path, **QUICK)) == 0
    assert len(given) == 3
    assert {type(x) for x in jax.tree.leaves(given)} == {jax.ShapeDtypeStruct}
