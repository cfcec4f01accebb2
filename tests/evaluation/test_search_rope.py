"""jaxtrain search-rope: never worse than its seeds, goes on as if nothing had happened."""

import json
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny import FEW_PARTS, byte_model, random_run, run_overrides

from jaxtrain.config import load_config
from jaxtrain.config.resolve import override
from jaxtrain.data import prepare
from jaxtrain.evaluation import search_rope
from jaxtrain.evaluation.rope_candidates import RopeCandidate, RopeSpace
from jaxtrain.evaluation.search_rope import (
    SearchHistory,
    long_rows,
    main,
    make_measures,
    row_batches,
)
from jaxtrain.model import Transformer, split
from jaxtrain.objectives.next_token import evaluation_sums
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.loop import train

T = 32
FEW = ["--length", "96", "--rows", "2", "--generations", "2", "--population", "6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("run"), byte_model(T, "train.precision=float32"))


@contextmanager
def compilations():
    """A list that grows by one whenever XLA compiles a program."""
    seen = []
    listen = lambda event, seconds, **_: seen.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_a_candidate_has_the_bits_of_the_configuration_that_it_becomes(run):
    """And it is not compiled anew."""
    saved = load_saved(run)
    rows = long_rows(prepare(saved.config.data).validation, 96, 2)
    measures = make_measures(saved, saved.config, rows)
    plain, one = RopeCandidate((1.0,) * 4), RopeCandidate((1.0, 1.5, 2.0, 3.5), 1.1)
    before = measures.target(plain)
    with compilations() as seen:
        found = measures.target(one)
        assert seen == []
        jax.jit(lambda x: x + 3)(jnp.arange(7))
        assert seen
    section = json.dumps(one.scaling(3.0, T).model_dump(mode="json"))
    c = override(saved.config, [f"model.rope_scaling={section}"])
    graphdef, _ = split(Transformer(c.model, saved.tokenizer.vocab_size))
    (batch,) = row_batches(rows, 96, 2)
    bytes_V = jnp.asarray(saved.tokenizer.token_bytes())
    sums = jax.jit(partial(evaluation_sums, graphdef))(saved.params, batch, bytes_V)
    assert found == pytest.approx(float(sums.nats / sums.text_bytes) / np.log(2), rel=1e-5)
    assert abs(found - before) > 1e-3 * before


def test_rows_are_pieces_of_long_documents_the_first_pieces_first(tmp_path, run):
    """Each has BOS in front, and as short rows they are the same text."""
    texts = ["a" * 200, "b" * 30, "c" * 110]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    source = {"name": "source", "source": {"name": "text", "path": str(tmp_path)}}
    saved = load_saved(run)
    given = [f"data.validation={json.dumps(source)}", f"data.cache_dir={tmp_path / 'cache'}"]
    store = prepare(override(saved.config, given).data).validation
    rows = long_rows(store, 96, 8)
    assert rows.shape == (3, 97) and (rows[:, 0] == store.bos_id).all()
    assert [chr(x) for x in rows[:, 1]] == ["a", "c", "a"]
    assert len(long_rows(store, 96, 2)) == 2
    short = list(row_batches(rows, 32, 4))
    assert [int(b.weights_BT.sum()) for b in short] == [128, 128, 32]
    joined = np.concatenate([b.targets_BT for b in short]).reshape(-1)[: 3 * 96]
    assert (joined.reshape(3, 96) == rows[:, 1:]).all()
    with pytest.raises(UserError, match="no document .* has 201 tokens, the longest has 200"):
        long_rows(store, 201, 8)


@pytest.mark.slow
def test_a_search_goes_on_after_a_torn_line(run, tmp_path, monkeypatch, capfd):
    """And it finds what it would have found without the interruption."""
    words = [str(run), *FEW, f"data.cache_dir={tmp_path / 'cache'}"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    capfd.readouterr()
    history = tmp_path / "parts" / "history.jsonl"
    history.parent.mkdir()
    whole = (tmp_path / "whole" / "history.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 6 + 3 + 3
    history.write_text("".join(lines[:8]) + lines[8][:5])
    measured = []

    class Counted(SearchHistory):
        def measured(self, one, evaluate):
            known = len(self.scores)
            score = super().measured(one, evaluate)
            measured.extend([one] * (len(self.scores) - known))
            return score

    monkeypatch.setattr(search_rope, "SearchHistory", Counted)
    assert main([*words, "--out", str(tmp_path / "parts")]) == 0
    assert history.read_text() == whole and len(measured) == 5
    for name in ("best.yaml", "bits_per_byte.json"):
        same = [(tmp_path / folder / name).read_text() for folder in ("whole", "parts")]
        assert same[0] == same[1]
    rows = {r["name"]: r for r in json.loads((tmp_path / "whole/bits_per_byte.json").read_text())}
    assert list(rows) == ["none", "linear", "ntk", "yarn", "searched"]
    assert rows["searched"]["target"] == min(row["target"] for row in rows.values())
    out = capfd.readouterr().out
    assert "rope     2/2 12 candidates, best " in out
    section = yaml.safe_load((tmp_path / "whole" / "best.yaml").read_text())["model"]
    given = out.splitlines()[-1].strip('"')
    scaling = load_config(None, ["model.head_dim=8", given]).model.rope_scaling
    assert scaling.model_dump(mode="json") == section["rope_scaling"]
    assert (scaling.factor, scaling.original_context) == (3.0, T)
    space = RopeSpace(4, 100_000.0, 3.0, T)
    assert space.holds(RopeCandidate(scaling.long_factor, scaling.attention_factor))
    assert main([*words, "--out", str(tmp_path / "parts"), "--seed", "1"]) == 2
    assert "belongs to another search" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ([], ["--length", "32"], "--length 32: it must be longer than the model's context of 32"),
        (["model.position_embedding=learned"], [], "this model has learned positions"),
        (["model.rope_scaling={name: linear, factor: 2}"], [], "is already linear"),
        ([], ["--length", "9000000"], "no document of the validation text has 9000000 tokens"),
    ],
    ids=["short", "learned", "stretched", "text"],
)
def test_a_search_that_cannot_be_is_one_line(tmp_path, capfd, model, more, message):
    folder = random_run(tmp_path, byte_model(T, *model))
    assert main([str(folder), *FEW, *more]) == 2
    err = capfd.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("rope_*"))


