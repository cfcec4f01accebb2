"""Masked language modelling: what is hidden, an encoder's two sides, and a run from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.test_augment import tokenizer
from flax import nnx
from tiny import (
    QUICK,
    VOCAB,
    batch,
    begin_random,
    build,
    close,
    forget_end,
    make_spec,
    mesh_of,
    resolved,
    run_overrides,
    same,
    tokens,
)

from jaxtrain.cli import main
from jaxtrain.data.batches.augment import MASK, AugmentRow
from jaxtrain.main import main as train
from jaxtrain.model import Forward, Prefill
from jaxtrain.objectives.masked_lm import MaskedLMConfig, masked_rows
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.step import make_step

ENCODER = {"causal": False, "window_pattern": "L"}
LENGTH = 4000


def hidden(step=0, number=0, seed=0, weights=None, **config):
    """(the row before, after its tokens were hidden); BOS is 256, the text are pairs of letters."""
    before = 257 + np.random.default_rng(1).integers(0, 25, LENGTH + 1).astype(np.int32)
    before[[0, 2000]] = 256
    weights = np.ones(LENGTH, np.float32) if weights is None else weights
    pieces = ((1, 2000), (2001, LENGTH + 1))
    row = AugmentRow(before.copy(), weights.copy(), pieces, before[:-1].copy())
    masked_rows(MaskedLMConfig(**config), tokenizer(), seed)(step, 0, number, row)
    return before, row


def test_hidden_tokens_are_the_targets_at_their_own_places():
    mask = tokenizer().specials[MASK]
    before, row = hidden()
    np.testing.assert_array_equal(row.ids[1:], before[:-1])
    chosen = row.weights > 0
    assert chosen.sum() == round(0.15 * (LENGTH - 2)) and not chosen[[0, 2000]].any()
    np.testing.assert_array_equal(row.inputs[~chosen], before[:-1][~chosen])
    new, old = row.inputs[chosen], before[:-1][chosen]
    shares = [(new == mask).mean(), ((new != mask) & (new != old)).mean(), (new == old).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.04)


def test_what_is_hidden_depends_on_seed_step_and_row_alone():
    inputs = lambda **where: hidden(**where)[1].inputs.tolist()
    assert inputs() == inputs()
    assert len({tuple(inputs(**{one: 1})) for one in ("step", "number", "seed")}) == 3
    some = np.zeros(LENGTH, np.float32)
    some[100:120] = 1  # the weights of tokens 101 to 120: an answer
    _, row = hidden(weights=some, rate=0.5)
    assert row.weights.sum() == 10 and row.weights[101:121].sum() == 10
    _, row = hidden(weights=some * (np.arange(LENGTH) == 100))
    assert row.weights.sum() == 1  # one at least


def states(graphdef, params, *texts):
    model = jax.jit(lambda p, *t: nnx.merge(graphdef, p)(*t, Forward()).states)
    return np.asarray(model(params, *texts))


def test_an_encoder_sees_both_sides_of_its_own_document():
    _, graphdef, _, params = build(document_mask=True, smear=False, **ENCODER)
    row, lengths = tokens(1), (11, 1, 20)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    segments = np.repeat(np.arange(1, 4), lengths)[None].astype(np.int32)
    changed = row.copy()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    a, b = (states(graphdef, params, x, positions, segments)[0] for x in (row, changed))
    moved = np.abs(a - b).max(-1) > 0
    assert moved[:11].all() and not moved[11:].any()


def test_an_encoder_continues_no_text():
    _, graphdef, _, params = build(**ENCODER)
    with pytest.raises(UserError, match=r"an encoder \(model.causal=false\)"):
        nnx.merge(graphdef, params)(jnp.asarray(tokens(1)), mode=Prefill(jnp.array([4]), 128))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_sharded_step_is_that_of_one_device(axes):
    c = resolved(value_embeddings=False, **ENCODER)
    spec, hyperparams = make_spec(c)
    found = []
    for mesh in (mesh_of(), mesh_of(**axes)):
        with jax.set_mesh(mesh):
            state, metrics = make_step(spec, mesh)(
                begin_random(spec, mesh), batch(8, micro=4), hyperparams
            )
            found.append((metrics["loss"], metrics["grad_norm"], state.params))
    close(found[0], found[1], rtol=1e-3, atol=1e-5)


RUN = QUICK | {
    "model__causal": "false", "model__window_pattern": "L", "objective__name": "masked_lm",
    "model__document_mask": "true", "data__tokenizer__special_tokens": "['<mask>']",
}  # fmt: skip


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_trains_validates_and_is_refused_where_a_decoder_is_needed(tmp_path, capsys):
    assert train(run_overrides(tmp_path, train__steps=4, checkpoint__every=2, **RUN)) == 0
    run = tmp_path / "tiny"
    rows = read_rows(run / "metrics.jsonl")
    last = [row for row in rows if row["kind"] == "validation"][-1]
    assert 3 < last["loss"] < 6.5 and not (run / "samples").exists()
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert f"loss         {last['loss']:.4f}" in capsys.readouterr().out
    for command in (
        ["generate", str(run), "--prompt", "a"],
        ["evaluate", str(run), "--tasks", "core"],
        ["export", str(run), str(tmp_path / "hf")],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1 and "causal" in said, said


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_resumed_run_hides_the_same_tokens(tmp_path):
    overrides = run_overrides(tmp_path, train__steps=4, checkpoint__every=2, **RUN)
    assert train(overrides) == 0
    whole = load_saved(tmp_path / "tiny").params
    forget_end(tmp_path / "tiny", 4)
    assert train(overrides) == 0
    same(load_saved(tmp_path / "tiny").params, whole)


def test_the_configuration_is_refused_with_the_fix(tmp_path, capsys):
    assert train(run_overrides(tmp_path, **{**RUN, "model__causal": "true"})) == 2
    assert "set model.causal=false" in capsys.readouterr().err
    bare = {k: v for k, v in RUN.items() if "special" not in k}
    assert train(run_overrides(tmp_path, **bare)) == 2
    assert "data.tokenizer.special_tokens=['<mask>']" in capsys.readouterr().err
