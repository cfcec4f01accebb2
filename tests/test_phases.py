"""Phases of a run: other models one after the other, the state grown, resumed on either side."""

import shutil
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train import refused
from tiny import (
    QUICK,
    forget_end,
    on_one_device,
    rows_of,
    run_overrides,
    same,
    steps_of,
    weights_of,
)

from jaxtrain.config import load_config
from jaxtrain.config.phases import config_at, phases_of
from jaxtrain.config.resolve import resolve
from jaxtrain.finetune.partition import flatten
from jaxtrain.main import main
from jaxtrain.parallel import make_mesh
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train import features, loop
from jaxtrain.train.config import PhaseConfig
from jaxtrain.train.events import Event
from jaxtrain.train.growth import GROWTHS, Growth, Layers
from jaxtrain.train.step import State

PHASES = QUICK | {
    "train__phases": "[{until: 2, model: {depth: 1}}]", "model__depth": 2, "train__steps": 4,
    "checkpoint__every": 1, "checkpoint__keep": 9, "data__workers": 0,
}  # fmt: skip


def growth_of(name, old, new):
    return Growth(0, None, (old, new), name)


def state_of(tree):
    return State(tree, {}, jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), {})


@pytest.mark.parametrize(
    ("name", "old", "new", "copies"),
    [
        ("stack", 3, 6, [0, 1, 2, 0, 1, 2]),
        ("stack", 2, 5, [0, 1, 0, 1, 0]),
        ("repeat_top", 3, 5, [0, 1, 2, 1, 2]),
        ("repeat_top", 2, 5, [0, 1, 0, 1, 0]),
        ("interleave", 3, 6, [0, 0, 1, 1, 2, 2]),
        ("interleave", 2, 5, [0, 0, 0, 1, 1]),
    ],
)
def test_new_layers_are_copies_of_the_old(name, old, new, copies):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {
        "matrix": jnp.arange(old * 4.0).reshape(old, 2, 2),
        "second axis": jnp.arange(old * 2.0).reshape(2, old),
        "blocks": jnp.arange(old * 3.0),  # three of each layer, one layer behind the other
        "embedding": jnp.ones((7, 2)),
    }
    shapes = {"matrix": (new, 2, 2), "second axis": (2, new), "blocks": (new * 3,)}
    like = {
        n: jax.ShapeDtypeStruct(shapes.get(n, x.shape), x.dtype, sharding=here)
        for n, x in tree.items()
    }
    before = {n: np.asarray(x) for n, x in tree.items()}
    rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state_of({})
    )
    grown = growth_of(name, old, new)(state_of(tree), rest._replace(params=like)).params
    assert np.array_equal(grown["matrix"], before["matrix"][copies])
    assert np.array_equal(grown["second axis"], before["second axis"][:, copies])
    assert np.array_equal(grown["blocks"].reshape(new, 3), before["blocks"].reshape(old, 3)[copies])
    assert np.array_equal(grown["embedding"], before["embedding"])


def test_layers_that_have_a_part_are_copied_among_themselves():
    """Value embeddings of 2 of 4 layers become those of 3 of 6."""
    some = Layers("params/value_embed", jnp.arange(2.0), 0, (4, 6), 3)
    assert GROWTHS["stack"](some).tolist() == [0, 1, 0]


def test_a_growth_knows_what_it_grows(monkeypatch):
    """New layers of one parameter may be zeros, so that they change nothing at first."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def zeros_above(layers):
        grown = GROWTHS["stack"](layers)
        return grown.at[1:].set(0) if layers.path == "params/out" else grown

    monkeypatch.setitem(GROWTHS, "zeros_above", zeros_above)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    like = jax.tree.map(shape, state_of({"out": jnp.ones((2, 3)), "up": jnp.ones((2, 3))}))
    old = state_of({"out": jnp.ones((1, 3)), "up": jnp.ones((1, 3))})
    grown = growth_of("zeros_above", 1, 2)(old, like).params
    assert grown["out"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert grown["up"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_the_configuration_names_each_growth():
    field = PhaseConfig.model_fields["grow"]
    assert set(get_args(field.annotation)) == set(GROWTHS)


def test_a_state_that_cannot_grow_is_an_error():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=here)
    with pytest.raises(UserError, match="only the number of layers may grow"):
        growth_of("stack", 2, 4)._leaf((), jnp.ones((2, 2)), like)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run that begins with one layer and ends with two."""
    directory = tmp_path_factory.mktemp("grown")
    with on_one_device():
        assert main(run_overrides(directory, **PHASES)) == 0
    return directory / "tiny"


