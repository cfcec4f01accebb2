"""States in files: the same update, exact resume, and no memory that holds them all."""

import contextlib
import fcntl
import gc
import logging
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_offload import HOST, SPECS, config, small, to_host
from tiny import (
    LLAMA,
    QUICK,
    assert_same_run,
    batch,
    begin,
    begin_random,
    close,
    forget_end,
    make_spec,
    mesh_of,
    random_params,
    resolved,
    rows_of,
    run_overrides,
    same,
)

from jaxtrain.config import load_config
from jaxtrain.main import main
from jaxtrain.optim import make_optimizer
from jaxtrain.optim.state_files import StateFiles
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.settings import UserError
from jaxtrain.train.file_offload import FileUpdates
from jaxtrain.train.restore import non_param_state, restored, saved_part, shapes_of
from jaxtrain.train.step import BeforeUpdate, StepSpec, init_state, make_step, state_shardings
from jaxtrain.train.stop_signal import StopSignal

assert small  # the fixture: each state is in a file, and comes in as many parts as can be
FILES = {"name": "files"}


@contextlib.contextmanager
def opened(spec, mesh, folder):
    """The step with its states in files of a folder."""
    loop = FileUpdates(spec, mesh, folder)
    init = lambda params: loop.kept(spec.optimizer.init(params))
    loop.files.open()
    try:
        yield spec._replace(
            optimizer=spec.optimizer._replace(init=init), update_loop=loop
        ), loop  # fmt: skip
    finally:
        loop.files.close()


def whole_state(loop, optimizer):
    """The state with what is in the files."""
    loop.files.settle()
    read = {key: loop.files.read(key) for key in loop.files.arrays}
    fill = lambda path, x: read.get(jax.tree_util.keystr(path), x)
    return jax.tree_util.tree_map_with_path(fill, optimizer, is_leaf=lambda x: x is None)


def gradients(i):
    return jax.tree.map(lambda p: jnp.sin(9 * p + i), random_params(SPECS))


def begun(name="adamw", **fields):
    """A step without a model, for updates alone."""
    optimizer = make_optimizer(config(name, offload=FILES, **fields), SPECS, 10)
    return StepSpec(None, SPECS, optimizer, jnp.dtype("float32"), jnp.ones(1))


def updated(loop, state, i, accept=True):
    yes, one = jnp.bool(accept), jnp.float32(1)
    before = BeforeUpdate(gradients(i), yes, jnp.bool(True), one, {}, {}, None)
    return loop.update(state, before, loop.spec.optimizer.hyperparams)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("muon", "adamw8bit", "galore")]


# Against the states on the host, which are compared with those on the device in test_offload.py.
@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares operation by operation")
@pytest.mark.parametrize("name", ["adamw", *SLOW])
def test_the_update_from_files_is_the_same_bit_for_bit(name, tmp_path):
    few = {"min_size": 20, "block_size": 4} if name == "adamw8bit" else {}
    few |= {"rank": 2} if name == "galore" else {}
    params = expected = random_params(SPECS)
    with jax.disable_jit():  # no fusion may round differently here than there
        host = None if name == "adamw" else HOST
        other = make_optimizer(config(name, offload=host, **few), SPECS, 10)
        wanted = other.init(params)
        wanted = to_host(wanted, params) if host else wanted
        with opened(begun(name, **few), mesh_of(), tmp_path / "states") as (spec, loop):
            state = init_state(spec, 0, jax.tree.map(jnp.copy, params))
            loop.begin(state.params)
            assert len(loop.in_files) > 2 and loop.files.nbytes > 2 * loop.part_bytes()
            for i, accept in enumerate([True, True, False]):
                given = other.hyperparams, jnp.bool(accept)
                expected, wanted = other.apply(gradients(i), wanted, expected, jnp.int32(i), *given)
                state, metrics = updated(loop, state, i, accept)
                assert metrics["state_read_bytes"] == loop.files.nbytes
            same(state.params, expected)
            same(whole_state(loop, state.optimizer), wanted)
    assert not (tmp_path / "states").exists()


def test_rows_are_written_where_they_are_read(tmp_path):
    files = StateFiles(tmp_path, {"a": jax.ShapeDtypeStruct((4, 3), jnp.float32)})
    files.open()
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    files.write("a", whole)
    files.write("a", -whole[2:3], (2, 3))
    np.testing.assert_array_equal(files.read("a", (1, 3)), [whole[1], -whole[2]])
    np.testing.assert_array_equal(files.read("a")[[0, 1, 3]], whole[[0, 1, 3]])
    files.close()


