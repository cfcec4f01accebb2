"""Saving, by itself: what a run's checkpoints are for is tested in test_train.py."""

import errno
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import serialization

from jaxtrain.runs import checkpoint
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import full_disk_explained, write_whole


def compiled_by(save):
    """How many programs were compiled."""
    found = []

    def listen(event, seconds, **_):
        found.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        save()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)


@pytest.mark.slow
def test_a_save_compiles_no_program_for_each_small_array_and_device(tmp_path, monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    params = {f"w{i}": jax.device_put(jnp.ones((8, 100 + i)), whole) for i in range(4)}

    def save(folder):
        with Checkpointer(tmp_path / folder, CheckpointConfig()) as checkpoints:
            checkpoints.save(1, params, {"one": np.ones(1)}, {})
            checkpoints.wait()
            for name, x in checkpoints.restore_params(1, params).items():
                np.testing.assert_array_equal(x, params[name])

    assert compiled_by(lambda: save("small")) == 0
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1)  # so that they count as large
    assert compiled_by(lambda: save("large")) >= 4


# ---- a disk that is full -------------------------------------------------------------------------


def saving(folder, keep=9):
    """A checkpointer with one whole checkpoint, and what to save next."""
    checkpoints = Checkpointer(folder, CheckpointConfig(keep=keep))
    params, rest = {"w": jnp.ones((64, 64))}, {"step": np.ones(1)}
    checkpoints.save(1, params, rest, {})
    checkpoints.wait()
    return checkpoints, params, rest


def test_a_checkpoint_that_has_no_room_is_not_begun(tmp_path, monkeypatch):
    checkpoints, params, rest = saving(tmp_path)
    free = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: free)
    said = r"No space left on device: a checkpoint needs 16,392 bytes, and 10,000 are free; "
    with pytest.raises(UserError, match=said + "of checkpoints, the newest whole one is 1. Free"):
        checkpoints.save(2, params, rest, {})
    checkpoints.close()
    assert [p.name for p in checkpoints.directory.iterdir()] == ["1"]


@pytest.mark.parametrize("seen", ["at the next step", "at the next save", "at the end"])
def test_a_disk_that_fills_up_while_it_is_written_is_one_line(tmp_path, monkeypatch, seen, capfd):
    """As tensorstore says it, from a thread. Nothing half-written stays, nothing is waited for."""
    checkpoints, params, rest = saving(tmp_path)

    async def full(*_, **__):
        raise ValueError(
            "RESOURCE_EXHAUSTED: Error writing x [OS error 28: No space left on device]"
        )

    monkeypatch.setattr(serialization, "async_serialize_from_host", full)
    checkpoints.save(2, params, rest, {})
    with pytest.raises(UserError, match="No space left on device; of checkpoints, .* one is 1. "):
        if seen == "at the next step":
            while True:
                checkpoints.check()
        elif seen == "at the next save":
            checkpoints.save(3, params, rest, {})
        checkpoints.close()
    checkpoints.close()
    assert [p.name for p in checkpoints.directory.iterdir()] == ["1"]
    assert "Traceback" not in capfd.readouterr().err


def test_another_fault_is_raised_as_it_is(tmp_path, monkeypatch):
    checkpoints, params, rest = saving(tmp_path)

    async def broken(*_, **__):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(serialization, "async_serialize_from_host", broken)
    checkpoints.save(2, params, rest, {})
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        checkpoints.wait()


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_whole(path, "old")

    def full(self, data):
        self.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    explained = full_disk_explained(lambda said: f"a place: {said}")
    with pytest.raises(UserError, match="a place: No space left on device"), explained:
        raise RuntimeError("write() failed: No space left on device; writing x")  # array_record
    with pytest.raises(RuntimeError, match="else"), full_disk_explained(str):
        raise RuntimeError("something else")
