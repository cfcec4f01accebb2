"""Distillation: divergences and their gradients, meshes, and a run with its resumption."""

import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import FENCE
from tiny import (
    PLAIN_MODEL,
    QUICK,
    assert_same_metrics,
    batch,
    build,
    byte_model,
    close,
    forget_end,
    make_spec,
    random_run,
    resolved,
    run_overrides,
    same,
    stacked,
)

from jaxtrain import cli
from jaxtrain.main import main
from jaxtrain.objectives import LossOptions, distill
from jaxtrain.objectives.distill import (
    CachedTeacher,
    DistillConfig,
    TaughtBatch,
    Teacher,
    make_distill,
    top_and_rest,
)
from jaxtrain.objectives.next_token import hidden_states
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved

E, CAP = 24, 12.0  # of the teacher


def objective(**fields):
    return make_distill(DistillConfig(teacher="runs/teacher", **fields), LossOptions())


def taught(one):
    """The batch with hidden states and a head of a teacher of another width."""
    random = np.random.default_rng(3)
    states = random.normal(size=(*one.tokens_BT.shape, E)).astype(np.float32)
    head = random.normal(size=(E, 80)).astype(np.float32)  # filled up: the vocabulary has 61
    own = (one.tokens_BT, one.targets_BT, one.weights_BT, one.segments_BT, one.positions_BT)
    return TaughtBatch(*own, Teacher(jnp.asarray(states), jnp.asarray(head), jnp.float32(CAP)))


def reference(kind, p, q):
    """sum p log(p / q) and its kin, of probabilities."""
    kl = lambda a, b: jnp.sum(a * jnp.log(a / b), -1)
    middle = (p + q) / 2
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
    }[kind]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.quick("forward_kl")
def test_loss_and_gradient_are_those_of_whole_logits(kind, monkeypatch):
    monkeypatch.setattr(distill, "CHUNK_LOGITS", 24 * 61)  # the last of the chunks is not full
    _, graphdef, _, params = build(depth=1, logit_softcap=15.0)
    given = jax.tree.map(jnp.asarray, taught(batch(2)))
    tau, share = 2.0, 0.25

    def ours(p):
        o = objective(divergence=kind, temperature=tau, weight=share)
        return o.loss(
            graphdef, p, o.microbatches(given), o.share(graphdef, p, given), step=jnp.int32(0)
        )[0]

    def theirs(p):
        h = hidden_states(graphdef, p, given)
        z = 15 * jnp.tanh(h.x_BTD @ h.model.head_DV()[:, :61] / 15)
        u = CAP * jnp.tanh(given.teacher.states_BTE @ given.teacher.head_EV[:, :61] / CAP)
        hard = -jnp.take_along_axis(jax.nn.log_softmax(z), given.targets_BT[..., None], -1)[..., 0]
        soft = reference(kind, jax.nn.softmax(u / tau), jax.nn.softmax(z / tau))
        return jnp.sum(given.weights_BT * (share * hard + (1 - share) * tau**2 * soft))

    with jax.default_matmul_precision("highest"):
        found, expected = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, theirs))
    close(found, expected, rtol=2e-4, atol=2e-4)


def cached(given, top_k, tau):
    """The same teacher as a cache has it, in float32."""
    t = given.teacher
    u = CAP * jnp.tanh(t.states_BTE @ t.head_EV[:, :61] / CAP)
    logp = jax.nn.log_softmax(u / tau)
    ids = jax.lax.top_k(logp, top_k)[1]
    found = top_and_rest(logp.reshape(-1, 61), ids.reshape(-1, top_k))
    return given._replace(teacher=CachedTeacher(ids, found.reshape(*ids.shape[:2], top_k + 1)))


