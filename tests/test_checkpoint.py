"""Saving, by itself: what a run's checkpoints are for is tested in test_train.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import checkpoint
from jaxtrain.checkpoint import CheckpointConfig, Checkpointer


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
