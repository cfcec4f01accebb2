"""Validation, by itself: that its figures are right is tested with the runs of test_train.py."""

import jax
import numpy as np

from jaxtrain.data import Batch
from jaxtrain.evaluation import evaluate
from jaxtrain.objectives.next_token import EvaluationSums
from jaxtrain.parallel import make_mesh
from jaxtrain.parallel.mesh import MeshConfig


def test_few_batches_are_in_the_queue_at_once(monkeypatch):
    """Hundreds that exchange with another process waited for one another for ever on CPUs."""
    done, most = [], []

    def scorer(params, batch, sums):
        most.append(int(sums.weight) + 1 - len(done))
        return EvaluationSums(*(np.float32(x + 1) for x in sums))

    monkeypatch.setattr(evaluate.jax, "block_until_ready", done.append)
    mesh = make_mesh(MeshConfig.model_validate({"data": 1}), jax.devices()[:1])
    ints, floats = np.zeros((2, 8), np.int32), np.ones((2, 8), np.float32)
    batches = [Batch(ints, ints, floats, None, None)] * 20
    values = evaluate.validation_metrics(scorer, {}, batches, mesh)
    assert max(most) == evaluate.AHEAD + 1 and values["loss"] == 1.0
    assert [int(sums.weight) for sums in done] == list(range(1, 20 - evaluate.AHEAD + 1))
