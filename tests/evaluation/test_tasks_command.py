"""In-context tasks: the command, tasks of one's own, and the benchmark."""

import json
import shutil

import jax
import numpy as np
import pytest
import yaml
from task_cases import FIELDS, LM, MC, SCHEMA, TASKS, T

from benchmarks import tasks as bench
from jaxtrain import data
from jaxtrain.data.evaluation.prompts import questions
from jaxtrain.data.evaluation.tasks import Bundle, Rules, Task, read_examples
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.evaluation import evaluate, tasks
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.runs.report_data import tasks_section
from jaxtrain.settings import UserError


@pytest.mark.slow
def test_the_command_saves_and_takes_up_what_is_there(model, bundle, capsys, monkeypatch):
    run = model.tokenizer_dir.parent
    command = [str(run), "--tasks", "core", "--bundle", str(bundle), "--limit", "5"]
    assert evaluate.main(command) == 0
    shown = capsys.readouterr()
    assert "CORE" in shown.out and "sums" in shown.err
    first = json.loads((run / "tasks.json").read_text())
    assert set(first["tasks"]) == set(TASKS) and "core" in first
    assert f"<td>{first['core']:.4f}</td>" in tasks_section(run)

    asked = []
    answer = tasks.answer_all
    monkeypatch.setattr(
        tasks, "answer_all", lambda s, t, todo, b: asked.append(todo) or answer(s, t, todo, b)
    )
    assert evaluate.main(command) == 0
    assert not asked, "all is known"
    (bundle / "eval_data" / "words.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LM[1:]))
    assert evaluate.main([*command, "eval.batch_size=16"]) == 0
    assert [loaded.task.label for loaded in asked.pop()] == ["words"]
    # A limit above a task's examples is none: it goes with others, which were asked without.
    whole = command[:-2]
    assert evaluate.main([*whole, "--limit", "9"]) == 0
    assert "core" in json.loads((run / "tasks.json").read_text())
    asked.clear()
    assert evaluate.main(whole) == 0
    assert [loaded.task.label for loaded in asked.pop()] == ["sums"]
    assert "core" in json.loads((run / "tasks.json").read_text())
    assert evaluate.main([whole[0], "--tasks", "words", *command[3:]]) == 0
    assert "core" not in json.loads((run / "tasks.json").read_text())
    other = model._replace(params=jax.tree.map(lambda x: x + 1, model.params))
    assert tasks.previous_results(run / "tasks.json", tasks.identity(other, model.config)) == {}
    assert len(tasks.previous_results(run / "tasks.json", tasks.identity(model, model.config))) == 3


def test_another_step_has_a_file_of_its_own(model, bundle, monkeypatch):
    run = model.tokenizer_dir.parent
    monkeypatch.setattr(evaluate, "load_saved", lambda *_: model)
    more = ["--tasks", "falls", "--bundle", str(bundle), "--limit", "2", "--step", "30"]
    assert evaluate.main([str(run), *more]) == 0
    assert json.loads((run / "tasks_step_000030.json").read_text())["tasks"]["falls"]["of"] == 9


def test_a_model_without_numbers_has_no_accuracy(model, bundle):
    asked = Bundle(bundle)
    loaded = asked.load(*asked.find(["words"])[0], Rules(2))
    found = scores(make_scorer(model, model.config, 2), [questions(loaded, byte_tokenizer(), T)])
    found = next(iter(found))
    assert tasks.is_correct(loaded, found).shape == (2,)
    with pytest.raises(UserError, match="words: the model's log-likelihoods are not finite"):
        tasks.is_correct(loaded, found._replace(nll=found.nll * np.nan))


def test_an_archive_and_a_rebuilt_file_will_do(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    file = bundle / "eval_data" / "sums.jsonl"
    file.rename(file.with_name("sums_10_rebuilt.jsonl"))
    archive = shutil.make_archive(str(tmp_path / "core_eval"), "xztar", tmp_path, "bundle")
    monkeypatch.setenv("JAXTRAIN_CORE", archive)
    for _ in range(2):
        found = data.open_bundle()
        task, folder = found.find(["sums"])[0]
        assert found.load(task, folder).file.name == "sums_10_rebuilt.jsonl"
    assert len(list((tmp_path / "cache" / "tasks").iterdir())) == 1


def write_task(bundle, **changes):
    entry = {"label": "mine", "dataset_uri": "sums.jsonl", "num_fewshot": [1]}
    entry |= {"icl_task_type": "multiple_choice"} | changes
    path = bundle / "mine.yaml"
    path.write_text(yaml.safe_dump({"icl_tasks": [entry]}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "mine has no random baseline: give its entry `random_baseline: PERCENT`"),
        ({"icl_task_type": "essay"}, "mine.yaml: Task icl_task_type: input should be"),
        ({"num_fewshot": [14], "random_baseline": 0}, "mine shows 14 examples .* has 14 in all"),
        ({"dataset_uri": "no.jsonl"}, "mine: there is no file .*no.jsonl"),
    ],
)
def test_a_task_of_ones_own_is_checked(bundle, changes, message):
    found = Bundle(bundle)
    with pytest.raises(UserError, match=message):
        found.load(*found.find([write_task(bundle, **changes)])[0])


def test_a_task_of_ones_own_needs_no_bundle(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    path = write_task(bundle, random_baseline=25)
    found = data.open_bundle(None, [path])
    loaded = found.load(*found.find([path])[0])
    assert loaded.chance == 0.25 and loaded.asked == len(MC)


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("multiple_choice", '{"query": "a"', "x.jsonl:2 is not valid JSON"),
        ("multiple_choice", "3", "x.jsonl:2: query is missing or wrong; a multiple_choice"),
        ("multiple_choice", '{"query": "a", "choices": [], "gold": 0}', "2: choices is missing"),
        ("multiple_choice", '{"query": "a", "choices": ["b"], "gold": 1}', "2: gold is 1, but"),
        ("schema", '{"context_options": [1], "continuation": "", "gold": 0}', "not a text"),
        ("language_modeling", '{"context": "a", "continuation": " "}', "continuation is empty"),
    ],
)
def test_a_broken_line_is_named(tmp_path, kind, line, message):
    good = {"multiple_choice": MC, "schema": SCHEMA, "language_modeling": LM}[kind][0]
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(good)}\n{line}\n")
    task = Task(label="x", dataset_uri="x.jsonl", num_fewshot=(0,), icl_task_type=kind)
    with pytest.raises(UserError, match=message):
        read_examples(tmp_path / "x.jsonl", task)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "sum"], "no task sum; did you mean sums?"),
        (["--tasks", "sums", "--limit", "0"], "--limit: got '0', must be a whole number from 1"),
        (["--tasks", "no.yaml"], "cannot read no.yaml: No such file"),
        (["--tasks", "core", "--bundle", "nowhere"], "there is no evaluation bundle at nowhere"),
    ],
)
def test_the_command_refuses(model, bundle, capsys, arguments, message):
    run = str(model.tokenizer_dir.parent)
    assert evaluate.main([run, "--bundle", str(bundle), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_counts_both_ways(monkeypatch):
    two = {name: bench.CORE[name]._replace(examples=8) for name in ("copa", "lambada_openai")}
    monkeypatch.setattr(bench, "CORE", two | {"long": bench.Shape(8, 2, 60, 2)})
    overrides = [x for x in FIELDS if "tokenizer" not in x] + ["data.tokenizer.vocab_size=300"]
    *_, record = bench.bench_tasks("quickstart", [*overrides, "train.steps=100"])
    packed, alone = record["rows"]
    ratio = alone["seconds"] / packed["seconds"]
    assert packed["speedup"] / alone["speedup"] == pytest.approx(ratio)
    assert min(packed["speedup"], alone["speedup"]) == 1 and packed["examples_per_s"] > 0


def test_the_peers_seconds_are_those_of_all_examples(monkeypatch):
    asked = []

    def rows_of(script, depth, *sizes, needs):
        asked.append((script, depth, *sizes))
        return ({"size": size, "ms": 2.0 * len(size)} for size in sizes[:most])

    w, most = bench.load_workload("gpt_d12"), None
    shapes = {"a": bench.Shape(10, 4, 100, 5), "b": bench.Shape(3, 1, 2047, 9)}
    monkeypatch.setattr(bench, "CORE", shapes | {"c": shapes["a"]._replace(examples=5)})
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "rows_of", rows_of)
    seconds = bench.peer_seconds(w)
    script, *sizes = asked[0]
    assert script == "peer_tasks.py"
    assert sizes == ["12", "4x105", "1x2048"], "each size once, none above the context"
    assert seconds == pytest.approx((15 * 2 * len("4x105") + 3 * 2 * len("1x2048")) / 1e3)
    most = 1
    assert bench.peer_seconds(w) is None, "a peer that ended early has no figure"
