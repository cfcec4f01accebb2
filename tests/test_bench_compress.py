"""The bench of methods of compression: its rows, rates, records and page."""

import importlib
import json
import os
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import QUICK, build, byte_model, random_run, run_overrides

from benchmarks import compress, compress_recipes, compress_runs, decode_rate
from benchmarks.compress import BENCH, Asked, jobs_of, make_page, record_of
from benchmarks.compress_runs import PATTERN, PLAIN, Job, Outcome, Texts, run_job
from benchmarks.importing import SHAPES
from jaxtrain.cli import COMMANDS
from jaxtrain.compress.methods import METHODS
from jaxtrain.config import find_config, load_config
from jaxtrain.model import Prefill
from jaxtrain.settings import UserError
from jaxtrain.weights.stored import STORED

main = importlib.import_module("benchmarks.__main__").main
ENVIRONMENT = {"device_kind": "cpu", "versions": {}, "python": "3.12", "backend": "cpu",
               "commit": "abc", "when": "2026-01-01", "cpu_count": 2}  # fmt: skip
FIGURES = {"bpb": 1.5, "disk_bytes": 4096, "memory_bytes": 2048, "dtype": "float32",
           "tokens_per_s_1": 10.4, "tokens_per_s_32": 1234.5}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "plain"
    return random_run(folder, byte_model(32, "run.name=tiny", "data.train.path=tinyshakespeare"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("To be, or not to be, that is the question.\n" * 10)
    return file


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch):
    monkeypatch.setattr(decode_rate, "REPEATS", 1)
    monkeypatch.setattr(compress_runs, "start", lambda quiet: None)


@pytest.mark.slow
def test_steps_are_those_of_the_whole_text():
    _, graphdef, _, params = build()
    whole, lengths = nnx.merge(graphdef, params), jnp.full(2, 24, jnp.int32)
    tokens = jnp.pad(jnp.ones((2, 24), jnp.int32), ((0, 0), (0, 9)))
    best = jax.jit(lambda tokens, at: whole.logits(whole(tokens).states[:, at]).argmax(-1))
    for at in range(24, 33):
        tokens = tokens.at[:, at].set(best(tokens, at - 1))
    _, _, cache = whole(tokens[:, :24], mode=Prefill(lengths, 128))
    last = decode_rate.decode_steps(graphdef, params, tokens[:, 24], cache, jnp.int32(8))
    np.testing.assert_array_equal(last, tokens[:, 32])


def test_a_rate_is_of_all_rows_and_of_the_steps_between(monkeypatch):
    _, graphdef, _, params = build()
    clock = iter([0.0, 3.0, 0.0, 1.0])  # MANY steps take 3 s, FEW 1 s
    monkeypatch.setattr(decode_rate.time, "perf_counter", lambda: next(clock))
    rate = decode_rate.decode_rate(graphdef, params, 4)
    assert rate == pytest.approx(4 * (decode_rate.MANY - decode_rate.FEW) / 2)


@pytest.mark.parametrize("method", [None, "gptq", PATTERN])
@pytest.mark.slow
def test_a_row_of_a_saved_model(run, text, method):
    texts = Texts(text, text, 4)
    figures = run_job(Job("x", str(run), method, texts=texts)).figures
    weights = run / "model" / "model.safetensors"
    assert (figures["disk_bytes"] < weights.stat().st_size) == (method not in (None, PATTERN))
    assert 0 < figures["bpb"] < 100 and figures["dtype"] == "float32"
    assert figures["tokens_per_s_1"] > 0 and figures["tokens_per_s_32"] > 0


@pytest.mark.parametrize("method", [None, "int4"])
@pytest.mark.slow
def test_a_row_of_a_shape(method):
    plain = 4 * 2 * 3 * 64 * 128  # bytes of the feed-forward networks alone
    figures = run_job(Job("x", "tiny", method, shape=True)).figures
    assert "bpb" not in figures and figures["tokens_per_s_1"] > 0
    embeddings = 4 * 2 * SHAPES["tiny"]["vocab_size"] * 64
    assert (figures["memory_bytes"] > embeddings + plain) == (method is None)


def test_each_method_is_a_row_and_each_form_of_a_shape(run):
    jobs = jobs_of(str(run), Asked([str(run)], [f"qat={run}"], core=5))
    assert [job.label for job in jobs] == [PLAIN, *METHODS, PATTERN, "qat"]
    assert [job.method for job in jobs] == [None, *METHODS, PATTERN, None]
    assert {job.core for job in jobs} == {5}
    some = jobs_of(str(run), Asked([str(run)], [f"qat={run}"], only=["qat", "int4"]))
    assert [job.label for job in some] == ["int4", "qat"]
    shape = jobs_of("tiny", Asked([]), shape=True)
    assert [job.label for job in shape] == [PLAIN, *(x for x in METHODS if x in STORED)]


def test_a_failed_row_is_recorded_beside_the_others(run, tmp_path, monkeypatch, capsys):
    def one(job, gpu=None):
        if job.method == "gptq":
            return Outcome({}, {}, "UserError: no")
        return Outcome(FIGURES | {"seconds": 1.0}, ENVIRONMENT)

    monkeypatch.setattr(compress_runs, "in_own_process", one)
    assert main(["compress", str(run), "--record", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == f"{BENCH}-tiny-cpu.json"
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == [PLAIN, *METHODS, PATTERN]
    assert rows["gptq"] == {"name": "gptq", "error": "UserError: no"}
    assert rows["int8"]["bpb"] == 1.5
    assert "gptq: failed: UserError: no" in capsys.readouterr().out
    page = make_page(tmp_path / "page.md", tmp_path).read_text()
    assert "## tiny, 2 CPU cores" in page
    assert "| none, float32 | 1.5000 | 4.0 KiB | 2.0 KiB | 10 | 1,234 |" in page
    assert "| gptq | UserError: no | - | - | - | - |" in page


def test_each_gpu_measures_one_row_at_a_time(monkeypatch):
    busy, most, both = set(), [], threading.Barrier(2, timeout=10)

    def one(job, gpu=None):
        assert gpu not in busy
        busy.add(gpu)
        most.append(len(busy))
        both.wait()
        busy.discard(gpu)
        return Outcome({"gpu": gpu}, {})

    monkeypatch.setattr(compress_runs, "in_own_process", one)
    jobs = [Job(str(i), "x") for i in range(6)]
    found = list(compress_runs.run_all(jobs, 2))
    assert [job for job, _ in found] == jobs and max(most) == 2
    assert {outcome.figures["gpu"] for _, outcome in found} == {0, 1}


@pytest.mark.parametrize("seen, gpu, left", [(None, 1, "1"), ("4,5", 1, "5"), ("4", 1, "")])
def test_a_row_sees_its_own_gpu_alone(monkeypatch, seen, gpu, left):
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    compress_runs.see_only(gpu)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_a_shape_has_no_column_of_losses():
    figures = {k: v for k, v in FIGURES.items() if k not in ("bpb", "disk_bytes")}
    outcomes = [(Job(PLAIN, "tiny", shape=True), Outcome(figures, ENVIRONMENT))]
    lines = compress.section(record_of("tiny", outcomes, Asked([])), "x.json")
    assert "| method | in memory | tokens/s, batch 1 | batch 32 |" in lines
    assert "Bits per byte" not in lines


def test_the_page_is_made_of_the_records(tmp_path):
    made = make_page(tmp_path / "compression.md").read_text()
    assert made == compress.PAGE.read_text(), "python -m benchmarks compress"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--shape huge", "there is no shape huge; there are llama_8b, tiny"),
        ("RUN --also x", "--also x: it has to be LABEL=FOLDER"),
        ("--shape tiny --also x=RUN", "--also goes with one RUN"),
        ("RUN --text no.txt", "no.txt is no file"),
        ("no/run", "no/run"),
        ("RUN --only int5", "has no row int5. It has: none; int8;"),
    ],
)
def test_what_is_no_model_or_text_is_named(run, capsys, words, said):
    assert main(["compress", *words.replace("RUN", str(run)).split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_fails_is_a_row(tmp_path):
    outcome = compress_runs.in_own_process(Job("x", str(tmp_path)))
    assert outcome.error is not None and outcome.error.startswith("UserError")


# ---- recipes -----------------------------------------------------------------------------------

RECIPES = """
config: tiny
models:
  base: train --config quickstart data.train.path=tinyshakespeare
  int4: quantize <base> --method int4
  other: quantize <base> --method int8
recipes:
  small: [{row: whole, model: base, steps: 9}, {row: int4 after training, model: int4, steps: 9}]
"""


def test_each_command_of_the_recipes_is_one(tmp_path):
    """Fields are looked up, but for those that need the folders of other models."""
    found = compress_recipes.read_recipes()
    used = compress_recipes.needed(
        [r.model for rows in found.recipes.values() for r in rows], found
    )
    assert used == found.models.keys(), "a model that no table shows"
    for name in found.models:
        command, *words = compress_recipes.command_of(name, found, tmp_path)
        assert command in COMMANDS
        fields = [word for word in words if "=" in word and not word.startswith("--")]
        local = [word for word in fields if not word.startswith("train.init_from=")]
        if command == "train":
            begun = "train.init_from=" in str(words)  # whose model section is taken over
            local += ["optim.wrappers=[]", "model.heads=2"] * begun
            load_config(find_config(words[words.index("--config") + 1]), local)


def test_a_model_is_made_once_after_those_that_it_needs(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes.yaml").write_text(RECIPES)
    monkeypatch.setattr(compress_recipes, "FILE", tmp_path / "recipes.yaml")
    found = compress_recipes.read_recipes(tmp_path / "recipes.yaml")
    monkeypatch.setattr(compress_recipes, "read_recipes", lambda: found)
    outcome = Outcome({"bpb": 2.5, "memory_bytes": 2048, "parameters": 1234, "dtype": "float32",
                       "seconds": 1.0}, ENVIRONMENT)  # fmt: skip
    monkeypatch.setattr(compress_recipes, "in_own_process", lambda job: outcome)
    made = []

    def pretend(words, **_):
        out = words[words.index("--out") + 1] if "--out" in words else tmp_path / "work" / "base"
        made.append(words[3])
        file = tmp_path / "work" / str(out) / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_text("")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(compress_recipes.subprocess, "run", pretend)
    words = ["compress", "--recipes", "--folder", str(tmp_path / "work"), "--record", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert made == ["train", "quantize"]  # and not again, as int4 needs base
    assert main([*words, str(tmp_path / "out")]) == 0 and len(made) == 2
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "compress_recipes-tiny-small-cpu.json"
    record = json.loads(file.read_text())
    assert record["workload"]["models"].keys() == {"base", "int4"}
    assert [row["steps"] for row in record["rows"]] == [9, 9]
    page = make_page(tmp_path / "page.md", tmp_path / "out").read_text()
    assert "| int4 after training | 9 | 1,234 | 2.5000 | 2.0 KiB |" in page
    changed = found._replace(models=found.models | {"int4": "quantize <base> --method nf4"})
    with pytest.raises(UserError, match="int4 was made by another command .*; name another --fol"):
        compress_recipes.make_model("int4", changed, tmp_path / "work")
    capsys.readouterr()
    assert main(["compress", "--recipes", "no"]) == 2
    assert "there is no recipe no; there are small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("<base> --method int4", "<none> --method int4", "int4 needs none before it"),
        ("model: int4", "model: int5", "small has no model int5"),
    ],
)
def test_a_recipe_that_names_no_model_is_one_line(tmp_path, before, after, said):
    file = tmp_path / "recipes.yaml"
    file.write_text(RECIPES.replace(before, after))
    with pytest.raises(UserError, match=f"recipes.yaml: {said}"):
        compress_recipes.read_recipes(file)


@pytest.mark.slow
def test_a_recipe_trains_and_is_measured(tmp_path, monkeypatch):
    """The real commands: two steps of a small model, then int4 of it."""
    small = " ".join(run_overrides(tmp_path, train__steps=2, **QUICK))
    small = " ".join(w for w in small.split() if not w.startswith("run."))
    found = compress_recipes.Recipes(
        "tiny",
        {"base": f"train {small}", "int4": "quantize <base> --method int4"},
        {"small": [compress_recipes.Row("int4", "int4", 2)]},
    )
    monkeypatch.setattr(compress_recipes, "read_recipes", lambda: found)
    (record,) = compress_recipes.bench_recipes([], tmp_path / "work")
    (row,) = record["rows"]
    assert 0 < row["bpb"] < 10 and row["parameters"] > 10_000 and "tokens_per_s_1" not in row
    bad = found._replace(models=found.models | {"base": "train model.depht=3"})
    with pytest.raises(UserError, match="the command of base failed: .*depht"):
        compress_recipes.make_model("base", bad, tmp_path / "other")
