"""Populations: each member is the run that it would be alone, in a run directory of its own."""

import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from jaxtrain_kernels.dispatch import on_target
from tiny import (
    FEW_PARTS,
    SAMPLES,
    build,
    close,
    rows_of,
    run_overrides,
    same,
    steps_of,
    weights_of,
)

import jaxtrain
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.estimate.workload import abstract_state, batch_shapes, load_workload
from jaxtrain.evaluation.evaluate import evaluate
from jaxtrain.optim import make_optimizer
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.report import write_report
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train import population
from jaxtrain.train.loop import TrainResult, train
from jaxtrain.train.plan import RunLog, make_plans
from jaxtrain.train.population import train_population
from jaxtrain.train.population_checks import MEMBER_FIELDS, TRACED, check_configs, check_plans
from jaxtrain.train.population_members import Member, is_batched, make_population_step

# Two members: other initial values, another order of the data, other rates.
SECOND = {"run__seed": 7, "data__seed": 3, "optim__matrix_lr": 0.03, "optim__momentum": 0.8}


def config(directory, name, **changes):
    fields = {"run__name": name, "eval__every": 2} | FEW_PARTS | SAMPLES | changes
    return load_config(None, run_overrides(directory, **fields))


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """A population trains on one device; the tests have eight."""
    devices = jax.devices()[:1]
    patch = pytest.MonkeyPatch()
    patch.setattr(jax, "devices", lambda *_: devices)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """The directories of a population of two, not to be changed; and its results."""
    directory = tmp_path_factory.mktemp("population")
    configs = [config(directory, "first"), config(directory, "second", **SECOND)]
    return directory, train_population(configs)


def test_a_member_is_the_run_trained_alone(members, tmp_path):
    directory, results = members
    alone = train(config(tmp_path, "second", **SECOND | {"sample__prompts": "[]"}))
    for kind, steps in (("train", [1, 2, 3, 4, 5, 6]), ("validation", [2, 4, 6])):
        ours, own = (rows_of(d, kind) for d in (directory / "second", alone.directory))
        assert [row["step"] for row in ours] == steps
        for one, other in zip(ours, own, strict=True):
            assert one.keys() == other.keys() and one.pop("kind") == other.pop("kind")
            close(one, other, rtol=1e-4)
    # Muon makes a rounding error of a small gradient as large as the step.
    close(weights_of(directory / "second"), weights_of(alone.directory), rtol=1e-2, atol=1e-3)
    assert results[1].metrics == pytest.approx(alone.metrics, rel=1e-4)
    assert results[1].step == alone.step == 6 and not results[1].stopped


@pytest.mark.slow
def test_initial_values_are_those_of_a_run_alone_bit_for_bit(tmp_path):
    plan = make_plans(config(tmp_path, "a"), Coordinator(), RunLog(Coordinator(), quiet=True))[0]
    specs, seed = plan.partition.trainable, plan.run.run.seed
    from jaxtrain.model import initialize

    alone = jax.jit(lambda: initialize(specs, seed))()
    traced = jax.jit(lambda seed: initialize(specs, seed))(jnp.uint32(seed))
    same(alone, traced)


def test_each_member_has_a_run_directory_that_commands_take(members):
    directory, results = members
    for result, name in zip(results, ("first", "second"), strict=True):
        folder = directory / name
        assert result.directory == folder
        found = {path.name for path in folder.iterdir()}
        files = {"config.yaml", "env.json", "data.json", "metrics.jsonl", "report.html"}
        assert found == files | {"checkpoints", "model", "samples", "tokenizer"}
        assert steps_of(folder) == [3, 6]
        assert write_report(folder).is_file()
        rows = read_rows(folder / "metrics.jsonl")
        assert rows[0]["population"] == 2 and rows[-1]["status"] == "finished"
    saved = load_saved(directory / "second")
    assert saved.config.run.seed == 7 and saved.config.optim.matrix_lr == 0.03
    assert evaluate(saved, saved.config) == pytest.approx(results[1].metrics, rel=1e-4)
    first, second = (weights_of(directory / name) for name in ("first", "second"))
    assert any((first[name] != second[name]).any() for name in first)


