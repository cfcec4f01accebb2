"""Preference training: losses of the papers, pairs side by side, the reference, whole runs."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import TypeAdapter
from safetensors.numpy import load_file
from tiny import (
    LLAMA,
    VOCAB,
    close,
    make_spec,
    mesh_of,
    on_one_device,
    random_params,
    resolved,
    rows_of,
    run_overrides,
    same,
    stacked,
)

from jaxtrain.data import PairBatch, make_chat
from jaxtrain.evaluation import evaluate
from jaxtrain.main import main
from jaxtrain.model import Transformer, split
from jaxtrain.objectives import PREFERENCES, ObjectiveConfig, answer_logps, make_objective
from jaxtrain.objectives.kto import reference_point
from jaxtrain.objectives.preference import Answers
from jaxtrain.parallel import place_batch
from jaxtrain.runs.saved import load_saved, template_for
from jaxtrain.train.step import gradients

T, SLOTS, LONGEST = 32, 8, 9
CASES = {
    "dpo": {"beta": 0.3},
    "cdpo": {"name": "dpo", "beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"beta": 0.2},
    "ipo sums": {"name": "ipo", "beta": 0.2, "per_token": False},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7},
}


# ---- losses ------------------------------------------------------------------------------------


def formula(xp, c, logp, reference, tokens, wanted):
    """The papers' losses, mean over pairs; arrays [pairs, 2], the first is chosen or judged."""
    sigmoid = lambda x: 1 / (1 + xp.exp(-x))
    ratio = logp - reference
    margin = ratio[:, 0] - ratio[:, 1]
    if c.name == "dpo":
        e = c.label_smoothing
        right, wrong = sigmoid(c.beta * margin), sigmoid(-c.beta * margin)
        return xp.mean(-(1 - e) * xp.log(right) - e * xp.log(wrong))
    if c.name == "ipo":
        ratio = ratio / tokens if c.per_token else ratio
        return xp.mean((ratio[:, 0] - ratio[:, 1] - 1 / (2 * c.beta)) ** 2)
    if c.name == "orpo":
        p = xp.exp(logp / tokens)
        odds = p / (1 - p)
        return xp.mean(-xp.log(p[:, 0]) - c.beta * xp.log(sigmoid(xp.log(odds[:, 0] / odds[:, 1]))))
    z = xp.maximum(0.0, xp.mean(ratio[:, 1]))
    z = z if xp is np else jax.lax.stop_gradient(z)
    good = c.desirable_weight * (1 - sigmoid(c.beta * (ratio[:, 0] - z)))
    bad = c.undesirable_weight * (1 - sigmoid(c.beta * (z - ratio[:, 0])))
    return xp.mean(xp.where(wanted, good, bad))


def random_pairs(count=6, seed=0):
    """Texts with what is learned in them, [(tokens, learned) x 2], and two numbers for each."""
    random = np.random.default_rng(seed)

    def text():
        ids = random.integers(0, VOCAB, random.integers(5, LONGEST + 1)).astype(np.int32)
        return ids, np.arange(len(ids)) >= random.integers(2, len(ids))

    return [(text(), text()) for _ in range(count)], random.normal(-0.5, 1, (count, 2))


def packed(pairs, references, notes, rows=4):
    """A PairBatch with the pairs dealt over the rows; the last row is empty."""
    tokens, segments, positions = (np.zeros((rows, T + 1), np.int32) for _ in range(3))
    weights = np.zeros((rows, T + 1), np.float32)
    found = np.full((rows, SLOTS), -1, np.int32)
    known, at = np.zeros((rows, SLOTS, 2), np.float32), [0] * rows
    for i, pair in enumerate(pairs):
        row = next(r for r in range(rows) if at[r] + sum(len(ids) for ids, _ in pair) <= T + 1)
        slot = int((found[row] >= 0).sum())
        found[row, slot], known[row, slot] = notes[i], references[i]
        for j, (ids, learned) in enumerate(pair):
            columns = slice(at[row], at[row] + len(ids))
            tokens[row, columns], weights[row, columns] = ids, learned
            segments[row, columns], positions[row, columns] = 2 * slot + j + 1, np.arange(len(ids))
            at[row] += len(ids)
    assert not at[-1] and max(int((f >= 0).sum()) for f in found) > 1
    cut = tokens[:, :-1], tokens[:, 1:], weights[:, 1:], segments[:, :-1], positions[:, :-1]
    return PairBatch(*cut, found, known)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(graphdef, params, tokens_BT):
    model = nnx.merge(graphdef, params)
    return model(tokens_BT).states @ model.head_DV()[:, :VOCAB]