def test_a_checkpoint_brings_the_files_back_and_moves_states_into_and_out_of_them(tmp_path):
    mesh = mesh_of()
    with opened(begun(), mesh, tmp_path / "states") as (spec, loop), jax.set_mesh(mesh):
        state = begin(spec, mesh)
        loop.begin(state.params)
        with Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
            checkpoints.files = loop.files
            state, _ = updated(loop, state, 0)
            kept = jax.device_get((state.params, whole_state(loop, state.optimizer)))
            like = saved_part(shapes_of(spec, state_shardings(spec, mesh)), spec)
            checkpoints.save(1, state.params, non_param_state(state), {})
            checkpoints.wait()
            after = [updated(loop, state, 1)]
            loop.files.write(min(loop.files.arrays), loop.files.read(min(loop.files.arrays)) + 1)
            back, _ = restored(checkpoints, 1, like, print)
            same((back.params, whole_state(loop, back.optimizer)), kept)
            after.append(updated(loop, back, 1))
            same(after[0][0].params, after[1][0].params)
            # out of the files, and back into them
            plain = spec._replace(optimizer=loop.spec.optimizer)
            places = state_shardings(plain, mesh)
            checkpoints.files = None
            whole, _ = restored(checkpoints, 1, shapes_of(plain, places), print)
            same((whole.params, whole.optimizer), kept)
            checkpoints.save(2, whole.params, non_param_state(whole), {})
            checkpoints.wait()
            checkpoints.files = loop.files
            again, _ = restored(checkpoints, 2, like, print)
            same((again.params, whole_state(loop, again.optimizer)), kept)
            checkpoints.files = None