@pytest.mark.slow
def test_each_phase_trains_its_model(grown):
    assert steps_of(grown) == [1, 2, 3, 4]
    assert [row["step"] for row in rows_of(grown)] == [1, 2, 3, 4]
    depths = [len(flatten(load_saved(grown, s).params)["blocks/attention/q"]) for s in (1, 2, 3, 4)]
    assert depths == [1, 1, 2, 2]
    saved = load_saved(grown)
    assert saved.config.model.depth == 2
    assert len(flatten(saved.params)["blocks/attention/q"]) == 2


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
@pytest.mark.parametrize(("last", "text"), [(2, "train    "), (3, "resume   ")])
def test_a_run_resumes_on_either_side_of_a_growth(grown, tmp_path, capfd, last, text):
    """From the last checkpoint of the small model, and from the first of the grown one."""
    copy = shutil.copytree(grown, tmp_path / "tiny")
    for step in range(last + 1, 5):
        shutil.rmtree(copy / "checkpoints" / str(step))
    shutil.rmtree(copy / "model")
    capfd.readouterr()
    assert main(run_overrides(tmp_path, **PHASES)) == 0
    assert f"{text}{copy}: steps {last} to 4" in capfd.readouterr().out
    same(weights_of(copy), weights_of(grown))
    assert rows_of(copy) == rows_of(grown)


# States of each kind: in blocks, in an eigenbasis, factored.
KINDS = ["adamw8bit", "soap", "adafactor"]


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", KINDS)
def test_the_optimizers_state_grows_with_its_parameters(tmp_path, capfd, optimizer):
    """A state with a layer's shape holds, for each new layer, that of the layer it copies."""
    phases = {"train__phases": "[{until: 1, model: {depth: 1}}]", "train__steps": 2}
    fields = PHASES | phases | {"model__depth": 3, "optim__name": optimizer}
    if optimizer == "adamw8bit":
        assert "optim.min_size" in refused(capfd, run_overrides(tmp_path, **fields))
        fields |= {"optim__min_size": 32}
    assert main(run_overrides(tmp_path, **fields)) == 0
    run = tmp_path / "tiny"
    checkpoints = Checkpointer(run, CheckpointConfig.model_validate({}))
    shapes = [jax.tree.leaves(checkpoints.shapes(step)["optimizer"]) for step in (1, 2)]
    checkpoints.close()
    changed = [(a.shape, b.shape) for a, b in zip(*shapes) if a.shape != b.shape]
    assert changed
    for old, new in changed:
        (dim,) = (i for i, (a, b) in enumerate(zip(old, new)) if a != b)
        assert new[dim] == 3 * old[dim]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"train__local_sgd": "{name: diloco, every: 2}", "mesh__data": 8},
        {"mesh__fsdp": 2, "mesh__tensor": 2, "mesh__data": 2, "model__scan_layers": True,
         "train__loss_spike": "{action: skip}"},
        {"train__phases": "[{until: 2, model: {depth: 2}, grow: interleave}]", "mesh__pipeline": 2,
         "model__depth": 4, "mesh__data": 4},
    ],
    ids=["diloco", "mesh, scan and spikes", "pipeline"],
)  # fmt: skip
def test_a_growth_goes_with(tmp_path, more):
    assert main(run_overrides(tmp_path, **{**PHASES, **more})) == 0
    assert all(np.isfinite(row["loss"]) for row in rows_of(tmp_path / "tiny"))


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_phase_may_change_what_has_no_parameters(tmp_path):
    """Fake-quantized weights for the last part of a run: the state is the same."""
    late = {"train__phases": "[{until: 2, model: {weight_form: null}}]"}
    fields = {**PHASES, "model__depth": 1, **late, "model__weight_form": "fake_int8"}
    assert main(run_overrides(tmp_path, **fields)) == 0
    forms = [load_saved(tmp_path / "tiny", step).config.model.weight_form for step in (2, 3)]
    assert [form and form.name for form in forms] == [None, "fake_int8"]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{until: 4, model: {depth: 1}}]", "train.phases[0].until=4: a phase ends after"),
        (
            "[{until: 2, model: {depth: 1}}, {until: 2, model: {depth: 2}}]",
            "train.phases[1].until=2: a phase ends after the one before (step 2)",
        ),
        ("[{until: 2, model: {deep: 1}}]", "train.phases[0].model: there is no model.deep"),
        ("[{until: 2, model: {depth: none}}]", "train.phases[0]: model.depth: "),
        ("[{until: 2, model: {depth: 5}}]", "only the number of layers may grow"),
        ("[{until: 2, model: {hidden: 16}}]", "only the number of layers may grow"),
        ("[{until: 2, model: {tied_head: true}}]", "only the next phase has head"),
    ],
)
def test_a_phase_that_cannot_be_is_refused_before_the_data(tmp_path, capfd, phases, message):
    assert message in refused(capfd, run_overrides(tmp_path, **PHASES | {"train__phases": phases}))
    assert not (tmp_path / "tiny").exists()