def plain_logps(graphdef, params, pairs, xp):
    """Each text in a row of its own, all logits in memory; NumPy's in float64: [pairs, 2]."""
    texts = [text for pair in pairs for text in pair]
    ids, learned = (np.zeros((len(texts), LONGEST), np.int32) for _ in range(2))
    for i, (tokens, marks) in enumerate(texts):
        ids[i, : len(tokens)], learned[i, : len(tokens)] = tokens, marks
    logits = all_logits(graphdef, params, ids)
    if xp is np:
        logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    logp = logits - top - xp.log(xp.exp(logits - top).sum(-1, keepdims=True))
    own = xp.take_along_axis(logp[:, :-1], ids[:, 1:, None], axis=2)[..., 0]
    return (own * learned[:, 1:]).sum(1).reshape(-1, 2)


@pytest.fixture(scope="module")
def model():
    c = resolved(**LLAMA, document_mask=True)
    graphdef, specs = split(Transformer(c, VOCAB))
    return c, graphdef, random_params(specs)


@pytest.fixture(scope="module")
def truth(model):
    """Pairs, the reference's log-probs, and those of the model in float64."""
    _, graphdef, params = model
    pairs, near = random_pairs()
    logp = plain_logps(graphdef, params, pairs, np)
    return pairs, logp + near, logp


def case_of(case, pairs):
    """(configuration, which of the pairs' first answers are wanted, notes, learned tokens)."""
    c = TypeAdapter(ObjectiveConfig).validate_python({"name": case.split()[0]} | CASES[case])
    wanted = np.arange(len(pairs)) % 3 > 0
    notes = np.where(wanted, 1, 2) if c.name == "kto" else np.zeros(len(pairs))
    return c, wanted, notes, np.array([[m[1:].sum() for _, m in pair] for pair in pairs], float)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_their_slopes_are_those_of_the_papers(truth, case):
    pairs, references, logp = truth
    c, wanted, _, tokens = case_of(case, pairs)
    of = lambda logp: formula(np, c, logp, references, tokens, wanted)

    def ours(logp):
        ratio = logp - references.astype(np.float32)
        z = reference_point(ratio[:, 1].sum(), jnp.float32(len(pairs)))
        z = jax.lax.stop_gradient(z)
        answers = Answers(logp, references, jnp.asarray(tokens), jnp.asarray(wanted))
        return PREFERENCES[c.name].loss(c, answers, z).loss_N.mean()

    with jax.enable_x64(True):
        loss, slopes = jax.value_and_grad(ours)(jnp.asarray(logp))
    np.testing.assert_allclose(loss, of(logp), rtol=1e-6)
    moved = np.eye(logp.size).reshape(-1, *logp.shape) * 1e-5
    expected = [(of(logp + d) - of(logp - d)) / 2e-5 for d in moved]
    if c.name == "kto":  # no gradient flows through the reference point
        slopes = slopes[:, 0]
        z, ratio = np.maximum(0, (logp - references)[:, 1].mean()), (logp - references)[:, 0]
        assert z > 0.1
        slope = c.beta / (2 + 2 * np.cosh(c.beta * (ratio - z))) / len(pairs)
        expected = np.where(wanted, -c.desirable_weight, c.undesirable_weight) * slope
    np.testing.assert_allclose(np.ravel(slopes), np.ravel(expected), rtol=1e-4, atol=1e-7)


def test_packed_answers_have_the_log_probabilities_of_each_alone(model, truth):
    _, graphdef, params = model
    pairs, references, logp = truth
    batch = jax.tree.map(jnp.asarray, packed(pairs, references, np.zeros(len(pairs))))
    found, tokens = jax.jit(lambda params: answer_logps(graphdef, params, batch))(params)
    there = np.asarray(batch.kto_labels_BP) >= 0
    order = np.argsort(np.asarray(batch.references_BP2)[there][:, 0])
    alone = logp[np.argsort(references[:, 0])]
    np.testing.assert_allclose(np.asarray(found)[there][order], alone, rtol=1e-5)
    assert not np.asarray(found)[~there].any()
    assert float(tokens.sum()) == batch.weights_BT.sum()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_step_is_that_of_all_logits_however_accumulated(model, truth, case):
    """Loss, figures and gradients of packed pairs in chunks, against each text by itself."""
    config, graphdef, params = model
    pairs, references, logp = truth
    c, wanted, notes, tokens = case_of(case, pairs)
    batch = packed(pairs, references, notes)
    plain = lambda p: formula(
        jnp, c, plain_logps(graphdef, p, pairs, jnp), references.astype(np.float32), tokens, wanted
    )
    slopes = jax.jit(jax.grad(plain))(params)
    task, _ = make_spec(config)
    task = task._replace(objective=make_objective(c))

    @jax.jit
    def run(batch):
        count, _ = task.objective.count(batch, task.bytes_V)
        shared = task.objective.share(graphdef, params, batch)
        (loss, sums), grads, _ = gradients(task, params, batch, 1 / count, None, shared)
        return task.objective.metrics(loss, count, count, sums, shared), grads

    for micro in (2, 4)[: 2 if case == "dpo" else 1]:
        figures, grads = run(stacked(batch, micro))
        expected = formula(np, c, logp, references, tokens, wanted)
        np.testing.assert_allclose(figures["loss"], expected, rtol=2e-5)
        close(grads, slopes, rtol=1e-4, atol=2e-6)
    rewards = c.beta * (logp - references)
    z = max(0, rewards[:, 1].mean())
    right = (rewards[:, 0] > z) == wanted if case == "kto" else rewards[:, 0] > rewards[:, 1]
    chosen, rejected = rewards.T
    if case == "kto":
        chosen, rejected = chosen[wanted], chosen[~wanted]
    means = chosen.mean(), rejected.mean(), chosen.mean() - rejected.mean()
    names = "reward_chosen", "reward_rejected", "reward_margin"
    np.testing.assert_allclose([figures[name] for name in names], means, rtol=1e-3)
    assert figures["accuracy"] == pytest.approx(right.mean()) and 0 < right.mean() < 1
    assert figures["pairs"] == len(pairs)
    if case == "dpo":
        np.testing.assert_allclose(figures["logp_chosen"], logp[:, 0].mean(), rtol=1e-5)
        np.testing.assert_allclose(figures["logp_rejected"], logp[:, 1].mean(), rtol=1e-5)
    else:
        np.testing.assert_allclose(figures["divergence"], z / c.beta, rtol=1e-4)