def members_at(*steps):
    """As they are before a run of six steps: the checkpoints that each has."""
    found = []
    for own in map(list, steps):
        one = object.__new__(Member)
        one.run_dir, one.failure = Path("none"), None
        one.plan = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(steps=6)))
        one.checkpoints = SimpleNamespace(
            steps=lambda own=own: own, latest=lambda own=own: max(own, default=None),
            delete_after=lambda step, own=own: own.remove(max(own)),
        )  # fmt: skip
        found.append(one)
    return found


def test_all_members_go_on_from_the_newest_step_that_each_has(monkeypatch):
    monkeypatch.setattr(population, "divergence_of", lambda member: None)
    members = members_at([3, 6], [3])
    assert population.common_step(members, 3) == 3
    assert [m.checkpoints.steps() for m in members] == [[3], [3]]
    assert population.common_step(members_at([], []), 3) == 0


@pytest.mark.slow
def test_a_population_that_was_killed_equals_the_uninterrupted_one(members, tmp_path):
    """Killed while the last checkpoints were written: one member has its own, the other not."""
    directory, _ = members
    shutil.copytree(directory, tmp_path / "again")
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / "again" / name / "model")
    shutil.rmtree(tmp_path / "again" / "second" / "checkpoints" / "6")
    again = functools.partial(config, tmp_path / "again")
    train_population([again("first"), again("second", **SECOND)])
    for name in ("first", "second"):
        same(weights_of(directory / name), weights_of(tmp_path / "again" / name))
        assert rows_of(directory / name) == rows_of(tmp_path / "again" / name)
        assert steps_of(tmp_path / "again" / name) == [3, 6]


def test_members_that_are_not_of_one_population_are_left_as_they_are(members, tmp_path):
    directory, _ = members
    shutil.copytree(directory / "first", tmp_path / "again" / "first")
    configs = [config(tmp_path / "again", "first"), config(tmp_path / "again", "new", run__seed=1)]
    with pytest.raises(UserError, match=r"first is at step 6, .*new at step 0: members of"):
        train_population(configs)
    assert steps_of(tmp_path / "again" / "first") == [3, 6]


@pytest.mark.slow
def test_a_member_that_diverges_is_left_behind(tmp_path):
    fields = {"eval__every": "null", "sample__prompts": "[]", "train__steps": 4}
    optim = {"optim": "{name: adamw, schedule: {name: constant, warmup_steps: 0}}"}
    fields |= optim | {"checkpoint__every": 2}
    bad = fields | {"optim__learning_rate": 1e38, "optim__weight_decay": 1e38}
    configs = [config(tmp_path, "good", **fields), config(tmp_path, "bad", **bad)]
    good, failed = train_population(configs)
    assert good.failure is None and good.step == 4 and (good.directory / "model").is_dir()
    assert failed.failure is not None and "nan" in failed.failure and failed.step < 4
    assert not (failed.directory / "model").exists()
    rows = read_rows(failed.directory / "metrics.jsonl")
    assert rows[-2]["diverged"] == failed.failure and rows[-1]["status"].startswith("failed")
    # And it stays behind when the others go on.
    shutil.rmtree(good.directory / "model")
    shutil.rmtree(good.directory / "checkpoints" / "4")
    before = weights = rows_of(good.directory)
    good, again = train_population(configs)
    assert rows_of(good.directory) == before == weights
    assert (again.failure, again.step) == (failed.failure, failed.step)


# ---- what members may differ in ----------------------------------------------------------------


def other(value):
    """Another valid value of a rate."""
    if isinstance(value, int):
        return 2 * value
    return value * 0.5 if value else 0.25


def changes_of(dumped):
    """(field, another value) for each traced number of an optimizer's section."""
    for name in TRACED:
        section, _, key = name.rpartition(".")
        inside = dumped.get(section) if section else dumped
        value = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, other(value)