def test_the_phases_of_a_configuration(tmp_path):
    c = load_config(None, [o for o in run_overrides(tmp_path, **PHASES) if "=" in o])
    r = resolve(c, 257)
    found = phases_of(r, 257, make_mesh(c.mesh))
    assert [(p.start, p.end, p.config.model.depth, p.grow) for p in found] == [
        (0, 2, 1, None), (2, 4, 2, "stack"),
    ]  # fmt: skip
    assert [config_at(r, step).model.depth for step in (0, 2, 3)] == [1, 1, 2]


class HalveTheWindow(Event):
    """Ends the phase at each even step, and narrows the window of attention."""

    must_be_sound = True

    def __init__(self, plan, end):
        super().__init__(2)
        self.window, self.phase_end = plan.config.model.short_window, end

    def run(self, step, state):
        self.phase_end.end(step, {"short_window": self.window // 2})


EARLY = PHASES | {
    "model__depth": 1, "train__phases": "[]", "model__window_pattern": "SL", "train__steps": 5,
    "model__short_window": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A run whose phases an event ends; runs of the module have that event from then on."""
    usual = features.make_events
    events = lambda plan, end, *rest: [HalveTheWindow(plan, end), *usual(plan, end, *rest)]
    directory = tmp_path_factory.mktemp("early")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_events", events)
        with on_one_device():
            assert main(run_overrides(directory, **EARLY)) == 0
        yield directory / "tiny"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_an_event_ends_a_phase(early, capfd):
    assert steps_of(early) == [1, 2, 3, 4, 5]
    windows = [load_saved(early, step).config.model.short_window for step in range(1, 6)]
    assert windows == [16, 16, 8, 8, 4]
    assert main(run_overrides(early.parent, **EARLY)) == 0  # a run that has ended
    assert f"resume   {early}: steps 5 to 5" in capfd.readouterr().out


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("last", [2, 3])
@pytest.mark.slow
def test_a_run_resumes_on_either_side_of_an_event(early, tmp_path, capfd, last):
    copy = shutil.copytree(early, tmp_path / "tiny")
    forget_end(copy, *range(last + 1, 6))
    capfd.readouterr()
    assert main(run_overrides(tmp_path, **EARLY)) == 0
    assert f"{copy}: steps {last} to 5" in capfd.readouterr().out
    same(weights_of(copy), weights_of(early))
    assert rows_of(copy) == rows_of(early)
