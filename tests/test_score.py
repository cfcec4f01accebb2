"""Scores of documents: the numbers, that no batch changes them, and the command."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from flax import nnx
from tiny import byte_model, random_run

from jaxtrain.config.resolve import override
from jaxtrain.data import DataConfig, prepare
from jaxtrain.data.evaluation.branches import RowShape, pack_branches
from jaxtrain.evaluation import document_scores as measures
from jaxtrain.evaluation import score
from jaxtrain.evaluation.document_scores import make_measurer
from jaxtrain.evaluation.prototypes import distances, find_prototypes
from jaxtrain.runs.saved import load_saved

T = 48  # the context, in bytes
FIELDS = byte_model(T, "model.logit_softcap=3")
SIZES = (1, 5, 30, 48, 49, 130, 0, 17)
SCORES = ["perplexity", "el2n", "grad_norm", "prototypicality"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory's content with a random model of bytes."""
    return random_run(tmp_path_factory.mktemp("run"), FIELDS)


@pytest.fixture(scope="module")
def model(run):
    return load_saved(run)


def written(path):
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return [json.loads(line) for line in reader.read().decode().splitlines()]


def texts(count, seed=0):
    """Words in a random order, from one to some hundred bytes."""
    random = np.random.default_rng(seed)
    words = ["a", "the", "cat", "sat", "on", "mat", "and", "looked", "at", "another", "moon"]
    return [" ".join(random.choice(words, 1 + random.integers(0, 30))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [{"id": i, "text": text} for i, text in enumerate(texts(40))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents():
    random = np.random.default_rng(0)
    return [np.insert(random.integers(0, 256, n), 0, 256).astype(np.int32) for n in SIZES]


# ---- numbers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(model):
    """tokens -> (logits [T, V], states [T, D]) of one piece of text, the plain way."""

    @jax.jit
    def plain(params, tokens_1T):
        merged = nnx.merge(model.graphdef, params)
        x_TD = merged(tokens_1T).states[0]
        return merged.logits(x_TD), x_TD

    def run(tokens):
        padded = np.zeros((1, T), np.int32)
        padded[0, : len(tokens)] = tokens
        return (
            np.asarray(x, np.float64)[: len(tokens)]
            for x in plain(model.params, jnp.asarray(padded))
        )

    return run


def plain_measures(alone, tokens):
    """(means of nll, EL2N and gradient norm, mean state of length 1) of one document."""
    rows, states = [], []
    for begin in range(0, len(tokens) - 1, T):
        piece = tokens[begin : begin + T + 1]
        for logits, state, label in zip(*alone(piece[:-1]), piece[1:]):
            p = np.exp(logits - logits.max())
            p /= p.sum()
            error = p - np.eye(len(p))[label]
            capped = error * (1 - (logits / 3) ** 2)
            norm = np.linalg.norm
            rows.append([-np.log(p[label]), norm(error), norm(capped) * norm(state)])
            states.append(state)
    mean = np.mean(states, 0)
    return np.mean(rows, 0), mean / np.linalg.norm(mean)


def test_measures_are_those_of_each_document_alone(model, alone):
    found = make_measurer(model, model.config, states=True).measure(documents())
    assert found.tokens_N.tolist() == list(SIZES)
    for number, tokens in enumerate(documents()):
        if SIZES[number] == 0:
            assert np.isnan(found.means_Nm[number]).all() and np.isnan(found.states_ND[number, 0])
            continue
        means_m, state_D = plain_measures(alone, tokens)
        np.testing.assert_allclose(found.means_Nm[number], means_m, rtol=1e-5)
        np.testing.assert_allclose(found.states_ND[number], state_D, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_gradient_norm_is_that_of_the_head(model):
    """Of one token after BOS, by autodiff."""
    tokens = np.array([256, 65], np.int32)
    found = make_measurer(model, model.config, states=False).measure([tokens])

    def loss(params):
        merged = nnx.merge(model.graphdef, params)
        log_V = jax.nn.log_softmax(merged.logits(merged(jnp.asarray(tokens[None, :1])).states[0]))
        return -log_V[0, 65]

    grads = jax.jit(jax.grad(loss))(model.params)
    norm = jnp.linalg.norm(grads["head"])
    assert found.means_Nm[0, 2] == pytest.approx(float(norm), rel=1e-5)
    assert found.states_ND is None


@pytest.mark.slow
def test_no_batch_changes_a_number(model, monkeypatch):
    """Other rows at a time, other chunks of the head and another order."""
    expected = make_measurer(model, model.config, states=True).measure(documents())
    for rows, chunk, order in ((16, 8, slice(None, None, -1)), (24, 1 << 20, slice(None))):
        monkeypatch.setattr("jaxtrain.evaluation.log_likelihood.HEAD_ROWS", chunk)
        config = override(model.config, [f"eval.batch_size={rows}"])
        found = make_measurer(model, config, states=True).measure(documents()[order])
        for name, values in zip(expected._fields, found):
            np.testing.assert_allclose(
                values[order], getattr(expected, name), rtol=1e-5, atol=1e-6, err_msg=name
            )


def test_logits_are_never_there_of_a_whole_row(model):
    T = model.config.model.context_length
    rows = next(
        pack_branches(
            [[piece] for piece in measures.split_to_context(documents(), T)[0]], RowShape(4, T, 0)
        )
    )[0]
    made = jax.make_jaxpr(measures.measure_rows, static_argnums=(0, 4))
    text = str(made(model.graphdef, model.params, rows, np.int32(3), 6))
    heights = {int(a) for a in re.findall(r"f32\[(\d+),(?:257|320)\]", text)}
    assert heights == {model.config.model.width, 4 * 6}
    assert not re.search(r"\[\d+,\d+,(257|320)\]", text)


def test_prototypes_are_the_directions_of_clusters():
    random = np.random.default_rng(0)
    true_CD = np.linalg.qr(random.normal(size=(16, 6)))[0].T
    of_N = np.repeat(np.arange(6), [40, 10, 30, 5, 60, 20])
    x_ND = true_CD[of_N] + 0.02 * random.normal(size=(len(of_N), 16))
    x_ND = (x_ND / np.linalg.norm(x_ND, axis=1, keepdims=True)).astype(np.float32)
    found_CD = find_prototypes(x_ND, 6)
    means_CD = np.stack([x_ND[of_N == c].mean(0) for c in range(6)])
    means_CD /= np.linalg.norm(means_CD, axis=1, keepdims=True)
    match = (found_CD @ means_CD.T).argmax(0)
    assert sorted(match) == list(range(6))
    np.testing.assert_allclose(found_CD[match], means_CD, atol=1e-6)
    expected = 1 - (x_ND @ means_CD.T).max(1)
    np.testing.assert_allclose(distances(x_ND, found_CD), expected, atol=1e-6)


# ---- the command -------------------------------------------------------------------------------


def command(run, corpus, out, *more, names=SCORES, kind="jsonl"):
    clusters = () if "--clusters" in more else ("--clusters", "3")
    return score.main(
        [str(run), "--score", ",".join(names), "--out", str(out), *clusters,
         f"data.cache_dir={out.parent / 'cache'}", f"data.train.name={kind}",
         f"data.train.path={corpus}", "data.validation.name=none", *more]
    )  # fmt: skip


@pytest.mark.slow
def test_columns_are_written_and_can_be_filtered_by(run, corpus, tmp_path, model, capsys):
    out = tmp_path / "scored.jsonl.zst"
    assert command(run, corpus, out) == 0
    rows = written(out)
    assert [row["id"] for row in rows] == list(range(40))
    assert [row["text"] for row in rows] == texts(40)
    tokens = [np.array([256, *text.encode()], np.int32) for text in texts(40)]
    found = make_measurer(model, model.config, states=True).measure(tokens)
    prototypes_CD = find_prototypes(found.states_ND, 3)
    expected = {
        "perplexity": np.exp(found.means_Nm[:, 0]),
        "el2n": found.means_Nm[:, 1],
        "grad_norm": found.means_Nm[:, 2],
        "prototypicality": distances(found.states_ND, prototypes_CD),
    }
    for name, values in expected.items():
        np.testing.assert_allclose([row[name] for row in rows], values, rtol=1e-4, atol=1e-6)
    median = np.median([row["el2n"] for row in rows])
    said = capsys.readouterr().out
    assert "40 documents" in said and f"{median:.4g}" in said

    keep = [{"name": "score", "field": "el2n", "keep_fraction": 0.25, "keep": "lowest"}]
    c = DataConfig(
        train={"name": "jsonl", "path": str(out), "filters": keep},
        validation={"name": "none"}, tokenizer={"name": "bytes"}, cache_dir=str(tmp_path / "c"),
    )  # fmt: skip
    store = prepare(c).train
    best = sorted(np.argsort(expected["el2n"], kind="stable")[:10])
    assert store.lengths.tolist() == [len(tokens[i]) - 1 for i in best]


@pytest.mark.slow
def test_a_parquet_file_keeps_its_columns(run, tmp_path):
    table = {"body": texts(5), "id": [3, 1, 4, 1, 5], "raw": [b"x"] * 5, "url": list("abcde")}
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=2)
    out = tmp_path / "o.jsonl.zst"
    more = ["data.train.column=body"]
    path = tmp_path / "t.parquet"
    assert command(run, path, out, *more, names=["el2n"], kind="parquet") == 0
    rows = written(out)
    assert all(row.pop("el2n") > 0 for row in rows)
    table["raw"] = ["eA=="] * 5  # base64
    assert rows == [dict(zip(table, row)) for row in zip(*table.values())]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
@pytest.mark.slow
def test_a_killed_scoring_goes_on(run, corpus, tmp_path, monkeypatch, capsys, seconds):
    monkeypatch.setattr("jaxtrain.data.files.reading.BLOCK", 500)
    monkeypatch.setattr("jaxtrain.data.store.encode.BATCH", 500)
    monkeypatch.setattr(score, "JOB_BATCHES", 1)
    monkeypatch.setattr(score, "SAVE_SECONDS", seconds)
    assert command(run, corpus, tmp_path / "whole.jsonl.zst") == 0
    out, calls, plain = tmp_path / "again.jsonl.zst", [], score.make_measurer

    def failing(*args):
        measurer = plain(*args)

        def measure(documents):
            calls.append(len(documents))
            if len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return measurer.measure(documents)

        return measurer._replace(measure=measure)

    monkeypatch.setattr(score, "make_measurer", failing)
    codes = []
    while not codes or codes[-1]:
        assert not out.exists() and len(codes) < 20
        codes.append(command(run, corpus, out))
    assert codes.count(130) > 1 and sum(calls) - sum(calls[2::3]) == 40
    assert "interrupted; the same command resumes" in capsys.readouterr().err
    assert out.read_bytes() == (tmp_path / "whole.jsonl.zst").read_bytes()
    before = len(calls)
    assert command(run, corpus, out) == 0 and len(calls) == before
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.slow
def test_bad_input_is_one_line(run, corpus, tmp_path, capsys):
    def error(*more, out="o.jsonl.zst", names=("el2n",), path=corpus):
        assert command(run, path, tmp_path / out, *more, names=names) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "--score loss: there is no such score; there are perplexity" in error(names=["loss"])
    assert "--score names none of" in error(names=[])
    assert "has to end in .jsonl.zst" in error(out="o.json")
    assert "argument --clusters: got '0', must be a whole number from 1" in error("--clusters", "0")
    assert "no file or folder" in error(path=tmp_path / "none.jsonl")
    assert "has no field 'body'; it has: id, text" in error("data.train.field=body")
    many = error("--clusters", "40", names=["prototypicality"])
    assert "--clusters 40 needs more documents than that, but there are 40" in many
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl holds no text" in error(path=tmp_path / "empty.jsonl")
    taken = tmp_path / "taken.jsonl.zst"
    taken.write_text("mine")
    assert "holds other scores" in error(out="taken.jsonl.zst")
    assert taken.read_text() == "mine"
    mixed = tmp_path / "m.jsonl.zst"
    parts = (
        f"data.train={{name: mixture, sources: {{a: {{source: {{name: jsonl, path: {corpus}}}}}}}}}"
    )
    arguments = [str(run), "--score", "el2n", "--out", str(mixed), parts]
    assert score.main([*arguments, "data.validation.name=none"]) == 2
    assert "score reads one source of text" in capsys.readouterr().err
    assert measures.MEASURES == ("nll", "el2n", "grad_norm")
