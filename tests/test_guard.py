"""Steps that are not sound: found, never saved, and left out as the configuration says."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    FEW_PARTS,
    LLAMA,
    QUICK,
    assert_same_run,
    batch,
    begin_random,
    make_spec,
    mesh_of,
    resolved,
    rows_of,
    run_overrides,
    same,
    steps_of,
    weights_of,
)

from jaxtrain import data
from jaxtrain.main import main
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig, MetricsConfig
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.settings import UserError
from jaxtrain.train.checks import Checks, SkipNonfinite, nonfinite_values
from jaxtrain.train.config import DiLoCo, LossSpike, ResolvedTrain
from jaxtrain.train.guard import Guard, Taken, culprit
from jaxtrain.train.local_sgd import replicate_step
from jaxtrain.train.loss_spikes import detect_spike, from_plain, no_spikes, to_plain
from jaxtrain.train.step import StepSpec, make_step

ROOT = Path(__file__).parents[1]

# ---- in the step -------------------------------------------------------------------------------


def stepped(task, hyperparams, mesh, weights, start=None):
    """(state before, state after, metrics) of a step; `weights` change those of the batch."""
    with jax.set_mesh(mesh):
        before = start or begin_random(task, mesh)
        kept = jax.device_get(before)
        one = batch(8, micro=8)
        one = one._replace(weights_BT=np.array(weights(one.weights_BT)))
        after, metrics = make_step(task, mesh)(before, place_batch(one, mesh, 1), hyperparams)
    return kept, jax.device_get(after), jax.device_get(metrics)


def with_nan(weights):
    weights = weights.copy()
    weights[0, -1, 3] = np.nan  # a token of the last replica's
    return weights


@pytest.fixture(scope="module")
def small():
    return make_spec(resolved(**LLAMA | {"depth": 1}))


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_found_and_left_out_bit_for_bit(small):
    task, hyperparams = small
    for skip in (False, True):
        asked = task._replace(transforms=(SkipNonfinite(),) * skip)
        before, after, metrics = stepped(asked, hyperparams, mesh_of(), with_nan)
        assert metrics["checks"].finite == 0 and after.step == 1
        assert metrics["checks"].nonfinite.any() != skip
        if skip:
            same((after.params, after.optimizer), (before.params, before.optimizer))
            assert metrics["skipped"] == 1
        before, after, metrics = stepped(asked, hyperparams, mesh_of(), lambda w: w)
        assert metrics["checks"].finite == 1 and not metrics["checks"].nonfinite.any()
        assert (after.params["embed"] != before.params["embed"]).any()


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_found(small):
    task, hyperparams = small
    wild = jax.tree.map(lambda x: x, hyperparams)
    wild["groups"]["head" if "head" in wild["groups"] else "embedding"]["learning_rate"] = jnp.inf
    _, after, metrics = stepped(task, wild, mesh_of(), lambda w: w)
    checks = metrics["checks"]
    assert np.isfinite(metrics["loss"]) and np.isfinite(checks.gradient_squares).all()
    assert checks.finite == 0
    leaves = jax.tree.leaves(after.params)
    np.testing.assert_array_equal(checks.nonfinite, [(~np.isfinite(x)).sum() for x in leaves])


@pytest.mark.slow
def test_all_replicas_leave_out_what_one_of_them_cannot_use(small):
    task, hyperparams = small
    mesh = mesh_of(data=4)
    task = replicate_step(task._replace(transforms=(SkipNonfinite(),)), DiLoCo(every=1), mesh)
    before, after, metrics = stepped(task, hyperparams, mesh, with_nan)
    same(after.optimizer.replicas.optimizer, before.optimizer.replicas.optimizer)
    assert metrics["checks"].finite < 1 and metrics["skipped"] == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    _, _, metrics = stepped(task, hyperparams, mesh, lambda w: w)
    assert metrics["checks"].finite == 1 and metrics["skipped"] == 0


# ---- spikes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_is_far_above_the_window_before_it(action):
    c = LossSpike(window=8, deviations=3.0, action=action)
    random, judge = np.random.default_rng(0), jax.jit(lambda s, x, n: detect_spike(s, x, n, c))
    losses, norms = random.normal(3, 0.1, 40), random.normal(1, 0.1, 40)
    losses[20], norms[30], losses[2], losses[35] = 9.0, 9.0, 50.0, np.nan
    spikes, seen = no_spikes(8), []
    for i in range(40):
        spike, spikes = judge(spikes, jnp.float32(losses[i]), jnp.float32(norms[i]))
        if spike[0]:
            seen.append(i)
        if i > 8 and i != 35:
            last = [x for x in losses[:i] if np.isfinite(x)][-8:]
            far = (losses[i] - np.mean(last)) / np.std(last, ddof=1)
            assert spike[1] == pytest.approx(far, rel=1e-3, abs=1e-3)
    assert {20} <= set(seen) and (30 in seen) == (action == "skip")
    assert 2 not in seen and 35 not in seen  # too early; and no number
    again = from_plain(json.loads(json.dumps(to_plain(spikes))), 8)
    same(again, spikes)
    assert from_plain(to_plain(spikes), 4).count == 0


# ---- a run -------------------------------------------------------------------------------------


class Poison:
    """Batches of these numbers, from 1: `nan` has a weight that is none, `odd` has targets that no
    text has, `gone` is not there."""

    def __init__(self, monkeypatch):
        self.bad, real = {}, data.train_batches

        def poisoned(*args, **kwargs):
            loader = real(*args, **kwargs)
            take, poison = type(loader).__next__, self

            class Poisoned(type(loader)):
                def __next__(self):
                    one = take(self)
                    kind = poison.bad.get(self.get_state()["position"]["step"])
                    if kind == "gone":
                        return self.__next__()
                    if kind == "nan":
                        return one._replace(weights_BT=np.full_like(one.weights_BT, np.nan))
                    if kind == "odd":
                        return one._replace(targets_BT=np.full_like(one.targets_BT, 200))
                    return one

            loader.__class__ = Poisoned
            return loader

        monkeypatch.setattr(data, "train_batches", poisoned)


@pytest.fixture
def poison(monkeypatch):
    return Poison(monkeypatch)


def events_of(run_dir, name):
    return [(r["step"], r[name]) for r in rows_of(run_dir, "event") if name in r]


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_what_is_not_finite_is_never_saved_whatever_is_logged(tmp_path, poison, capfd):
    """The checkpoint of step 4 would be the fourth, and `keep` 2 would take the last good ones."""
    poison.bad = {3: "nan"}
    asked = {"metrics__every": 25, "checkpoint__every": 1, "train__steps": 12} | QUICK
    assert main(run_overrides(tmp_path, **asked)) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert re.match(
        r"error: step 3: the loss is nan; the last good checkpoint is 2; the larg", line
    )
    assert "train.on_nonfinite=rollback" in line
    assert steps_of(tmp_path / "tiny") == [1, 2]
    with Checkpointer(tmp_path / "tiny", CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() == 2


ROLLBACK = {"train__on_nonfinite": "rollback", "checkpoint__every": 2, "train__steps": 8}
ROLLBACK |= {"checkpoint__keep": 9} | QUICK


def roll_back(tmp_path, poison):
    """(a run that leaves batches 5 and 6 out, one that comes to do so at a nan in step 6)."""
    poison.bad = {5: "gone", 6: "gone"}
    assert main(run_overrides(tmp_path / "without", **ROLLBACK)) == 0
    poison.bad = {6: "nan"}
    assert main(run_overrides(tmp_path / "back", **ROLLBACK)) == 0
    return tmp_path / "without" / "tiny", tmp_path / "back" / "tiny"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_rollback_goes_on_as_if_the_batches_since_had_not_been(tmp_path, poison, capfd):
    without, back = roll_back(tmp_path, poison)
    assert_same_run(back, without)
    ((step, text),) = events_of(back, "rollback")
    assert step == 5 and "step 6: the loss is nan; " in text
    assert "rolled back to checkpoint 4, continuing without the batches 5 to 6" in text
    assert text in capfd.readouterr().out
    assert steps_of(back) == [2, 4, 6, 8]


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_that_was_killed_behind_a_rollback_goes_the_same_way(tmp_path, poison):
    without, back = roll_back(tmp_path, poison)
    for checkpoint in (6, 4):  # behind the return, and before it
        for later in range(checkpoint + 2, 10, 2):
            shutil.rmtree(back / "checkpoints" / str(later), ignore_errors=True)
        shutil.rmtree(back / "model")
        assert main(run_overrides(tmp_path / "back", **ROLLBACK)) == 0
        assert_same_run(back, without)
        assert len(events_of(back, "rollback")) == 1


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_skip_leaves_out_an_update_and_gives_up_after_so_many(tmp_path, poison, capfd):
    asked = {"train__on_nonfinite": "skip", "train__steps": 8, "checkpoint__keep": 9}
    asked |= {"train__max_consecutive_skips": 2, "sample__prompts": "['']", "sample__tokens": 8}
    asked |= QUICK
    poison.bad = {2: "nan", 4: "nan", 5: "nan"}
    assert main(run_overrides(tmp_path, **asked)) == 0
    run_dir = tmp_path / "tiny"
    assert [step for step, _ in events_of(run_dir, "skip")] == [2, 4, 5]
    assert [row["skipped"] for row in rows_of(run_dir)] == [0, 1, 0, 1, 1, 0, 0, 0]
    kept = shutil.copytree(run_dir, tmp_path / "kept" / "tiny")
    for name in ("6", "8"):
        shutil.rmtree(run_dir / "checkpoints" / name)
    shutil.rmtree(run_dir / "model")
    assert main(run_overrides(tmp_path, **asked)) == 0
    assert_same_run(run_dir, kept)
    capfd.readouterr()
    poison.bad |= {6: "nan"}
    shutil.rmtree(run_dir / "checkpoints" / "6")
    shutil.rmtree(run_dir / "checkpoints" / "8")
    assert main(run_overrides(tmp_path, **asked)) == 2
    error = capfd.readouterr().err
    assert "the updates of 2 steps in a row before it were skipped" in error
    assert "the last good checkpoint is 3" in error


@pytest.mark.slow
def test_processes_go_back_together(tmp_path):
    """Of a rate that no return can help: both go back twice, and end with the same line."""
    asked = {"train__on_nonfinite": "rollback", "train__max_consecutive_skips": 2}
    asked |= {"checkpoint__every": 1, "train__steps": 20, "optim__name": "adamw"} | FEW_PARTS
    asked |= {"optim__learning_rate": 1e30, "model__logit_softcap": "null"}
    command = [sys.executable, "-m", "jaxtrain.cluster.launch", "--processes", "2"]
    command += ["--devices-per-process", "1", "--", *run_overrides(tmp_path, **asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout
    said = re.findall(
        r"\[(.)\] error: .*the run rolled back to checkpoint \d 2 times already", done.stdout
    )
    assert said, done.stdout
    assert len(re.findall(r"rolled back to checkpoint \d, continuing without ", done.stdout)) == 2
    assert "Traceback" not in done.stdout


SPIKE = "{window: 8, deviations: 2, rollback_steps: 3, skip_batches: 5, action: rollback}"
SPIKED = {"train__steps": 16, "checkpoint__every": 4, "checkpoint__keep": 9,
          "sample__prompts": "['']", "sample__tokens": 8} | QUICK  # fmt: skip


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_spike_goes_back_and_leaves_out_the_batches_around_it(tmp_path, poison, capfd):
    """Seen at step 12, from checkpoint 8 on: batches 9 are trained again, 10 to 14 are not."""
    asked = SPIKED | {"train__loss_spike": SPIKE}
    poison.bad = dict.fromkeys(range(10, 15), "gone")
    assert main(run_overrides(tmp_path / "without", **asked)) == 0
    without = tmp_path / "without" / "tiny"

    poison.bad = {12: "odd"}
    assert main(run_overrides(tmp_path / "back", **asked)) == 0
    back = tmp_path / "back" / "tiny"
    assert_same_run(back, without)
    ((step, text),) = events_of(back, "rollback")
    assert step == 9 and re.match(r"step 12: the loss is [\d.]+, [\d.]+ standard deviations", text)
    assert "rolled back to checkpoint 8, continuing without the batches 10 to 14" in text

    for checkpoint in (12, 8):  # the batches that are left out are in the checkpoint of step 12
        for later in range(checkpoint + 4, 20, 4):
            shutil.rmtree(back / "checkpoints" / str(later), ignore_errors=True)
        shutil.rmtree(back / "model")
        assert main(run_overrides(tmp_path / "back", **asked)) == 0
        assert_same_run(back, without)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_update_of_a_spike_is_left_out(tmp_path, poison):
    poison.bad = {12: "odd"}
    asked = SPIKED | {
        "train__loss_spike": SPIKE.replace("action: rollback", "action: skip").replace(
            "deviations: 2", "deviations: 6"
        )
    }
    assert main(run_overrides(tmp_path, **asked)) == 0
    run_dir = tmp_path / "tiny"
    skipped = [row["skipped"] for row in rows_of(run_dir)]
    assert [i for i, x in enumerate(skipped, 1) if x] == [12]
    ((step, text),) = events_of(run_dir, "skip")
    assert step == 12 and text.endswith("its update is skipped")
    kept = weights_of(run_dir)
    for name in ("12", "16"):
        shutil.rmtree(run_dir / "checkpoints" / name)
    shutil.rmtree(run_dir / "model")
    assert main(run_overrides(tmp_path, **asked)) == 0
    same(weights_of(run_dir), kept)


# ---- what is said ------------------------------------------------------------------------------


def taken(step=3, loss=2.0, squares=(1.0, 1.0), bad=(0.0, 0.0), scale=None):
    fine = np.isfinite(loss) and np.isfinite(squares).all() and not any(bad)
    checks = Checks(np.float32(fine), np.asarray(squares), np.asarray(bad))
    return Taken(step, step, np.float32(loss), checks, scale)


def test_the_culprit_is_the_loss_else_a_gradient_else_the_update():
    names = ["a", "b"]
    assert culprit(names, taken(loss=np.nan, squares=(1, 4)))[0] == "step 3: the loss is nan"
    assert culprit(names, taken(loss=np.nan, squares=(1, 4)))[1].endswith("that of b (norm 2)")
    what, where = culprit(names, taken(squares=(np.inf, 1)))
    assert "1 of 2 gradients are not finite (the loss is 2)" in what and "of a (norm inf)" in where
    what, where = culprit(names, taken(bad=(0, 7)))
    assert "the update made 1 of 2 parameters nan or inf" in what and where.endswith("of b")


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path):
    sizes = {"batch_size": 1, "device_batch_size": 1, "steps": 9, "tokens_per_parameter": 12}
    c = ResolvedTrain(on_nonfinite="rollback", **sizes)
    writer = MetricsWriter(
        tmp_path, MetricsConfig(tensorboard=False), total_steps=9, tokens_per_step=1, primary=False
    )
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        spec = StepSpec(None, {"a": 0, "b": 0}, None, jnp.dtype("float32"), jnp.ones(1))
        guard = Guard(c, spec, checkpoints, None)
        guard.pending.append(taken(loss=np.nan))
        with pytest.raises(UserError, match="no checkpoint was saved yet"):
            guard.look(writer, wait=True)


def test_values_that_rounding_makes_infinite_are_counted():
    """A 16-bit parameter is counted as it is stored, so that no float32 copy is written for it."""
    params = {"a": jnp.asarray([1.0, jnp.inf], jnp.bfloat16), "b": jnp.asarray([jnp.nan, jnp.inf])}
    assert nonfinite_values(params).tolist() == [1, 2]
    barriers = jax.jit(nonfinite_values).lower(params).as_text().count("optimization_barrier")
    assert barriers == 1