@pytest.mark.slow
def test_of_a_trained_model_the_search_finds_fewer_bits_than_its_seeds(
    tmp_path, capfd, monkeypatch
):
    """Of 8 pairs of channels and four times the context."""
    devices = jax.devices()[:1]  # a step of eight takes longer
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    fields = {"data__tokenizer": "{name: bytes}", "model__depth": 1, "model__head_dim": 16}
    fields |= {"train__steps": 100, "train__batch_size": 16, "train__device_batch_size": 16}
    given = run_overrides(tmp_path, **fields, **FEW_PARTS)
    given = [one for one in given if not one.startswith("data.tokenizer.vocab_size")]
    result = train(load_config(None, given))
    words = [str(result.directory), "--length", "128", "--rows", "8", "--population", "16"]
    assert main([*words, "--generations", "5"]) == 0
    written = result.directory / "rope_128" / "bits_per_byte.json"
    rows = {row["name"]: row for row in json.loads(written.read_text())}
    known = min(rows[name]["target"] for name in ("none", "linear", "ntk", "yarn"))
    assert rows["searched"]["target"] < known
    out = capfd.readouterr().out
    first = [one for one in out.splitlines() if one.startswith("rope ")]
    bits = [float(line.split("best ")[1].split()[0]) for line in first]
    assert bits == sorted(bits, reverse=True) and bits[-1] < bits[0]
