"""Multi-token prediction with modules: against a plain computation, in order, within documents."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    PLAIN_MODEL,
    QUICK,
    T,
    assert_same_run,
    batch,
    begin_random,
    build,
    close,
    forget_end,
    make_spec,
    mesh_of,
    random_params,
    random_run,
    resolved,
    rows_of,
    run_overrides,
    same,
    tokens,
    weights_of,
)

from jaxtrain.cli import main as jaxtrain
from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.finetune import make_partition
from jaxtrain.inference.engine import EngineOptions, load_engine
from jaxtrain.interop.pretrained import load_base
from jaxtrain.main import main
from jaxtrain.model import Transformer, flops_per_token, initialize, split
from jaxtrain.model.layers import rotary, rotate
from jaxtrain.model.mtp import tokens_later
from jaxtrain.objectives import LossOptions, make_objective
from jaxtrain.objectives.mtp import MTPConfig, module_losses
from jaxtrain.objectives.next_token import hidden_states, next_token_loss
from jaxtrain.parallel import shardings
from jaxtrain.runs.export_model import prepare_export
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step
from jaxtrain.weights.contract import flatten

OBJECTIVE = MTPConfig.model_validate({"depth": 2, "weight": 0.3})


def on_device(one):
    return jax.tree.map(jnp.asarray, one)


def loss_of(objective, graphdef, params, one):
    return objective.loss(graphdef, params, one, None, step=jnp.int32(0), key=None)


def rms(x):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def plain_module(c, params, k, states, later):
    """Module k as the paper writes it, before the final norm, of one row, in the order of the
    formula."""
    own = jax.tree.map(lambda x: x[k - 1], params["mtp"])
    x = jnp.concatenate([rms(states), rms(rms(params["embed"][later]))], axis=-1) @ own["project"]
    h, heads = rms(x), lambda x: x.reshape(1, len(x), -1, c.head_dim)
    q, k, v = (heads(h @ own["block"]["attention"][name]) for name in "qkv")
    rope = rotary(jnp.arange(len(x))[None], c.head_dim, c.rope_base)
    q, k = (rotate(x, rope, 1e-6)[0] for x in (q, k))
    scores = jnp.einsum("tnh,snh->nts", q, k) * c.qk_scale**2 / np.sqrt(c.head_dim)
    seen = jnp.tril(jnp.ones((len(x), len(x)), bool))
    share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("nts,snh->tnh", share, v[0]).reshape(len(x), -1)
    x = x + y @ own["block"]["attention"]["out"]
    hidden = jnp.square(jax.nn.relu(rms(x) @ own["block"]["ffn"]["up"]))
    return rms(x + hidden @ own["block"]["ffn"]["down"])


@pytest.mark.slow
def test_the_losses_of_two_modules_are_those_of_the_formula():
    c, graphdef, _, params = build(mtp=2, depth=1)
    one = on_device(batch(2))
    loss, sums = jax.jit(
        lambda p: loss_of(make_objective(OBJECTIVE, LossOptions()), graphdef, p, one)
    )(params)
    h, expected = hidden_states(graphdef, params, one), [jnp.zeros(()), jnp.zeros(())]
    assert c.logit_softcap is not None
    for states, row, targets, weights in zip(
        h.x_BTD, one.tokens_BT, one.targets_BT, one.weights_BT
    ):
        for k in (1, 2):
            states = plain_module(c, params, k, states, jnp.append(row[k:], jnp.zeros(k, int)))
            last = T - k  # the places behind have no token so far ahead
            logits = states[:last] @ params["head"][:, :61] / c.logit_softcap
            nll = -jax.nn.log_softmax(c.logit_softcap * jnp.tanh(logits))
            expected[k - 1] += jnp.sum(weights[k:] * nll[jnp.arange(last), targets[k:]])
    found = sums["loss_mtp_1"], sums["loss_mtp_2"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    first = jax.jit(lambda p: next_token_loss(graphdef, p, one))(params)
    np.testing.assert_allclose(loss, first + 0.3 * sum(expected) / 2, rtol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"mla": {"kv_rank": 8, "rope_dim": 4}, "qk_norm": False}])
@pytest.mark.quick("kind0")
def test_a_later_token_changes_nothing_before_it(kind):
    kind = kind | {"value_embeddings": False}
    _, graphdef, _, params = build(mtp=2, depth=1, **kind)

    @jax.jit
    def outputs(rows):
        one = on_device(batch(4))._replace(tokens_BT=jnp.asarray(rows))
        h = hidden_states(graphdef, params, one)
        found = [h.x_BTD]
        for k in (1, 2):
            texts = tokens_later(one.tokens_BT, k), jnp.arange(T)[None], None
            found.append(h.model.predict_ahead(k - 1, found[-1], texts)[0])
        return found

    rows, t = tokens(), 20
    other = rows.copy()
    other[:, t] = (other[:, t] + 1) % 61
    for k, (a, b) in enumerate(zip(outputs(rows), outputs(other))):
        np.testing.assert_array_equal(a[:, : t - k], b[:, : t - k])
        assert (np.abs(a - b)[:, t - k] > 1e-3).any(axis=-1).all()  # the first that has read it


@pytest.mark.slow
def test_packed_documents_have_the_losses_of_their_own():
    _, graphdef, _, params = build(mtp=2, depth=1, document_mask=True)
    stream, cut = tokens(1, T + 1), 13
    alone = lambda a, b: on_device(batch(1))._replace(
        tokens_BT=jnp.asarray(stream[:, a:b]),
        targets_BT=jnp.asarray(stream[:, a + 1 : b + 1]),
        # The last label of a document is the first token of the next: it does not count.
        weights_BT=jnp.ones((1, b - a)).at[:, -1].set(b == T),
    )
    segments = jnp.asarray([[1] * cut + [2] * (T - cut)])
    positions = jnp.asarray([[*range(cut), *range(T - cut)]])
    whole = alone(0, T)._replace(segments_BT=segments, positions_BT=positions)
    whole = whole._replace(weights_BT=whole.weights_BT.at[:, cut - 1].set(0))

    @jax.jit
    def losses(one):
        h = hidden_states(graphdef, params, one)
        return jnp.array(module_losses(h, one, 2, LossOptions()))

    parts = losses(alone(0, cut)) + losses(alone(cut, T))
    np.testing.assert_allclose(losses(whole), parts, rtol=1e-5)


@pytest.mark.slow
def test_the_model_is_the_one_without_modules_and_gradients_flow():
    _, with_it, specs, params = build(mtp=2, depth=1)
    _, without, plain_specs, _ = build(depth=1)
    of = lambda tree: {name: x for name, x in tree.items() if name != "mtp"}
    ours, theirs = initialize(specs, 3), initialize(plain_specs, 3)
    for name, x in flatten(of(ours)).items():
        np.testing.assert_array_equal(x, flatten(theirs)[name])
    one = on_device(batch(2))
    states = hidden_states(with_it, params, one).x_BTD
    np.testing.assert_array_equal(states, hidden_states(without, of(params), one).x_BTD)

    def grads(weight):
        objective = make_objective(OBJECTIVE.model_copy(update={"weight": weight}), LossOptions())
        return jax.jit(jax.grad(lambda p: loss_of(objective, with_it, p, one)[0]))(params)

    off, on = grads(0.0), grads(0.3)
    plain = jax.jit(jax.grad(lambda p: next_token_loss(without, p, one)))(of(params))
    for name, x in flatten(off).items():
        if name.startswith("mtp/"):
            assert not np.any(x) and np.all(np.any(flatten(on)[name], axis=(1, 2))), name
        else:
            np.testing.assert_allclose(x, flatten(plain)[name], rtol=1e-6, atol=1e-6)
    moved = np.abs(on["blocks"]["ffn"]["up"] - off["blocks"]["ffn"]["up"])
    assert moved.max() > 1e-4


def test_flops_count_the_modules():
    c, _, specs, _ = build(mtp=2)
    plain, _, plain_specs, _ = build()
    D, block = c.width, 12 * c.width**2
    more = flops_per_token(c, specs, T) - flops_per_token(plain, plain_specs, T)
    assert more == 2 * (6 * (block + 2 * D * D + specs["head"].size) + 12 * D * T)


def test_the_objective_puts_the_modules_into_the_model_and_leaves_the_horizon():
    small = ["data.tokenizer.name=bytes", "model.depth=2", "train.sequence_length=128"]
    made = lambda *more: resolve(load_config(None, [*small, *more]), 257)
    c, plain = made("objective={name: mtp, depth: 2}"), made()
    assert (c.model.mtp, plain.model.mtp) == (2, None)
    assert c.train == plain.train and c.optim == plain.optim
    with pytest.raises(UserError, match="nothing trains them; set model.mtp=null"):
        made("model.mtp=1")
    with pytest.raises(UserError, match=r"the model has 1 modules \(model.mtp\)"):
        made("model.mtp=1", "objective={name: mtp, depth: 2}")


LLAMA_OVERRIDES = [
    "data.tokenizer.name=bytes", "train.sequence_length=32", "model.depth=2", "model.width=32",
    "model.head_dim=8", "model.hidden=48", "model.ffn=swiglu", "model.qk_norm=false",
    "model.window_pattern=L", "model.norm_gain=true", "model.embed_norm=false",
    "model.logit_softcap=null", "model.value_embeddings=false", "model.residual_scales=false",
    "model.smear=false", "model.backout=false", "model.norm_eps=1e-5", "model.init=gpt2",
    "model.rope_base=10000",
]  # fmt: skip


def test_export_leaves_the_modules_out_and_says_so(tmp_path, caplog):
    run = random_run(tmp_path / "a", [*LLAMA_OVERRIDES, "objective.name=mtp"])
    saved, export = load_saved(run), prepare_export(run, None)
    assert saved.config.model.mtp == 1 and "mtp" in saved.params
    assert export.model.mtp is None and not {"mtp"} & {*export.params, *export.specs}
    assert "the multi-token prediction modules are left out: checkpoints" in caplog.text


def test_the_modules_come_back_from_safetensors_and_not_from_an_export(tmp_path):
    run = random_run(tmp_path / "a", [*LLAMA_OVERRIDES, "objective.name=mtp"])
    saved = load_saved(run)
    same(saved.params, random_params(saved.specs))
    assert jaxtrain(["export", str(run), str(tmp_path / "out")]) == 0
    assert jaxtrain(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    back = load_saved(tmp_path / "back")
    assert back.config.model.mtp is None
    assert "mtp" not in back.params
    same(back.params["blocks"], saved.params["blocks"])
    guessed = EngineOptions(slots=1, drafts=1, draft_mtp=True)
    assert load_engine(run, None, guessed).options.draft_mtp
    with pytest.raises(UserError, match="this model has no multi-token prediction module"):
        load_engine(tmp_path / "back", None, guessed)


def test_fine_tuning_says_what_becomes_of_the_modules(tmp_path):
    run = random_run(tmp_path / "a", [*LLAMA_OVERRIDES, "objective.name=mtp"])
    start = [f"train.init_from={run}", "data.train.path=tinyshakespeare", "train.steps=2"]
    tuned = lambda *more: resolve(load_config(None, [*start, *more]), 257)
    with pytest.raises(UserError, match="nothing trains them; set model.mtp=null"):
        tuned("finetune.name=lora")
    with pytest.raises(UserError, match="the method does not reach the modules"):
        tuned("finetune.name=lora", "objective.name=mtp")
    with pytest.raises(UserError, match="say objective.depth=1 to go on with those"):
        tuned("objective={name: mtp, depth: 2}")

    def parts_of(*more):
        c = tuned(*more)
        specs = split(Transformer(c.model, 257))[1]
        base = load_base(str(run), specs, shardings(specs, mesh_of()))
        return base, make_partition(c.finetune, specs, jnp.dtype(jnp.float32)).trainable

    base, adapters = parts_of("finetune.name=lora", "model.mtp=null")
    saved = load_saved(run).params
    same(base, {name: x for name, x in saved.items() if name != "mtp"})
    assert all("/attention/" in name or "/ffn/" in name for name in flatten(adapters))
    # The modules alone, before a model that stays what it is.
    alone = "finetune={name: freeze, trainable: [mtp/*]}"
    base, modules = parts_of("objective.name=mtp", alone)
    same(base, saved)
    assert flatten(modules).keys() == {n for n in flatten(saved) if n.startswith("mtp/")}


def test_a_model_without_modules_gets_new_ones(tmp_path):
    run = random_run(tmp_path / "a", LLAMA_OVERRIDES)
    saved = load_saved(run)
    c = saved.config.model.model_copy(update={"mtp": 1})
    _, specs = split(Transformer(c, saved.tokenizer.vocab_size))
    mesh = mesh_of()
    params = load_base(str(run), specs, shardings(specs, mesh), seed=3)
    np.testing.assert_array_equal(params["embed"], saved.params["embed"])
    expected = initialize({"mtp": specs["mtp"]}, 3)["mtp"]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    jax.tree.map(close, params["mtp"], expected)


SPLITS = [
    ({}, 2), ({"fsdp": 2, "tensor": 2}, 4), ({"context": 2}, 8),
]  # fmt: skip


@functools.cache
def stepped(micro, **axes):
    """(metrics, parameters) of a step of two modules, whose microbatches have so many rows."""
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL | {"depth": 1, "mtp": 2}))
    spec = spec._replace(objective=make_objective(OBJECTIVE, LossOptions()))
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        state = begin_random(spec, mesh)
        state, metrics = make_step(spec, mesh)(state, batch(8, micro=micro), hyperparams)
    return jax.device_get((metrics, state.params))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "micro"), SPLITS, ids=str)
def test_a_step_is_the_same_in_microbatches_and_on_every_mesh(axes, micro):
    """Weights of labels are random: a mean of microbatches' means would be another number."""
    (whole, params), (found, split_params) = stepped(8), stepped(micro, **axes)
    for name in ("loss", "loss_mtp_1", "loss_mtp_2", "grad_norm"):
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-4)
    close(split_params, params, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    """With two modules, masked documents, and parameters divided over devices."""
    given = QUICK | {"objective__name": "mtp", "train__steps": 4, "checkpoint__every": 2}
    given |= {"model__document_mask": True, "data__packing__name": "best_fit"}
    given |= {"objective__depth": 2, "mesh__fsdp": 2}
    given |= {"optim__learning_rate": 0.01}
    assert main(run_overrides(tmp_path / "whole", **given)) == 0
    parts = shutil.copytree(tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny")
    forget_end(parts, 4)
    assert main(run_overrides(tmp_path / "parts", **given)) == 0
    assert_same_run(parts, tmp_path / "whole" / "tiny")
    assert any(name.startswith("mtp/") for name in weights_of(parts))
    assert all(row["loss_mtp_1"] > 0 for row in rows_of(parts))


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_trains_and_saves_the_modules(tmp_path):
    overrides = run_overrides(tmp_path, train__steps=2, objective__name="mtp", **QUICK)
    assert main(overrides) == 0
    run = tmp_path / "tiny"
    first = next(row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train")
    assert first["loss"] == pytest.approx(first["loss_mtp_1"], rel=0.1)
    ended, restored = load_saved(run), load_saved(run, 2)
    for name, x in flatten(ended.params).items():
        np.testing.assert_array_equal(x, flatten(restored.params)[name])
    assert any(name.startswith("mtp/") for name in flatten(ended.params))
    again = run_overrides(
        tmp_path, train__steps=1, objective__name="mtp", run__name="again",
        train__init_from=str(run), optim__name="adamw",
    )  # fmt: skip
    assert main(again) == 0
