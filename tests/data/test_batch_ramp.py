"""Batches that grow: the stages, the stream of documents, the schedule over tokens, resuming."""

import os
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    QUICK,
    assert_same_run,
    close,
    mesh_of,
    on_one_device,
    rows_of,
    run_overrides,
    weights_of,
)

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.data import Batch, DataConfig, train_batches
from jaxtrain.data.batches.mixture import BatchSizes
from jaxtrain.data.batches.ramps import (
    BatchRamp,
    LengthRamp,
    batch_stages,
    length_stages,
    overlay,
)
from jaxtrain.main import main
from jaxtrain.optim.rate_schedule import RateSchedule
from jaxtrain.optim.schedule import Linear
from jaxtrain.settings import UserError
from jaxtrain.train import feed
from jaxtrain.train.program import Program

RAMP = QUICK | {
    "data__batch_ramp": "{start: 8, tokens: 2048}", "train__batch_size": 32,
    "sample__prompts": "['']",
}  # fmt: skip


def fields(stages):
    return [(s.batch_size, s.sequence_length, s.tokens) for s in stages]


def test_each_size_has_an_equal_part_and_the_last_goes_on():
    stages = batch_stages(BatchRamp(start=2, tokens=600), 8)
    assert fields(stages) == [(2, None, 300), (4, None, 300), (None, None, None)]


def test_a_start_that_does_not_double_to_the_batch_is_refused():
    with pytest.raises(UserError, match=r"data\.batch_ramp\.start=3: .*set .*start=4"):
        batch_stages(BatchRamp(start=3, tokens=600), 8)


def test_two_ramps_change_where_either_does():
    rows = batch_stages(BatchRamp(start=4, tokens=300), 8)
    lengths = length_stages(LengthRamp(start=8, tokens=800), 32)
    found = [(4, 8, 300), (None, 8, 100), (None, 16, 400), (None, None, None)]
    assert fields(overlay(rows, lengths)) == found == fields(overlay(lengths, rows))


def test_steps_and_tokens_are_counted_through_the_sizes():
    sizes = BatchSizes((0, 4, 6), (2, 4, 8), 10)
    assert [sizes.tokens(n) for n in (0, 1, 4, 5, 6, 8)] == [0, 20, 80, 120, 160, 320]
    assert [sizes.steps(t) for t in (0, 79, 80, 159, 160, 320)] == [0, 3, 4, 5, 6, 8]
    assert sizes.shares(8) == ((0, 0.25), (4, 0.5), (6, 1.0))
    assert BatchSizes((0,), (8,), 10).shares(8) == ()


def test_a_ramp_reads_the_same_documents_in_the_same_order(store_of):
    """Rows of two processes, put together, are those of steps of one size; so after a resume."""
    store = store_of(range(5, 60))
    stages = [{"tokens": 96, "batch_size": 2}, {"tokens": 96, "batch_size": 4}, {}]
    ramped = DataConfig.model_validate({"stages": stages})

    def rows(config, steps, state=None, index=0, count=1):
        more = {"process_index": index, "process_count": count, "state": state}
        with train_batches(store, config=config, batch_size=8, sequence_length=24, **more) as read:
            return [next(read).tokens_BT for _ in range(steps)], read.get_state()

    plain = np.concatenate(rows(DataConfig(), 3)[0])
    whole, _ = rows(ramped, 5)
    assert [len(step) for step in whole] == [2, 2, 4, 8, 8]
    assert np.array_equal(np.concatenate(whole), plain)
    _, state = rows(ramped, 1)
    halves = [rows(ramped, 4, state, index, 2)[0] for index in (0, 1)]
    for step, *parts in zip(whole[1:], *halves):
        assert np.array_equal(np.concatenate(parts), step)