def test_the_rest_of_a_cache_is_what_the_others_have_together():
    logits_NV = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    ids_Nk = np.argsort(-logp_NV, axis=1)[:, :4]
    found = np.exp(jax.jit(top_and_rest)(logp_NV, ids_Nk))
    ordered = -np.sort(-np.exp(logp_NV), axis=1)
    np.testing.assert_allclose(found[:, :4], ordered[:, :4], rtol=1e-5)
    np.testing.assert_allclose(found[:, 4], ordered[:, 4:].sum(1), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_cache_of_all_tokens_but_one_is_the_teacher_and_a_smaller_one_is_below(kind, monkeypatch):
    monkeypatch.setattr(distill, "CHUNK_LOGITS", 24 * 61)
    _, graphdef, _, params = build(depth=1)
    given = jax.tree.map(jnp.asarray, taught(batch(2)))
    o = objective(divergence=kind, temperature=2.0, weight=0.25)

    def loss(p, one):
        one = one._replace(weights_BT=jnp.ones_like(one.weights_BT))
        shared = o.share(graphdef, p, one)
        return o.loss(graphdef, p, o.microbatches(one), shared, step=jnp.int32(0))[0]

    grads = jax.jit(jax.value_and_grad(loss))
    with jax.default_matmul_precision("highest"):
        whole, most = grads(params, given), grads(params, cached(given, 60, 2.0))
        close(most, whole, rtol=1e-3, atol=1e-3)
        few = [float(jax.jit(loss)(params, cached(given, k, 2.0))) for k in (2, 12)]
    ones = given._replace(weights_BT=jnp.ones_like(given.weights_BT))
    sums = o.loss(graphdef, params, ones, o.share(graphdef, params, ones), step=jnp.int32(0))[1]
    hard = 0.25 * float(sums["labels"])
    assert hard < few[0] < few[1] < float(whole[0])


@pytest.fixture
def given(tmp_path):
    """Makes the command line of a run with a cache; the folder has two models to learn from."""
    for name, hidden in (("teacher", 48), ("second", 40)):
        random_run(tmp_path / name, byte_model(32, f"model.hidden={hidden}"))

    def arguments(**changes):
        fields = {
            "train__steps": 4, "objective__name": "distill", "checkpoint__every": 2,
            "objective__teacher": tmp_path / "teacher", "objective__top_k": 200,
            "objective__cache": tmp_path / "cache",
        }  # fmt: skip
        kept = run_overrides(tmp_path, **fields | changes)
        return [x for x in kept if "vocab_size" not in x] + ["data.tokenizer.name=bytes"]

    return arguments


def test_a_cache_of_another_teacher_or_of_other_batches_is_refused(given, tmp_path, capsys):
    assert main(given()) == 2
    assert "is incomplete: run `jaxtrain prepare`" in capsys.readouterr().err
    assert cli.main(["prepare", *given()]) == 0
    assert "4 steps, 200 tokens each" in capsys.readouterr().out
    before = (tmp_path / "cache" / "00000000.npz").stat()
    assert cli.main(["prepare", *given(train__steps=6)]) == 0  # goes on
    assert (tmp_path / "cache" / "00000000.npz").stat() == before
    warm = {"objective__cache": tmp_path / "warm", "objective__temperature": 2, "train__steps": 1}
    assert cli.main(["prepare", *given(**warm)]) == 0
    one, two = (np.load(tmp_path / name / "00000000.npz") for name in ("cache", "warm"))
    assert (one["ids"][..., 0] == two["ids"][..., 0]).all()
    apart = [(x["logp"][..., 0] - x["logp"][..., 100]).astype(np.float32) for x in (one, two)]
    np.testing.assert_allclose(apart[0], 2 * apart[1], atol=0.02)
    capsys.readouterr()
    for change, message in (
        ({"objective__teacher": tmp_path / "second"}, "was made with teacher"),
        ({"data__seed": 1}, "was made with seed 0, but this run has 1"),
        ({"objective__top_k": 20}, "was made with top_k 200"),
        ({"train__steps": 7}, "has 6 steps, train.steps is 7"),
    ):
        assert main(given(**change)) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["prepare", *given(objective__top_k=257)]) == 2
    assert "objective.top_k 257: the vocabulary has 257" in capsys.readouterr().err


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_that_reads_a_cache_is_that_with_the_teacher_and_resumes(given, tmp_path):
    assert main(given(objective__cache="null", run__name="online")) == 0
    assert cli.main(["prepare", *given()]) == 0
    assert main(given()) == 0
    one, other = (
        [r for r in read_rows(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
        for name in ("online", "tiny")
    )
    for a, b in zip(one, other, strict=True):
        assert b["loss_distill"] == pytest.approx(a["loss_distill"], rel=0.05) and b["loss"] > 1
        assert b["loss_distill"] < 1.001 * a["loss_distill"]
    whole = load_saved(tmp_path / "tiny").params
    forget_end(tmp_path / "tiny", 4)
    assert main(given()) == 0
    same(load_saved(tmp_path / "tiny").params, whole)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 12], ids=["teacher", "cache"])