def section_with(dumped, changes):
    new = {key: dict(v) if isinstance(v, dict) else v for key, v in dumped.items()}
    for name, value in changes:
        section, _, key = name.rpartition(".")
        (new[section] if section else new)[key] = value
    return new


@pytest.mark.parametrize("name", ["muon", "schedule_free", "soap", "lamb", "galore"])
@pytest.mark.quick("muon")
def test_a_traced_field_changes_hyperparameters_and_not_the_program(name):
    overrides = [f"optim.name={name}", "optim.schedule.warmup_steps=2"]
    overrides += ["optim.batch_scaling.rule=sqrt"]
    overrides += ["optim.schedule.decay=power"] if name != "schedule_free" else []
    overrides += ["data.tokenizer.name=bytes", "model.depth=1", "train.steps=20"]
    dumped = resolve(load_config(None, overrides), 257).optim
    changes = list(changes_of(dumped.model_dump()))
    assert len(changes) >= 4
    _, _, specs, _ = build(norm_gain=True)  # with parameters in every group

    def optimizer_with(*changes):
        new = type(dumped).model_validate(section_with(dumped.model_dump(), changes))
        return make_optimizer(new, specs, 20, batch_tokens=4096)

    def program(optimizer):
        params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
        state = jax.eval_shape(optimizer.init, params)
        jaxpr = jax.make_jaxpr(optimizer.apply)(params, state, params, 0, optimizer.hyperparams)
        consts = [np.asarray(x).tolist() for x in jaxpr.consts]
        return str(jaxpr.jaxpr).split(" at 0x")[0], consts

    base = optimizer_with()
    for change in changes:
        found = optimizer_with(change).hyperparams
        differ = jax.tree.map(lambda a, b: bool((a != b).any()), base.hyperparams, found)
        assert any(jax.tree.leaves(differ)), change
    assert program(optimizer_with(*changes)) == program(base)