@pytest.mark.slow
def test_answers_and_gradients_are_the_same_on_a_mesh(model, truth):
    _, graphdef, params = model
    pairs, references, logp = truth
    batch, mesh = packed(pairs, references, np.zeros(len(pairs))), mesh_of(fsdp=2, context=2)
    slopes = np.random.default_rng(0).normal(size=batch.references_BP2.shape).astype(np.float32)

    def run(params, batch):
        logp_BP2, tokens_BP2 = answer_logps(graphdef, params, batch)
        return (logp_BP2 * slopes).sum(), (logp_BP2, tokens_BP2)

    f = jax.jit(jax.value_and_grad(run, has_aux=True))
    (_, expected), gradients = f(params, jax.tree.map(jnp.asarray, batch))
    with jax.set_mesh(mesh):
        (_, got), on_mesh = f(params, place_batch(batch, mesh))
    close(got, expected)
    close(on_mesh, gradients, rtol=1e-4, atol=1e-5)
    there = batch.kto_labels_BP >= 0
    order = np.argsort(batch.references_BP2[there][:, 0])
    alone = logp[np.argsort(references[:, 0])]
    np.testing.assert_allclose(np.asarray(got[0])[there][order], alone, rtol=1e-5)
    assert not np.asarray(got[0])[~there].any() and float(got[1].sum()) == batch.weights_BT.sum()


# ---- runs --------------------------------------------------------------------------------------