def test_the_schedule_goes_over_tokens_and_rates_follow_the_step():
    """Four quarters of a step are one step; in them rates are those of half the root."""
    shares = ((0, 0.25), (4, 1.0))
    clock = RateSchedule(Linear(warmup_steps=1), None, shares, 0.5)
    plain = RateSchedule(Linear(warmup_steps=1), None, (), 0.5)
    hyper, whole = clock.values(7), plain.values(4)
    for step, position in ((0, 0.0), (2, 0.5), (4, 1.0), (6, 3.0)):
        at, factor = clock.at(jnp.int32(step), hyper)
        expected = plain.at(jnp.float32(position), whole)[1] * (0.5 if step < 4 else 1.0)
        assert float(at) == position and float(factor) == pytest.approx(float(expected))
    with pytest.raises(UserError, match="the run has 4 steps"):
        RateSchedule(Linear(warmup_steps=5), None, shares, 0.5).values(7)


@pytest.mark.parametrize(("units", "shape"), [(2, (1, 2)), (4, (1, 4)), (12, (3, 4))])
def test_microbatches_have_the_rows_of_a_device_or_fewer(units, shape):
    train = SimpleNamespace(device_batch_size=4, sequence_length=8)
    program = Program.__new__(Program)
    program.prepare = lambda batch: batch
    program.plan = SimpleNamespace(config=SimpleNamespace(train=train), mesh=mesh_of())
    rows = np.zeros((units * 2, 4))  # of half the length, twice as many
    placed = program.shard_batch(Batch(rows, rows, rows, None, None))
    assert placed.tokens_BT.shape == (shape[0], shape[1] * 2, 4)


def test_steps_follow_from_the_tokens(tmp_path):
    """1024 tokens of 256 and of 512 a step, the rest of 1024."""
    given = [o for o in run_overrides(tmp_path, **RAMP) if "train.steps" not in o]
    plain = [o for o in given if "batch_ramp" not in o]
    steps, usual = (resolve(load_config(None, o), 384).train.steps for o in (given, plain))
    assert steps == usual - 2 + 4 + 2


def test_a_stage_that_does_not_divide_over_the_devices_is_refused(tmp_path, capfd):
    stages = "[{tokens: 64, batch_size: 4}, {}]"
    assert main(run_overrides(tmp_path, data__stages=stages)) == 2
    assert "stage 1 has batch_size 4, which does not divide over 8" in capfd.readouterr().err


NINE = RAMP | {"train__steps": 9}


@pytest.fixture(scope="module")
def ramped(tmp_path_factory):
    """A run through the ramp without a stop: steps of 256, of 512 (from step 5 on) and of 1024
    tokens (from step 7 on)."""
    directory = tmp_path_factory.mktemp("ramped")
    with on_one_device():
        assert main(run_overrides(directory, **NINE)) == 0
    return directory / "tiny"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [2, 6], ids=["inside", "at the end"])
def test_a_run_through_the_ramp_is_the_same_when_it_is_resumed(ramped, tmp_path, kill_at):
    stopped = run_overrides(tmp_path, **NINE, checkpoint__every=1)
    take = feed.Feed.take

    def kill(self):
        batch = take(self)
        if self.position["position"]["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed.Feed, "take", kill)
        assert main(stopped) == 0
    assert main(stopped) == 0
    assert_same_run(tmp_path / "tiny", ramped)
    rows = rows_of(ramped)
    assert [row["tokens"] for row in rows] == [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120]


@pytest.mark.slow
def test_a_ramp_is_the_same_accumulated_and_over_devices(tmp_path):
    """Rows of a device: all, or one with the parameters divided over devices. Batches of 16, and
    from step 3 on of 32."""
    ramp = RAMP | {"data__batch_ramp": "{start: 16, tokens: 2048}"}
    ramp |= {"train__steps": 4, "optim__name": "sgd"}
    for name, more in {
        "whole": {"train__device_batch_size": 4},
        "fsdp": {"mesh__data": 4, "mesh__fsdp": 2},
    }.items():
        assert main(run_overrides(tmp_path / name, **ramp | more)) == 0
    weights = [weights_of(tmp_path / name / "tiny") for name in ("whole", "fsdp")]
    close(weights[1], weights[0], 1e-4, 1e-5)
