"""An engine whose decode steps are one kernel: the same tokens, and when it has kernels of its own
for each layer instead."""

import functools
import logging
import types

import jax.numpy as jnp
import pytest
from engine_cases import GREEDY, OPTIONS, letters, prompts, tokens_of
from jaxtrain_kernels import decode_layers
from jaxtrain_kernels.decode_layers import reference
from tiny import build

from jaxtrain.inference.engine import Engine
from jaxtrain.model import cast
from jaxtrain.model.kv_cache import StackedPages
from jaxtrain.model.stack import take_apart

ONE_ROW = OPTIONS._replace(slots=1, decode_steps=1, context=32)
LAYERS = ONE_ROW._replace(megakernel=True)
APART = ONE_ROW._replace(megakernel=False)


@functools.cache
def parts(**fields):
    c, graphdef, specs, params = build(**fields)
    params = cast(params, specs, jnp.dtype(jnp.bfloat16))
    take_apart(params, specs)
    return c, graphdef, params


def engine_with(options, fields):
    return Engine(*parts(**fields), letters(), options=options)


def serve_by(monkeypatch, run, kernel="triton"):
    """A kernel's backend serves everything, on a CPU; its calls."""
    calls = []

    def noted(*args, **kwargs):
        calls.append(args)
        return run(*args, **kwargs)

    backend = types.SimpleNamespace(supports=lambda *_: None, decode_layers=noted)
    monkeypatch.setitem(decode_layers.BACKENDS, kernel, backend)
    return calls


@pytest.fixture
def by_reference(monkeypatch):
    return serve_by(monkeypatch, reference.decode_layers)


def assert_same_tokens(fields, new=GREEDY.max_tokens, steps=1):
    texts = prompts(11, 3)  # the first takes two parts; the second has its pages after it
    how = GREEDY._replace(max_tokens=new)
    one = engine_with(LAYERS._replace(decode_steps=steps), fields)
    assert isinstance(one.state.kv[0], StackedPages)
    assert tokens_of(one, texts, how) == tokens_of(engine_with(APART, fields), texts, how)


@pytest.mark.slow
def test_the_tokens_are_those_of_layers_one_by_one(by_reference):
    assert_same_tokens({"depth": 1})
    assert by_reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "message"),
    [
        (True, "the megakernel timed out.*megakernel=False"),
        (False, "hidden states are not finite.*--step"),
    ],
)
def test_a_step_without_finite_states_ends_the_engine(monkeypatch, late, message):
    """A kernel that timed out and a model that is broken have a message each."""

    def broken(*args, **kwargs):
        x_D, *rest, _ = reference.decode_layers(*args, **kwargs)
        return x_D * jnp.nan, *rest, jnp.bool_(late)

    serve_by(monkeypatch, broken)
    with pytest.raises(RuntimeError, match=message):
        # A model of its own: programs of another test have that test's kernel in them.
        fields = {"depth": 1, "qk_scale": 1.1 + late}
        tokens_of(engine_with(LAYERS, fields), prompts(3), GREEDY)


@pytest.mark.slow
def test_several_steps_of_a_call_have_the_same_tokens(by_reference):
    assert_same_tokens({"depth": 2}, steps=3)
    assert by_reference


def test_the_weights_are_packed_for_the_fastest_kernel_that_serves(monkeypatch, by_reference):
    fields = {"depth": 1, "width": 128, "head_dim": 64, "qk_scale": 1.3}
    packed = lambda: engine_with(ONE_ROW, fields).programs.packed
    assert isinstance(packed(), decode_layers.PackedLayers)
    serve_by(monkeypatch, reference.decode_layers, "hopper")
    assert isinstance(packed(), decode_layers.StreamedLayers)


def test_one_slot_has_it_by_default_where_it_serves(by_reference, caplog):
    assert engine_with(ONE_ROW, {"depth": 2}).programs.packed is not None
    with caplog.at_level(logging.WARNING):
        for options in (APART, ONE_ROW._replace(slots=2)):
            engine = engine_with(options, {"depth": 2})
            assert engine.programs.packed is None and isinstance(engine.state.kv[0], tuple)
            assert not isinstance(engine.state.kv[0], StackedPages)
    assert not caplog.records  # nobody asked for it


def reason(caplog, options, fields):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        engine = engine_with(options, fields)
    assert engine.programs.packed is None and not isinstance(engine.state.kv[0], StackedPages)
    (line,) = [one.getMessage() for one in caplog.records if "megakernel" in one.getMessage()]
    return line


def test_what_it_does_not_serve_is_named_once(by_reference, caplog):
    small = {"depth": 2}
    assert "slots=1, got 4" in reason(caplog, LAYERS._replace(slots=4), small)
    assert "drafts" in reason(caplog, LAYERS._replace(drafts=2), small)
    assert "got 64" in reason(caplog, LAYERS._replace(context=64), small)
    assert "equal in all layers" in reason(caplog, LAYERS._replace(cache_dtype="int8"), small)
    assert "model.ffn=relu2" in reason(caplog, LAYERS, small | {"ffn": "swiglu"})
    assert "model.prompt=None" in reason(caplog, LAYERS, small | {"prompt": 4})
    assert not by_reference


def test_a_machine_without_a_gpu_has_layers_one_by_one(caplog):
    assert "this is cpu" in reason(caplog, LAYERS, {"depth": 2})