def write_pairs(path, count=4, kto=False):
    """Questions whose good answer is one word and whose bad one another."""
    lines = []
    for i in range(count):
        prompt = f"Is {i} a number?"
        for word, good in (("yes", True), ("no", False)):
            lines.append({"prompt": prompt, "completion": word, "label": good})
        if not kto:
            lines[-2:] = [{"prompt": prompt, "chosen": "yes", "rejected": "no"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(directory, start, pairs, name, **changes):
    """The arguments of a run on preferences from the run `start`."""
    changes = {
        "run__name": name, "train__init_from": start, "data__cache_dir": directory / "cache",
        "data__train__name": "preference", "data__train__path": pairs,
        "data__validation__name": "none", "objective__name": "dpo", "optim__name": "adamw",
        "optim__schedule__warmup_steps": 0, "optim__learning_rate": 0.003,
        "train__sequence_length": 128, "train__batch_size": 8,
    } | changes  # fmt: skip
    if "data__validation" in changes:  # the whole section
        del changes["data__validation__name"]
    given = run_overrides(directory, **changes)
    return [x for x in given if not x.startswith(("model.", "data.tokenizer"))]


@pytest.fixture(scope="module")
def dpo(whole, tmp_path_factory):
    """A run of DPO with LoRA on four pairs, which it validates on as well."""
    directory = tmp_path_factory.mktemp("dpo")
    pairs = write_pairs(directory / "pairs.jsonl")
    validation: dict = {"name": "source", "source": {"name": "preference", "path": str(pairs)}}
    arguments = command(
        directory, whole, pairs, "dpo", finetune__name="lora", finetune__rank=4,
        data__validation=validation, eval__every=3, optim__learning_rate=0.03,
    )  # fmt: skip
    with on_one_device():
        assert main(arguments) == 0
    return directory / "dpo", arguments


@pytest.mark.slow
def test_it_begins_at_log_2_and_learns_the_order(dpo, capsys):
    rows = rows_of(dpo[0])
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["accuracy"] == 1 and rows[-1]["reward_margin"] > 0.01
    validation = rows_of(dpo[0], "validation")
    assert [row["step"] for row in validation] == [3, 6] and validation[-1]["accuracy"] == 1
    assert validation[-1]["pairs"] == 4
    assert evaluate.main([str(dpo[0])]) == 2
    assert "dpo was trained on preferences" in capsys.readouterr().err


@pytest.mark.slow
def test_the_reference_is_the_model_without_the_adapter(dpo, whole):
    """Each answer's log-probs by the base alone, one text in a row of its own."""
    run, _ = dpo
    base, tuned = load_saved(whole), load_saved(run)
    chat = make_chat(*template_for(tuned), tuned.tokenizer)
    model = nnx.merge(base.graphdef, jax.tree.map(jnp.asarray, base.params))
    logits_of = jax.jit(lambda ids_1T: model.logits(model(ids_1T).states[0]))
    with np.load(run / "reference.npz") as file:
        stored = dict(file)
    assert set(stored) == {"train", "held out"}
    same(stored["train"], stored["held out"])
    for i, answers in enumerate(stored["train"]):
        for word, logp in zip(("yes", "no"), answers):
            asked = [{"role": "user", "content": f"Is {i} a number?"}]
            answer = {"role": "assistant", "content": word}
            (document,) = chat.answers([([*asked, answer], 1, None)])
            ids = np.concatenate([[chat.start], document.ids])
            logits = logits_of(jnp.asarray(ids, jnp.int32)[None])
            each = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
            np.testing.assert_allclose(each[document.marks].sum(), logp, rtol=1e-4)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_resumed_is_uninterrupted(dpo):
    run, arguments = dpo
    rows, validation = rows_of(run), rows_of(run, "validation")
    known = (run / "reference.npz").read_bytes()
    before = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "6")
    shutil.rmtree(run / "model")
    assert main(arguments) == 0
    assert (rows_of(run), rows_of(run, "validation")) == (rows, validation)
    same(load_file(run / "model" / "model.safetensors"), before)
    assert (run / "reference.npz").read_bytes() == known


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_lost_reference_is_missed(dpo, capsys):
    run, arguments = dpo
    known = (run / "reference.npz").read_bytes()
    shutil.rmtree(run / "checkpoints" / "6")
    shutil.rmtree(run / "model")
    (run / "reference.npz").unlink()
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "reference.npz is missing" in line and "set run.name" in line
    (run / "reference.npz").write_bytes(known)
    assert main(arguments) == 0


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["kto", "orpo"])
def test_all_parameters_learn_the_order(whole, tmp_path, name):
    """The reference of a whole model is that which training starts from; ORPO has none."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", kto=name == "kto")
    more = {"objective__name": name, "optim__learning_rate": 0.01}
    assert main(command(tmp_path, whole, pairs, name, **more)) == 0
    rows, run = rows_of(tmp_path / name), tmp_path / name
    assert rows[-1]["reward_margin"] > rows[0]["reward_margin"] + 0.01
    assert rows[-1]["accuracy"] == 1
    assert (run / "reference.npz").is_file() == (name == "kto")
    if name == "kto":
        assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6) and rows[-1]["loss"] < 0.5
        assert rows[-1]["pairs"] % 1 == 0 and rows[-1]["divergence"] >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective__name": "next_token"}, "next_token does not go with data.train.name=pref"),
        ({"objective__name": "kto"}, "kto trains on lines of prompt, completion and label, but"),
        (
            {"model__document_mask": False},
            "objective.name=dpo does not go with model.document_mask=false: ",
        ),
        ({"train__z_loss": 0.1}, "objective.name=dpo does not go with train.z_loss=0.1: "),
        ({"train__sequence_length": 16}, "none of the 4 preferences is left"),
        ({"data__train__name": "chat"}, "dpo does not go with data.train.name=chat"),
    ],
)
def test_what_does_not_go_together_is_one_line(whole, tmp_path, capsys, changes, message):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    arguments = command(tmp_path, whole, pairs, "x", **changes)
    if "model__document_mask" in changes:
        arguments.append("model.document_mask=false")
    assert main(arguments) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("label", [True, False])
def test_kto_needs_both_labels(whole, tmp_path, capsys, label):
    lines = [{"prompt": f"{i}?", "completion": "yes", "label": label} for i in range(4)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(command(tmp_path, whole, pairs, "x", objective__name="kto")) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    known, missing = str(label).lower(), str(not label).lower()
    assert f"every line of data.train has label {known}: " in line
    assert f"also needs answers with label {missing}" in line
