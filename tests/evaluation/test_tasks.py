"""In-context tasks: what is asked, and that packing changes no number."""

import json
import random
import threading

import jax
import numpy as np
import pytest
from task_cases import FIELDS, MC, TASKS, T, score_alone
from tiny import FEW_PARTS, assignments, byte_model, mesh_of, random_run

from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import RowShape, expected_shapes, pack_branches
from jaxtrain.data.evaluation.prompts import examples_of_all_lengths, questions
from jaxtrain.data.evaluation.tasks import Bundle, Rules
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.evaluation import log_likelihood, tasks
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

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


@pytest.mark.slow
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
    expected = [score_alone(alone, scored) for question in asked for scored in question]
    nll, greedy, tokens = map(np.array, zip(*expected))
    np.testing.assert_allclose(found.nll, nll, rtol=2e-5)
    np.testing.assert_array_equal(found.greedy, greedy)
    np.testing.assert_array_equal(found.tokens, tokens)
    assert greedy.sum() >= 2


def test_programs_compile_in_threads_and_what_is_ready_is_scored_first(tmp_path, monkeypatch):
    """The first job's program comes last; its numbers still come first, and they are those of
    programs that are compiled one by one, when they are called."""
    monkeypatch.setattr(log_likelihood, "make_mesh", lambda config: mesh_of())
    fields = [*byte_model(T), *assignments(**FEW_PARTS), "model.depth=1"]
    model = load_saved(random_run(tmp_path / "run", fields))
    generator = np.random.default_rng(3)
    start = sequence(generator, 80)
    ends = [Scored(np.append(start, sequence(generator, 2 + n)), 80) for n in range(3)]
    jobs = [[[Scored(sequence(generator, 3 * T), 9)]], [ends], [[Scored(start, 7)]]]

    one_by_one = make_scorer(model, model.config)
    monkeypatch.setattr(one_by_one, "compile", lambda shapes: [])
    expected = list(scores(one_by_one, jobs))

    scorer, gate, events = make_scorer(model, model.config), threading.Event(), []
    lower, score = scorer.lower, scorer.score

    class Gated(jax.stages.Lowered):
        def __init__(self, shape):
            self.shape, self.lowered = shape, lower(shape)

        def compile(self, **_):
            assert self.shape.trunk == T or gate.wait(60), "the others were not scored meanwhile"
            self.lowered.compile()
            events.append(("compiled", self.shape))

    def noted(rows):
        shape = scorer.shape_of(rows)
        events.append(("scored", shape))
        if sum(kind == "scored" for kind, _ in events) == 2:
            gate.set()
        return score(rows)

    monkeypatch.setattr(scorer, "lower", Gated)
    monkeypatch.setattr(scorer, "score", noted)
    here, compiling = threading.current_thread(), []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compiling.append(threading.current_thread() is here)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = list(scores(scorer, jobs))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    shapes = [shape for kind, shape in events if kind == "scored"]
    assert [shape.trunk for shape in shapes] == [T, T, 4 * T] and len(set(shapes)) == 3
    for shape in shapes:
        assert events.index(("compiled", shape)) < events.index(("scored", shape))
    assert compiling and not any(compiling), "none is compiled when it is called"
    for one, other in zip(found, expected, strict=True):
        for x, y in zip(one, other):
            np.testing.assert_array_equal(x, y)


def test_some_examples_tell_the_shapes_of_all(model, bundle):
    """In the order of their use; a long text among short ones is found, and one with branches."""
    asked, tokenizer, shape = Bundle(bundle), byte_tokenizer(), RowShape(2, T, T // 4)
    examples = [{"context": "a" * 9, "continuation": "b"} for _ in range(200)]
    examples[77]["context"] = "\u00e4" * (T // 2 + 9)  # few letters, many bytes
    lines = "".join(json.dumps(x) + "\n" for x in examples)
    (bundle / "eval_data" / "words.jsonl").write_text(lines)
    for label in TASKS:
        loaded = asked.load(*asked.find([label])[0])
        some = examples_of_all_lengths(loaded)
        assert len(some) <= 32 and max(some) < loaded.asked
        every = list(questions(loaded, tokenizer, T))
        expected = expected_shapes(every, shape)
        assert set(expected_shapes([every[i] for i in some], shape)) == set(expected)
        if label == "words":
            assert {one.trunk for one in expected} == {T, 2 * T}
        made = {
            (x.tokens_BT.shape[1], x.parents_BR.shape[1]) for x, _ in pack_branches(every, shape)
        }
        assert made == {(one.trunk + one.branch, one.branch) for one in expected}


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
    found = [score_alone(alone, scored) for scored in cropped]
    if kind == "language_modeling":
        return bool(found[0][1])
    return int(np.argmin([nll / tokens for nll, _, tokens in found])) == examples[index]["gold"]


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.quick("True")
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
    with pytest.raises(
        UserError, match="sums has a prompt of .* more than 10 times the 8 .*--crop keeps"
    ):
        list(questions(asked.load(task, folder), tokenizer, 8))
    short = questions(asked.load(task, folder, Rules(crop=True)), tokenizer, 8)
    assert max(len(scored.tokens) for question in short for scored in question) == 8


@pytest.mark.slow
def test_long_prompts_look_back_one_context(model):
    """Two layers, of windows 7 and T, and the smear: 3 T tokens before, nothing is seen."""
    tokens = sequence(np.random.default_rng(1), 4 * T)
    scorer = make_scorer(model, model.config)
    far, near = tokens.copy(), tokens.copy()
    far[5], near[-T // 2] = (far[5] + 1) % 256, (near[-T // 2] + 1) % 256
    asked = [[Scored(one, 4 * T - 1)] for one in (tokens, far, near)]
    nll = next(iter(scores(scorer, [asked]))).nll
    assert nll[0] == pytest.approx(nll[1], rel=1e-6) and nll[0] != pytest.approx(nll[2], rel=1e-6)


@pytest.mark.slow
def test_learned_positions_crop(bundle, tmp_path):
    learned = [*FIELDS, "model.position_embedding=learned"]
    other = load_saved(random_run(tmp_path, learned))
    result = tasks.run_tasks(other, other.config, Bundle(bundle), ["sums"], tmp_path / "t.json")
    assert result["tasks"]["sums"]["crop"] is True