def plans_of(tmp_path, *members):
    quiet = RunLog(Coordinator(), quiet=True)
    configs = [config(tmp_path, f"m{i}", **m) for i, m in enumerate(members)]
    return [make_plans(c, Coordinator(), quiet)[-1] for c in configs]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__hidden": 16}, r"model\.hidden: m1 has 16, m0 has 8; members of a population"),
        ({"optim__normuon": False}, r"optim\.normuon: m1 has False, m0 has True"),
        ({"optim__clip_norm": 1.0}, r"optim\.clip_norm: m1 has 1\.0, m0 has None"),
        ({"train__steps": 7}, r"train\.steps: m1 has 7, m0 has 6"),
        ({"eval__every": 3}, r"eval\.every: m1 has 3, m0 has 2"),
        ({"optim__multipliers": "{mix: 0.5}"}, r"optim\.multipliers: m1 and m0 name different"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_first_field_that_differs_otherwise_is_named(tmp_path, changes, says):
    shared = {"model__hidden": 8, "model__smear": True, "model__backout": True}
    with pytest.raises(UserError, match=says):
        check_plans(plans_of(tmp_path, shared, shared | changes))


def test_what_may_differ_passes(tmp_path):
    check_plans(plans_of(tmp_path, {}, SECOND | {"optim__adam_betas": "{head: [0.5, 0.9]}"}))
    assert {"run.seed", "data.seed", "optim.matrix_lr"} <= set(MEMBER_FIELDS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train__on_nonfinite": "rollback"},
            r"train\.on_nonfinite: a population does not support it",
        ),
        (
            {"train__loss_spike": "{}"},
            r"train\.loss_spike: a population does not support it: members",
        ),
        ({"train__phases": "[{until: 3, model: {depth: 1}}]"}, r"train\.phases: a population"),
        ({"model__moe": "{experts: 4}"}, r"model\.moe: a population does not support it"),
        (
            {"metrics__wandb": True},
            r"metrics\.wandb: a population does not support it: a process has",
        ),
        ({"run__seed": 2**32}, r"run\.seed=4294967296: in a population it must be below 2\^32"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_population_cannot_do_is_refused(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        check_plans(plans_of(tmp_path, changes))


@pytest.mark.parametrize("name", ["dpo", "distill"])
def test_objectives_with_another_model_are_refused(tmp_path, name):
    (plan,) = plans_of(tmp_path, {})
    objective = SimpleNamespace(name=name)
    with_other = plan.config.model_copy(update={"objective": objective})
    with pytest.raises(UserError, match=r"objective\.name: a population does not support it"):
        check_plans([plan._replace(config=with_other)])


def test_what_is_wrong_before_any_plan(tmp_path, monkeypatch):
    one = config(tmp_path, "a")
    with pytest.raises(UserError, match="at least one configuration"):
        check_configs([], Coordinator())
    with pytest.raises(UserError, match=r"a is the directory of two members"):
        check_configs([one, config(tmp_path, "a", run__seed=1)], Coordinator())
    with pytest.raises(UserError, match="trains in one process"):
        check_configs([one], Coordinator(0, 2))
    monkeypatch.undo()


def test_several_devices_are_refused(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: jax.local_devices()[:2])
        plans = plans_of(tmp_path, {})
    with pytest.raises(UserError, match="trains on one device, and the mesh has 2"):
        check_plans(plans)


def test_the_manuals_example_is_a_population(tmp_path, monkeypatch, capsys):
    page = (Path(jaxtrain.__file__).parents[1] / "docs/howto/many-models.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    seen = []

    def instead(configs):
        quiet = RunLog(Coordinator(), quiet=True)
        check_configs(configs, Coordinator())
        check_plans([make_plans(c, Coordinator(), quiet)[-1] for c in configs])
        seen.extend(c.optim.matrix_lr for c in configs)
        return [TrainResult({}, {"bpb": 2.0}, c.run_dir, 1, False) for c in configs]

    monkeypatch.setattr(population, "train_population", instead)
    exec(code, {})
    assert seen == [0.02, 0.04, 0.08] and "rate_0.08 {'bpb': 2.0}" in capsys.readouterr().out


# ---- a GPU -------------------------------------------------------------------------------------

KERNELS = ("train.sequence_length=2048", "train.device_batch_size=16")  # those of the default
XLA = (
    "model.head_dim=64", "model.attention=xla", "optim.symmetric=false",
    "model.kernels={norm: xla, rope: xla, ffn: xla, loss: xla}", "train.device_batch_size=32",
    "train.sequence_length=512",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2])
@pytest.mark.parametrize("overrides", [KERNELS, XLA], ids=["kernels", "xla"])
@pytest.mark.quick("xla-2")
def test_a_populations_step_lowers_for_cuda_without_a_gpu(depth, overrides):
    """In bfloat16 at the sizes of sweeps; jax gives a Hopper kernel one more axis of its grid."""
    with on_target("cuda", (9, 0), "NVIDIA H200"):
        fields = [f"model.depth={depth}", "train.steps=100", "data.tokenizer.name=nanochat"]
        w = load_workload(None, [*fields, *overrides])
        assert w.spec.dtype == jnp.bfloat16
        many = lambda x: jax.ShapeDtypeStruct((2, *jnp.shape(x)), x.dtype)
        assert is_batched(w.config)
        step = make_population_step(w.spec, w.mesh, batched=True)
        # Pallas asks for the device when it lowers.
        h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
        mesh = w.mesh.abstract_mesh.update(abstract_device=h200)
        with jax.set_mesh(w.mesh), jax.sharding.use_abstract_mesh(mesh):
            state = jax.tree.map(many, abstract_state(w))
            hyperparams = jax.tree.map(many, w.spec.optimizer.hyperparams)
            traced = step.trace(state, batch_shapes(w), hyperparams, None)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (overrides is KERNELS)
    assert traced.out_info[1]["loss"].shape == (2,)