def stepped(mesh, folder=None, steps=2):
    """Parameters and the whole state after some steps of a model."""
    optim = config("adamw", **({"offload": FILES} if folder else {}))
    spec, hyperparams = make_spec(resolved(**LLAMA), optim)
    with contextlib.ExitStack() as stack, jax.set_mesh(mesh):
        loop = None
        if folder:
            spec, loop = stack.enter_context(opened(spec, mesh, folder))
        state, step = begin_random(spec, mesh), make_step(spec, mesh)
        if loop:
            loop.begin(state.params)
        for i in range(steps):
            rows = place_batch(batch(micro=8, seed=i), mesh, 1)
            done = step(state, rows, hyperparams)
            state, metrics = loop.update(state, done, hyperparams) if loop else done
        states = whole_state(loop, state.optimizer) if loop else state.optimizer
        return jax.device_get((state.params, states, metrics["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"pipeline": 2}], ids=str)
def test_on_a_mesh_it_is_the_same(axes, tmp_path):
    mesh = mesh_of(**axes)
    close(stepped(mesh, tmp_path / "states"), stepped(mesh))


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.slow
def test_no_array_holds_a_state_between_steps(tmp_path):
    mesh = mesh_of()
    with opened(begun(), mesh, tmp_path / "states") as (spec, loop), jax.set_mesh(mesh):
        state, before = begin(spec, mesh), live_bytes()
        loop.begin(state.params)
        for i in range(2):
            state, _ = updated(loop, state, i)
        loop.files.settle()
        assert loop.files.nbytes > 4000
        # A thread that has written an array may hold it for a moment longer.
        deadline = time.monotonic() + 5
        while (resident := live_bytes() - before) >= 0.1 * loop.files.nbytes:
            assert time.monotonic() < deadline, resident


# ---- runs ----------------------------------------------------------------------------------------


def arguments(folder, name="files", *more, **changes):
    fields = QUICK | changes
    return [*run_overrides(folder, run__name=name, **fields), *more]


IN_FILES = "optim.offload.name=files"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_back_on_the_device(tmp_path, monkeypatch):
    """From its checkpoint alone: the files were those of later steps."""
    assert main(arguments(tmp_path, "whole", IN_FILES)) == 0
    row = rows_of(tmp_path / "whole")[-1]
    assert row["state_read_bytes"] == row["state_written_bytes"] > 50_000
    assert not (tmp_path / "whole" / "states").exists()
    for name, how in {"files": IN_FILES, "device": "optim.offload=null"}.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        forget_end(tmp_path / name, 6)
        assert main(arguments(tmp_path, name, how)) == 0
    assert_same_run(tmp_path / "files", tmp_path / "whole")
    losses = [[row["loss"] for row in rows_of(tmp_path / n)] for n in ("device", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # and from the device into files
    forget_end(tmp_path / "device", 3)
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "after", lambda self, step: True)
        assert main(arguments(tmp_path, "device", IN_FILES)) == 0


def checkpointed(folder):
    """A run of three steps with its checkpoint; what was saved of the states."""
    assert main(arguments(folder, "files", IN_FILES, train__steps=3)) == 0
    return folder / "files" / "checkpoints" / "3" / "states"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_damaged_copy_is_not_resumed_from(tmp_path, capsys):
    saved = checkpointed(tmp_path)
    shutil.rmtree(tmp_path / "files" / "model")
    again = arguments(tmp_path, "files", IN_FILES, train__steps=3)
    file = next(saved.glob("*.state"))
    content = file.read_bytes()
    for damage, said in {content[:-4]: "bytes, not", content[:-4] + b"oops": "is damaged"}.items():
        file.write_bytes(damage)
        assert main(again) == 2
        assert said in capsys.readouterr().err
    file.unlink()
    assert main(again) == 2
    assert f"states/{file.name} is missing" in capsys.readouterr().err
    file.write_bytes(content)
    assert main(again) == 0


# ---- the folder ----------------------------------------------------------------------------------

ARRAYS = {"a": jax.ShapeDtypeStruct((4, 8), jnp.float32)}


def test_a_folder_is_of_one_run(tmp_path):
    one, two = StateFiles(tmp_path, ARRAYS), StateFiles(tmp_path, ARRAYS)
    one.open()
    one.write("a", np.ones((4, 8), np.float32))
    with pytest.raises(
        UserError, match=rf"holds the states of another run \(process {os.getpid()}"
    ):
        two.open()
    assert one.read("a", (1, 2)).sum() == 8
    one.close()
    two.open()
    two.close()
    assert not tmp_path.exists()


def test_a_lock_that_was_removed_while_a_run_waited_for_it_locks_nothing(tmp_path, monkeypatch):
    one, two, three = (StateFiles(tmp_path, ARRAYS) for _ in range(3))
    one.open()
    flock = fcntl.flock

    def after_the_end_of_one(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        one.close()
        tmp_path.mkdir()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_end_of_one)
    two.open()
    with pytest.raises(UserError, match="holds the states of another run"):
        three.open()
    two.close()


def test_files_of_the_user_stay_in_a_folder_that_a_run_takes(tmp_path):
    left, own = tmp_path / "0007.state", tmp_path / "model.state"
    left.write_bytes(b"of a run that was killed")
    own.write_bytes(b"of the user")
    files = StateFiles(tmp_path, ARRAYS)
    files.open()
    files.close()
    assert not left.exists() and own.read_bytes() == b"of the user"


def test_a_copy_of_another_dtype_is_converted_and_one_of_another_shape_refused(tmp_path):
    files = StateFiles(tmp_path, {"a": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)})
    files.open()
    copied = np.arange(32, dtype=np.float32).reshape(4, 8)
    files.load("a", copied)
    np.testing.assert_array_equal(files.read("a").astype(np.float32), copied)
    with pytest.raises(UserError, match=r"with the shape \(2, 8\), and this .* \(4, 8\)"):
        files.load("a", copied[:2])
    files.close()


def test_a_checkpointer_that_cannot_take_the_folder_leaves_no_filter_of_the_log(tmp_path):
    one = StateFiles(tmp_path / "states", ARRAYS)
    one.open()
    before = list(logging.getLogger("absl").filters)
    checkpoints = Checkpointer(
        tmp_path, CheckpointConfig(), StateFiles(tmp_path / "states", ARRAYS)
    )
    with pytest.raises(UserError, match="another run"), checkpoints:
        pass
    assert logging.getLogger("absl").filters == before
    one.close()


def test_a_full_disk_is_found_before_the_first_step(tmp_path, monkeypatch):
    def full(file, at, size):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = StateFiles(tmp_path / "states", ARRAYS)
    with pytest.raises(UserError, match="No space left on device; the states take 128 bytes"):
        files.open()
    assert not (tmp_path / "states").exists()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_disk_that_fails_in_a_step_ends_the_run_and_leaves_the_checkpoint(
    tmp_path, monkeypatch, capsys
):
    checkpointed(tmp_path)
    shutil.rmtree(tmp_path / "files" / "model")
    longer = arguments(tmp_path, "files", IN_FILES)
    put = os.pwritev
    written = []

    def full(file, buffers, at):
        written.append(at)
        if len(written) > 40:
            raise OSError(28, os.strerror(28))
        return put(file, buffers, at)

    config = load_config(None, longer)
    saved = config.run_dir / "config.yaml"
    saved.write_text(saved.read_text().replace("steps: 3", "steps: 6"))
    monkeypatch.setattr(os, "pwritev", full)
    assert main(longer) == 2
    assert "states: No space left on device" in capsys.readouterr().err
    assert len(written) > 40 and not (config.run_dir / "checkpoints" / "6").exists()
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied; name a folder"):
        StateFiles(tmp_path / "states", ARRAYS).open()


def test_a_file_that_was_cut_short_is_named(tmp_path):
    files = StateFiles(tmp_path, ARRAYS)
    files.open()
    os.truncate(tmp_path / files.names["a"], 40)
    with pytest.raises(UserError, match=r"0000\.state was cut short while the run used it"):
        files.read("a")
    files.close()
