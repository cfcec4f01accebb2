"""In-context tasks: what is asked, that packing changes no number, and the command."""

import importlib
import importlib.machinery
import json
import random
import shutil
import sys
import types
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from tiny import random_run

from benchmarks import tasks as bench
from jaxtrain import data
from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import pack_branches
from jaxtrain.data.evaluation.prompts import questions
from jaxtrain.data.evaluation.tasks import Bundle, Rules, Task, read_examples
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.evaluation import evaluate, tasks
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.runs.report_tasks import tasks_section
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

T = 96  # the context, in bytes
FIELDS = [
    "model.depth=2", "model.width=32", "model.head_dim=8", "model.kv_heads=2", "model.hidden=48",
    "model.window_pattern=SL", "model.short_window=7", "model.attention_softcap=20",
    f"train.sequence_length={T}", "train.batch_size=8", "train.device_batch_size=1",
    "train.steps=1", "data.tokenizer.name=bytes",
]  # fmt: skip
MC = [
    {"query": f"{n} and {n} make", "choices": [str(2 * n), "many", str(n)], "gold": n % 3}
    for n in range(14)
]
SCHEMA = [
    {"context_options": [f"He saw {a}", f"He saw the {b}"], "continuation": "fall.", "gold": 1}
    for a, b in zip("abcdefghi", "ihgfedcba")
]
LM = [{"context": f"The word after {w} is ", "continuation": w * 3} for w in "abcdefgh"]
TASKS = {
    "sums": ("multiple_choice", MC, 4, {"continuation_delimiter": "\nAnswer: "}, 33.3),
    "falls": ("schema", SCHEMA, 0, {}, 50),
    "words": ("language_modeling", LM, 1, {}, 0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run directory's content with a random model of bytes."""
    return load_saved(random_run(tmp_path_factory.mktemp("run"), FIELDS))


@pytest.fixture
def bundle(tmp_path):
    """A bundle of three small tasks, one of each kind."""
    folder = tmp_path / "bundle"
    (folder / "eval_data").mkdir(parents=True)
    entries, lines = [], ["Eval Task,Task Category,Random baseline"]
    for label, (kind, examples, shots, more, chance) in TASKS.items():
        uri = f"{label}.jsonl"
        text = "".join(json.dumps(example) + "\n" for example in examples)
        (folder / "eval_data" / uri).write_text(text)
        entry = {"label": label, "dataset_uri": uri, "num_fewshot": [shots]}
        entries.append(entry | {"icl_task_type": kind} | more)
        lines.append(f"{label},anything,{chance}")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def alone(model):
    """tokens -> log-probabilities [T, V] of what follows each, one plain text at a time."""

    @jax.jit
    def logits(params, tokens_1T):
        merged = nnx.merge(model.graphdef, params)
        if tokens_1T.shape[1] > T:  # nanochat's full layers look back as far as in training
            merged.plan = tuple(replace(spec, window=spec.window or T) for spec in merged.plan)
        return jax.nn.log_softmax(merged.logits(merged(tokens_1T).states[0]))

    def run(tokens):
        padded = np.zeros((1, -(-len(tokens) // T) * T), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(logits(model.params, jnp.asarray(padded)))

    return run


def judged(alone, scored):
    """(nll, greedy, tokens) of one sequence, from its text alone."""
    log_TV = alone(scored.tokens[:-1])[scored.start - 1 : len(scored.tokens) - 1]
    labels = scored.tokens[scored.start :]
    nll = -log_TV[np.arange(len(labels)), labels].sum()
    return nll, (log_TV.argmax(-1) == labels).all(), len(labels)


# ---- numbers -----------------------------------------------------------------------------------


def sequence(generator, length):
    return generator.integers(0, 256, length).astype(np.int32)


def hard_questions(alone):
    """Long and short, shared and not, cropped and greedy."""
    generator = np.random.default_rng(0)
    some = lambda low, high: sequence(generator, generator.integers(low, high))
    for shared in (80, 60, 40, 3):  # the last is not worth sharing
        start = sequence(generator, shared)
        ends = [np.concatenate([start, some(1, 6)]) for _ in range(3)]
        yield [Scored(tokens, shared) for tokens in ends]
    start = sequence(generator, T - 1)  # answers of one token
    yield [Scored(np.append(start, np.int32(letter)), T - 1) for letter in (65, 66, 67)]
    yield [Scored(ends[0], 1), Scored(ends[0], 2), Scored(ends[0][:-1], 1)]  # one begins another
    yield [Scored(some(T + 1, T + 2), 1)]
    for begin in (some(5, 9), some(40, 60)):
        tokens = begin
        for _ in range(3):
            tokens = np.append(tokens, np.int32(alone(tokens)[len(tokens) - 1].argmax()))
        yield [Scored(tokens, len(begin)), Scored(np.append(tokens, np.int32(7)), len(begin))]
    for length in (T + 2, 2 * T):  # longer than the context
        yield [Scored(sequence(generator, length), length - 20)]
    start = sequence(generator, 3 * T)
    yield [Scored(np.append(start, np.int32([letter, 9, 9])), 3 * T) for letter in (65, 66)]
    for _ in range(30):
        yield [Scored(some(2, 50), 1)]


def test_packed_scores_are_those_of_each_sequence_alone(model, alone):
    asked = list(hard_questions(alone))
    scorer = make_scorer(model, model.config)
    widths = {rows.parents_BR.shape[1] for rows, _ in pack_branches(asked, scorer.shape)}
    assert scorer.shape.branch in widths, "no row has branches"
    plain = [[q[0]] for q in asked]
    found, again = scores(scorer, [asked, plain])
    assert found.sizes == [len(question) for question in asked]
    first = np.cumsum([0, *found.sizes[:-1]])
    np.testing.assert_allclose(found.nll[first], again.nll, rtol=2e-5)
    expected = [judged(alone, scored) for question in asked for scored in question]
    nll, greedy, tokens = map(np.array, zip(*expected))
    np.testing.assert_allclose(found.nll, nll, rtol=2e-5)
    np.testing.assert_array_equal(found.greedy, greedy)
    np.testing.assert_array_equal(found.tokens, tokens)
    assert greedy.sum() >= 2


# ---- prompts -----------------------------------------------------------------------------------


def plain_prompts(task, examples, index):
    """nanochat's prompts, written out."""
    shots = []
    if task.num_fewshot[0]:
        others = [i for i in range(len(examples)) if i != index]
        drawn = random.Random(1234 + index).sample(others, task.num_fewshot[0])
        shots = [examples[i] for i in drawn]
    between, asked = task.continuation_delimiter, examples[index]
    if task.icl_task_type == "multiple_choice":
        head = "".join(f"{s['query']}{between}{s['choices'][s['gold']]}\n\n" for s in shots)
        return [head + asked["query"] + between + choice for choice in asked["choices"]]
    if task.icl_task_type == "schema":
        return [f"{c}{between}{asked['continuation']}" for c in asked["context_options"]]
    head = "".join(f"{s['context'].strip()}{between}{s['continuation']}\n\n" for s in shots)
    text = head + asked["context"].strip() + between
    return [text.strip(), text + asked["continuation"]]


def plain_answer(task, examples, index, alone, crop):
    """Whether nanochat would call the model's answer right."""
    texts = [np.array([256, *t.encode()], np.int32) for t in plain_prompts(task, examples, index)]
    kind, short = task.icl_task_type, min(map(len, texts))
    if kind == "language_modeling":
        starts, texts = [len(texts[0])], texts[1:]
    elif kind == "multiple_choice":
        starts = [next(i for i in range(short) if len({t[i] for t in texts}) > 1)] * len(texts)
    else:
        same = next(i for i in range(1, short) if len({t[-i] for t in texts}) > 1) - 1
        starts = [len(t) - same for t in texts]
    lost = [max(0, len(t) - T) if crop else 0 for t in texts]
    cropped = [Scored(t[n:], s - n) for t, n, s in zip(texts, lost, starts)]
    found = [judged(alone, scored) for scored in cropped]
    if kind == "language_modeling":
        return bool(found[0][1])
    return int(np.argmin([nll / tokens for nll, _, tokens in found])) == examples[index]["gold"]


@pytest.mark.parametrize("crop", [False, True])
def test_tasks_answer_as_one_example_at_a_time(model, alone, bundle, tmp_path, crop):
    asked, rules = Bundle(bundle), Rules(crop=crop)
    result = tasks.run_tasks(model, model.config, asked, ["core"], tmp_path / "tasks.json", rules)
    longest = 0
    for label, (_, examples, _, _, chance) in TASKS.items():
        task = asked.core[label]
        shuffled = list(examples)
        random.Random(1337).shuffle(shuffled)
        longest = max(longest, *(len(p) for p in plain_prompts(task, shuffled, 0)))
        right = [plain_answer(task, shuffled, i, alone, crop) for i in range(len(shuffled))]
        entry = result["tasks"][label]
        assert entry["accuracy"] == np.mean(right) and entry["examples"] == len(examples)
        expected = (entry["accuracy"] - chance / 100) / (1 - chance / 100)
        assert entry["centered"] == pytest.approx(expected)
    assert longest > T, "no prompt is longer than the context"
    assert result["core"] == np.mean([r["centered"] for r in result["tasks"].values()])


@pytest.mark.parametrize("label", TASKS)
@pytest.mark.parametrize("limit", [None, 6])
def test_shots_are_drawn_from_what_is_asked_as_nanochat_does(bundle, label, limit):
    asked = Bundle(bundle)
    loaded = asked.load(*asked.find([label])[0], Rules(limit))
    shuffled = list(TASKS[label][1])
    random.Random(1337).shuffle(shuffled)
    few = shuffled[:limit]
    found = list(questions(loaded, byte_tokenizer(), T))
    assert len(found) == len(few)
    for index, question in enumerate(found):
        texts = plain_prompts(loaded.task, few, index)[-len(question) :]
        for scored, text in zip(question, texts, strict=True):
            assert scored.tokens.tolist() == [256, *text.encode()], "nothing is cut"


def test_shots_from_all_examples_ask_the_first_of_the_same_questions(bundle):
    asked, tokenizer = Bundle(bundle), byte_tokenizer()
    task, folder = asked.find(["sums"])[0]
    every = list(questions(asked.load(task, folder), tokenizer, T))
    few = list(questions(asked.load(task, folder, Rules(3, all_shots=True)), tokenizer, T))
    assert len(few) == 3 and len(every) == len(MC)
    for one, other in zip(few, every):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a.tokens, b.tokens)
    with pytest.raises(UserError, match="sums shows 4 .*--limit leaves 4: raise it, or give --all"):
        asked.load(task, folder, Rules(4))


def test_a_prompt_has_at_most_ten_times_the_context(bundle):
    asked, tokenizer = Bundle(bundle), byte_tokenizer()
    task, folder = asked.find(["sums"])[0]
    longest = max(
        len(s.tokens) for q in questions(asked.load(task, folder), tokenizer, T) for s in q
    )
    list(questions(asked.load(task, folder), tokenizer, -(-longest // 10)))
    with pytest.raises(UserError, match="sums asks for .* more than 10 times the 8 .*--crop keeps"):
        list(questions(asked.load(task, folder), tokenizer, 8))
    short = questions(asked.load(task, folder, Rules(crop=True)), tokenizer, 8)
    assert max(len(scored.tokens) for question in short for scored in question) == 8


def test_long_prompts_look_back_one_context(model):
    """Two layers, of windows 7 and T, and the smear: 3 T tokens before, nothing is seen."""
    tokens = sequence(np.random.default_rng(1), 4 * T)
    scorer = make_scorer(model, model.config)
    far, near = tokens.copy(), tokens.copy()
    far[5], near[-T // 2] = (far[5] + 1) % 256, (near[-T // 2] + 1) % 256
    asked = [[Scored(one, 4 * T - 1)] for one in (tokens, far, near)]
    nll = next(iter(scores(scorer, [asked]))).nll
    assert nll[0] == pytest.approx(nll[1], rel=1e-6) and nll[0] != pytest.approx(nll[2], rel=1e-6)


def test_learned_positions_crop(bundle, tmp_path):
    learned = [*FIELDS, "model.position_embedding=learned"]
    other = load_saved(random_run(tmp_path, learned))
    result = tasks.run_tasks(other, other.config, Bundle(bundle), ["sums"], tmp_path / "t.json")
    assert result["tasks"]["sums"]["crop"] is True


# ---- the command -------------------------------------------------------------------------------


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


# ---- the harness of others -----------------------------------------------------------------------


class Instance(NamedTuple):
    """As lm_eval's, in what we read of it."""

    args: tuple


def test_the_harness_model_answers_as_the_plain_model(model, alone, monkeypatch):
    class LM:  # lm_eval.api.model.LM, in what an adapter inherits
        def __init__(self):
            self._rank, self._world_size = 0, 1

    api = types.ModuleType("lm_eval.api.model")
    api.__dict__.update(LM=LM)
    package = types.ModuleType("lm_eval")
    package.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
    modules = {"lm_eval": package, "lm_eval.api": package, "lm_eval.api.model": api}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jaxtrain.evaluation.lm_eval", raising=False)
    harness = importlib.import_module("jaxtrain.evaluation.lm_eval")
    del sys.modules["jaxtrain.evaluation.lm_eval"]
    lm = harness.HarnessModel(model)
    assert isinstance(lm, LM) and lm._world_size == 1

    long = "A text that is longer than the context, " * 5
    pairs = [("Two and two make ", "four"), ("Two and two make ", "five"), ("", "b"), (long, "so")]
    found = lm.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found):
        tokens = np.array([256, *(context + continuation).encode()], np.int32)
        answer = len(continuation) + len(context) - len(context.rstrip())
        lost = max(0, len(tokens) - T - 1)
        nll, likeliest, _ = judged(alone, Scored(tokens[lost:], len(tokens) - lost - answer))
        assert value == pytest.approx(-nll, rel=2e-5) and greedy == likeliest

    tokens = np.array([256, *long.encode()], np.int32)
    windows = [(1, 1 + T), (1 + T, 1 + 2 * T), (1 + 2 * T, len(tokens))]
    total = 0.0
    for begin, end in windows:
        first = max(0, end - T - 1)
        total -= judged(alone, Scored(tokens[first:end], begin - first))[0]
    rolled = lm.loglikelihood_rolling([Instance((long,)), Instance(("ab",))])
    assert rolled[0] == pytest.approx(total, rel=2e-5) and len(rolled) == 2

    greedy = [256, *b"Say: "]
    for _ in range(6):
        greedy.append(int(alone(np.array(greedy, np.int32))[len(greedy) - 1].argmax()))
    text = bytes(t for t in greedy[6:] if t < 256).decode(errors="replace")
    settings = {"until": [], "max_gen_toks": 6}
    cut = {"until": [text[2:4]], "max_gen_toks": 6}
    asked = [Instance(("Say: ", settings)), Instance(("Say: ", cut)), Instance((long, settings))]
    assert lm.generate_until(asked)[:2] == [text, text.split(text[2:4])[0]]


def test_the_harness_is_named_when_it_is_missing(model, capsys):
    harness = importlib.import_module("jaxtrain.evaluation.lm_eval")
    if harness.INSTALLED:
        pytest.skip("it is installed")
    assert harness.main([str(model.tokenizer_dir.parent), "--tasks", "mmlu"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err