def test_a_sharded_step_in_microbatches_is_that_of_one_device(top_k):
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL))
    spec = spec._replace(objective=objective(weight=0.5))
    one = taught(batch(8))
    one = cached(one, top_k, 1.0) if top_k else one

    def given(micro):
        """All but a teacher's head is of tokens, and cut into microbatches."""
        if top_k:
            return stacked(one, micro)
        cut = stacked(one._replace(teacher=None), micro)
        states = stacked(one.teacher.states_BTE, micro)
        return cut._replace(teacher=one.teacher._replace(states_BTE=states))

    names = "loss", "loss_distill", "grad_norm"
    assert_same_metrics(spec, hyperparams, names, [{"fsdp": 2, "tensor": 2}], given)


@pytest.mark.slow
def test_a_run_with_a_teacher_of_another_shape_and_its_resumption(tmp_path, capsys):
    assert (
        main(run_overrides(tmp_path, **QUICK, train__steps=4, run__name="teacher", model__width=40))
        == 0
    )
    fields = QUICK | {
        "train__steps": 4, "objective__name": "distill", "checkpoint__every": 2,
        "objective__teacher": tmp_path / "teacher", "train__batch_size": 16, "mesh__fsdp": 2,
        "mesh__data": 4, "model__depth": 2,
    }  # fmt: skip
    assert main(run_overrides(tmp_path, **fields)) == 0
    whole = load_saved(tmp_path / "tiny")
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    steps = [r for r in rows if r["kind"] == "train"]
    assert all(0 < row["loss_distill"] < 1 < row["loss"] for row in steps)
    forget_end(tmp_path / "tiny", 4)
    assert main(run_overrides(tmp_path, **fields)) == 0
    same(load_saved(tmp_path / "tiny").params, whole.params)
    other = fields | {"run__name": "other", "data__tokenizer__vocab_size": 350}
    assert main(run_overrides(tmp_path, **other)) == 2
    assert "objective.teacher" in capsys.readouterr().err


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "distill.md"
SMALLER = {
    "--depth 10 --hidden 2048 --heads 4": "--depth 1 --hidden 40 --heads 2 --rows 2",
    "tokens=256": "tokens=2",
    "train.steps=500": "train.steps=5",
}


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """Its commands and its Python in order, at the smallest size."""
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "d12"):
        random_run(
            tmp_path / "runs" / name,
            byte_model(32, "data.train.path=tinyshakespeare", "model.depth=3"),
        )
    (tmp_path / "prompts.txt").write_text(
        "".join(f"Line {i}: " + "a word " * 20 + "\n" for i in range(40))
    )
    fields = run_overrides("runs", train__steps=1, **QUICK)
    small = [x for x in fields if not x.startswith(("run.name", "data.tokenizer"))]
    small += ["data.tokenizer.name=bytes"]
    for kind, text in FENCE.findall(PAGE.read_text()):
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        if kind == "py":
            exec(text, {})
            continue
        for line in text.splitlines():
            words = shlex.split(line)[1:]
            given = {word.partition("=")[0] for word in words}
            more = [x for x in small if x.partition("=")[0] not in given]
            if "train.init_from=runs/d12-small" in words:
                more = [x for x in more if not x.startswith("model.")]
                more += ["data.train.path=tinyshakespeare"]
            if "run.name=mine" not in words:
                more += [f"run.name=run-{len(list(Path('runs').iterdir()))}"]
            assert cli.main([*words, *more] if words[0] != "shrink" else words) == 0
    assert len((tmp_path / "teacher.jsonl").read_text().splitlines()) == 40
