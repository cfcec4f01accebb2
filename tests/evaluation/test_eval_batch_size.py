"""`eval.batch_size` has one meaning: the sequences of a batch, summed over all devices."""

import pytest
from tiny import byte_model, random_run, run_overrides

from jaxtrain import data
from jaxtrain.config.resolve import override
from jaxtrain.evaluation.evaluate import held_out_batches
from jaxtrain.evaluation.log_likelihood import shard_model
from jaxtrain.parallel import make_mesh
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fields = run_overrides(folder, data__tokenizer="{name: bytes}", eval__batch_size="null")
    more = ["train.batch_size=32", "train.device_batch_size=2", "train.sequence_length=32"]
    return load_saved(random_run(folder, [*fields, *byte_model(32), *more]))


@pytest.mark.parametrize(("rows", "expected"), [(None, 16), (8, 8), (24, 24)])
def test_validation_and_scoring_have_batches_of_one_size(saved, rows, expected):
    config = override(saved.config, [f"eval.batch_size={rows or 'null'}"])
    mesh = make_mesh(config.mesh)
    assert mesh.size == 8
    store = data.prepare(config.data).validation
    assert len(next(held_out_batches(store, config, mesh)).tokens_BT) == expected
    assert shard_model(saved, config).shape.rows == expected


def test_a_batch_that_does_not_divide_is_refused(saved):
    config = override(saved.config, ["eval.batch_size=12"])
    message = r"eval.batch_size 12 does not divide over 8 devices \(mesh .*\); use 8"
    store = data.prepare(config.data).validation
    for start in (
        lambda: next(held_out_batches(store, config, make_mesh(config.mesh))),
        lambda: shard_model(saved, config),
    ):
        with pytest.raises(UserError, match=message):
            start()
