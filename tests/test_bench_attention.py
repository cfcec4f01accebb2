"""The attention bench: what it counts, what it checks, and the table that tuning writes."""

import importlib
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.attention import BACKENDS, reference, table, xla
from jaxtrain_kernels.shapes import ATTENTION_BENCH, ATTENTION_SMALL, ATTENTION_TUNE

from benchmarks import attention, timing, tune

main = importlib.import_module("benchmarks.__main__").main
PACKED = next(s for s in ATTENTION_BENCH if s.documents)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(attention, "SMALL_T", 48)
    monkeypatch.setitem(tune.SHORT, "seconds", 0.001)


def recorded(tmp_path, *argv):
    """The JSON that a command line writes."""
    assert main(["attention", *argv, "--record", "--out", str(tmp_path)]) == 0
    return json.loads(next(tmp_path.glob("attention-*.json")).read_text())


def dense_mask(s):
    q, k = np.arange(s.T)[:, None], np.arange(s.T)[None]
    seen = np.ones((s.B, s.T, s.T), bool)
    if s.causal:
        seen &= k <= q
    if s.window is not None:
        seen &= k >= q - s.window
    if s.documents:
        ids = s.segment_ids_BT()
        seen &= (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)
    return seen


@pytest.mark.parametrize("shape", ATTENTION_SMALL, ids=lambda s: s.name)
def test_visible_pairs_and_visited_blocks_count_the_mask(shape):
    seen, side = dense_mask(shape), 16
    assert attention.visible_pairs(shape) == seen[0].sum()
    rest = -shape.T % side
    blocks = np.pad(seen, ((0, 0), (0, rest), (0, rest)))
    n = blocks.shape[1] // side
    visited = blocks.reshape(shape.B, n, side, n, side).any((2, 4))
    assert attention.visited_blocks(shape, side) == visited.sum()


def test_packed_documents_fill_their_rows():
    assert sum(PACKED.documents) == PACKED.T == 8192 and np.mean(PACKED.documents) == 512
    assert len(set(PACKED.documents)) > 8
    ids = jnp.asarray([[1, 1, 2, 2, 2, 3, 0, 0]])
    assert attention.document_starts(ids).tolist() == [[0, 0, 2, 2, 2, 5, 6, 6]]


@pytest.mark.slow
def test_rows_have_rates_and_checked_errors(tmp_path, capsys):
    result = recorded(tmp_path, "xla", PACKED.name, "b16_t2048_gqa_d64")
    rows = result["rows"]
    assert {(row["name"], row["shape"]) for row in rows} == {
        (f"attention_{name}", f"{shape}_small")
        for name in ("forward", "forward_backward")
        for shape in (PACKED.name, "b16_t2048_gqa_d64")
    }
    for row in rows:
        assert row["backend"] == "xla" and row["ms"] > 0
        assert row["tflops_visited"] > row["tflops"] > 0
        assert row["exact"] and 0 <= row["error"] < 1e-5 and row["naive_error"] < 1e-5
    assert "below 2x naive" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_backend_is_found_and_a_failing_one_is_named():
    shape = attention.small_attention(ATTENTION_BENCH[0], 24)
    doubled = lambda s: lambda *a: 1.01 * attention.our_attention("reference")(s)(*a)
    wrap = attention.with_gradients
    wrong = attention.errors(shape, doubled, wrap, jnp.dtype(jnp.float32))
    assert not wrong["exact"] and wrong["error"] == pytest.approx(0.01, rel=0.1)

    def broken(s):
        raise ValueError("no such thing")

    failed = attention.errors(shape, broken, wrap, jnp.dtype(jnp.float32))
    assert not failed["exact"] and failed["why"] == "ValueError: no such thing"


@pytest.mark.slow
def test_unknown_names_are_one_line(capsys):
    assert main(["attention", "b16_t2048"]) == 2
    assert "bench attention has no b16_t2048; it has b16_t2048_d128," in capsys.readouterr().err


def fake_backend():
    """Serves through xla; of its tilings one is wrong, one does not compile, one is fast."""

    def run(q, k, v, call):
        forward, backward = ((call.tiling or {}).get(name) for name in ("forward", "backward"))
        if forward == "broken":
            raise ValueError("does not compile")
        out, lse = reference.attention(q, k, v, call)
        return (out + 0.1 if backward == "wrong" else out), lse

    kinds = [{"forward": "broken"}, {"forward": "fast"}, {"backward": "wrong"}, {"backward": "ok"},
             {"last": "more"}]  # fmt: skip
    return SimpleNamespace(supports=lambda *a: None, attention=run, candidates=lambda shape: kinds)


@pytest.mark.slow
def test_tuning_keeps_the_fastest_right_tiling(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "fake", fake_backend())
    monkeypatch.setattr(table, "read_table", table.read_table.__wrapped__)
    monkeypatch.setattr(table.read_table, "cache_clear", lambda: None, raising=False)
    speed = {"fast": 2.0, "ok": 3.0, "wrong": 4.0, "more": 0.5}
    tried = []
    original, make = tune.rate, tune.our_attention

    def rate(shape, fn, inputs, name, **options):
        figures = original(shape, fn, inputs, name, **options)
        if figures and figures["ms"]:
            figures["tflops"] = 1.0 + sum(speed[kind] for kind in tried[-1].values())
        return figures

    monkeypatch.setattr(tune, "rate", rate)
    monkeypatch.setattr(tune, "our_attention", lambda b, t=None: tried.append(t) or make(b, t))
    result = recorded(tmp_path, "--tune", "fake", ATTENTION_TUNE[0].name)
    (row,) = (r for r in table.read_table(tmp_path / "table.json") if r["device"] == "cpu")
    assert row["backend"] == "fake"
    assert row["tiling"] == {"forward": "fast", "backward": "ok", "last": "more"}
    assert (row["tflops_forward"], row["tflops_forward_backward"]) == (3.0, 6.5)
    assert (row["head_dim"], row["dtype"], row["T"]) == (128, "float32", 64)
    failed = [r["failed"] for r in result["rows"] if "failed" in r]
    assert failed == ["ValueError: does not compile", "error above the bound"]


def test_tuning_writes_what_dispatch_reads(tmp_path):
    recorded(tmp_path, "--tune", "xla", PACKED.name)
    (row,) = (r for r in table.read_table(tmp_path / "table.json") if r["device"] == "cpu")
    assert row["backend"] == "xla" and row["segments"] and row["tflops_forward"] > 0
    assert xla.candidates(ATTENTION_BENCH[0])[0] == {"block": 256}
    assert jax.default_backend() == "cpu"
