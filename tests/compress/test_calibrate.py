"""Statistics of the inputs of every matrix, against numpy on what the whole forward multiplies."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxtrain.compress import calibrate, calibration_text
from jaxtrain.compress.methods import MethodOptions
from jaxtrain.compress.quantize import solve
from jaxtrain.model import attention, layers
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten, matmul
from jaxtrain.weights.params import is_block_matrix

FIELDS = tiny.byte_model(32, "train.precision=float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return load_saved(tiny.random_run(tmp_path_factory.mktemp("calibrate"), FIELDS))


def rows_of(saved, tmp_path, count=8, **changes):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return calibration_text.calibration_rows(
        saved, saved.config, text, count, changes.get("length")
    )


def forward_inputs(saved, tokens_BT, monkeypatch):
    """What each product of the whole forward pass is given, in its order, of one text."""

    def forward(params, tokens_BT):
        seen = []

        def dense(x, param):
            seen.append(x.reshape(-1, x.shape[-1]))
            return matmul(x, param.get_value())

        monkeypatch.setattr(layers, "dense", dense)
        of = lambda x, *_, biases=(), cast=None: functools.partial(dense, x)
        for module in (attention, layers):
            monkeypatch.setattr(module, "dense_of", of)
        monkeypatch.setattr(layers, "feed_forward_relu2", lambda *_: None)
        nnx.merge(saved.graphdef, params)(tokens_BT)
        return seen

    return [np.asarray(x, np.float64) for x in jax.jit(forward)(saved.params, tokens_BT)]


def test_statistics_are_those_of_the_forward_pass(saved, tmp_path, monkeypatch):
    batches = rows_of(saved, tmp_path, 16)
    assert [b.tokens_BT.shape for b in batches] == [(8, 32), (8, 32)]
    found = calibrate.calibrate(saved, batches, hessian=True)
    tokens_BT = np.concatenate([b.tokens_BT for b in batches])
    seen = forward_inputs(saved, tokens_BT, monkeypatch)
    order = ["q", "k", "v", "out", "up", "down"]  # of a layer
    folder = {n: "ffn" if n in ("up", "down") else "attention" for n in order}
    names = [(f"blocks/{folder[n]}/{n}", i) for i in range(2) for n in order]
    assert set(names) == found.keys() and len(seen) == len(names)
    matrices = {n for n, spec in flatten(saved.specs).items() if is_block_matrix(spec)}
    assert {name for name, _ in found} == matrices
    for key, x_MK in zip(names, seen):
        inputs = found[key]
        assert inputs.tokens == len(x_MK) == 512
        close = dict(rtol=2e-4, atol=1e-4 * np.square(x_MK).sum(0).max())
        np.testing.assert_allclose(inputs.square_K, np.square(x_MK).sum(0), **close)
        np.testing.assert_allclose(inputs.magnitude_K, np.abs(x_MK).sum(0), rtol=2e-4)
        np.testing.assert_allclose(inputs.amax_K, np.abs(x_MK).max(0), rtol=2e-4)
        np.testing.assert_allclose(inputs.hessian_KK, x_MK.T @ x_MK, **close)


def test_the_beginning_of_a_text_has_the_tokens_of_the_whole(saved):
    """Fewer letters are encoded where words never share a token, else all of them."""
    text = "The quick  brown fox,\n jumps\u00a0over. " * 400
    seen, whole = [], saved.tokenizer.encode(text)

    def encode_batch(texts):
        seen.extend(texts)
        return saved.tokenizer.encode_batch(texts)

    for by_word in (True, False):
        change = {"by_word": by_word, "encode_batch": encode_batch}
        tokenizer = dataclasses.replace(saved.tokenizer, **change)
        for wanted in (1, 30, 1000, 10**6):
            found = calibration_text.first_tokens(tokenizer, text, wanted)
            assert len(found) >= min(wanted, len(whole))
            np.testing.assert_array_equal(found, whole[: len(found)])
    parts = [part for part in seen if part != text]
    assert len(parts) == 3 and all(text[len(part)] == " " != part[-1] for part in parts)


def programs_of(work):
    """How many programs the work compiled, or took from the cache on disk."""
    found = []

    def listen(event, duration_secs, **_):
        found.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq", "w8a8"])
def test_more_layers_compile_no_more_programs(tmp_path, method):
    """One for each kind of layer and each shape of matrix, whose operations are no programs of
    their own. The layers of both models are of the same two kinds."""
    text = np.random.default_rng(0).integers(0, 255, (8, 32), np.int32)
    counts = []
    for depth in (2, 4):
        run = tiny.random_run(tmp_path / f"{depth}", [*FIELDS, f"model.depth={depth}"])
        model, rows = load_saved(run), [calibration_text.TokenRows(text)] * 2
        jax.clear_caches()
        counts.append(programs_of(functools.partial(solve, model, rows, method, MethodOptions(16))))
    assert counts[0] == counts[1] and counts[0] >= 3


class Nodes:
    """What is sent to a node and back, without a cluster."""

    def __init__(self, make):
        self.function = again(make)()

    def map(self, things, *shared):
        return (again(self.function(*again((thing, *shared)))) for thing in things)


def again(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.slow
def test_nodes_give_the_sums_of_one_host(saved, tmp_path, monkeypatch):
    """Bit for bit. A block has two batches; the last block has one."""
    batches = rows_of(saved, tmp_path, 24)
    monkeypatch.setattr(calibrate, "BLOCK", 2)
    here = calibrate.calibrate(saved, batches, hessian=True)
    monkeypatch.setattr(calibrate, "NodeModels", Nodes)
    monkeypatch.setattr(calibrate, "current_cluster", lambda: "a cluster")
    there = calibrate.calibrate(saved, batches, hessian=True)
    assert here.keys() == there.keys() and len(batches) == 3
    assert all(inputs.tokens == 24 * 32 for inputs in there.values())
    assert all(jax.tree.all(jax.tree.map(np.array_equal, x, there[k])) for k, x in here.items())


@pytest.mark.slow
def test_layers_behind_a_change_see_the_changed_ones(saved, tmp_path):
    batches = rows_of(saved, tmp_path)
    asked = []

    def visit(index, matrices):
        asked.append({name: m.inputs for name, m in matrices.items()})
        return {"blocks/ffn/down": 0 * matrices["blocks/ffn/down"].w_KN} if index == 0 else {}

    params = calibrate.visit_layers(saved, batches, visit)
    before = calibrate.calibrate(saved, batches)
    after = calibrate.calibrate(saved._replace(params=params), batches)
    assert not params["blocks"]["ffn"]["down"][0].any()
    assert saved.params["blocks"]["ffn"]["down"][0].any()
    for name, inputs in asked[1].items():
        np.testing.assert_allclose(inputs.square_K, after[name, 1].square_K, rtol=1e-5)
        assert not np.allclose(inputs.square_K, before[name, 1].square_K, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["model.ffn=swiglu", "model.norm_gain=true", "model.qkv_bias=true"],
        ["model.depth=4", "model.share_kv=adjacent", "model.scan_layers=true", "model.remat=block"],
    ],
    ids=["swiglu", "share_kv"],
)
def test_the_last_layer_ends_in_the_states_of_the_model(changes, tmp_path, monkeypatch):
    """A change that changes nothing: the layer-wise pass is the forward pass of every kind."""
    saved = load_saved(tiny.random_run(tmp_path / "run", [*FIELDS, *changes]))
    batches = rows_of(saved, tmp_path)
    streams = []
    run = calibrate.LayerRunner.run

    def spied(self, spec, hessian):
        layer = run(self, spec, hessian)
        return lambda *a: streams.append(layer(*a)) or streams[-1]

    monkeypatch.setattr(calibrate.LayerRunner, "run", spied)
    monkeypatch.setattr(calibrate.LayerRunner, "compile", lambda *_: None)  # of what is spied on
    calibrate.calibrate(saved, batches)
    model = nnx.merge(saved.graphdef, jax.tree.map(jnp.asarray, saved.params))
    tokens_BT = jnp.asarray(batches[0].tokens_BT)
    x_BTD, _ = model.embed_tokens(tokens_BT, None)
    out = model.all_layers(x_BTD, tokens_BT)
    np.testing.assert_allclose(streams[-1][0].total(), out.x_BTD, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_text_of_the_run_itself_and_refusals(whole, saved, tmp_path):
    run = load_saved(whole)
    rows = calibration_text.calibration_rows(run, run.config, None, 8, None)
    assert rows[0].tokens_BT.shape == (8, run.config.train.sequence_length)
    with pytest.raises(UserError, match="fills 28 sequences of 32 tokens, not 64"):
        rows_of(saved, tmp_path, 64)
    with pytest.raises(UserError, match="beyond the model's context of 32"):
        rows_of(saved, tmp_path, length=64)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        calibration_text.calibration_rows(saved, saved.config, tmp_path / "none", 1, None)
