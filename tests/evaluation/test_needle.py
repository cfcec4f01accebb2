"""The needle in a haystack: where it lies, and what counts as found."""

import json

import numpy as np
import pytest
from tiny import byte_model, random_run

from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.evaluation import needle
from jaxtrain.evaluation.evaluate import main as evaluate
from jaxtrain.evaluation.log_likelihood import Scores
from jaxtrain.evaluation.needle import CHOICES, DEPTHS, FACT, haystack, haystacks, lengths_of
from jaxtrain.settings import UserError

TOKENIZER = byte_tokenizer()


def text_of(tokens):
    return bytes(int(t) for t in tokens if t < 256).decode()


def hidden(text):
    """The number that a text hides."""
    return text.split(FACT.split("{}")[0])[1].split(" is ")[1].split(".")[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_answer_is_the_number_at_its_depth(depth):
    first, *others = haystack(TOKENIZER, 2000, depth, np.random.default_rng(3))
    text = text_of(first.tokens[: first.start])
    assert text_of(first.tokens[first.start :]) == f" {hidden(text)}."
    answers = {text_of(o.tokens[o.start :]) for o in (first, *others)}
    assert len(answers) == CHOICES and all(o.start == first.start for o in others)
    assert 1900 < len(first.tokens) <= 2000 and first.tokens[0] == TOKENIZER.bos_id
    assert text.index(hidden(text)) / len(text) == pytest.approx(depth, abs=0.05)
    assert text.endswith(" is")


def test_texts_are_the_same_for_every_model_and_differ_from_sample_to_sample():
    first, second = (list(haystacks(TOKENIZER, 500, 0.5, 2)) for _ in range(2))
    assert all(np.array_equal(a[0].tokens, b[0].tokens) for a, b in zip(first, second))
    assert hidden(text_of(first[0][0].tokens)) != hidden(text_of(first[1][0].tokens))


def test_a_text_that_does_not_hold_the_fact_is_refused():
    with pytest.raises(UserError, match="40 tokens are too few for the fact and the question"):
        haystack(TOKENIZER, 40, 0.5, np.random.default_rng(0))


@pytest.mark.parametrize("given", ["", "a", "0", "12,-3", "1.5"])
def test_lengths_are_numbers(given):
    with pytest.raises(UserError, match="must be lengths in tokens"):
        lengths_of(given)
    assert lengths_of("200, 100,200") == [100, 200]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("needle") / "tiny", byte_model(256))


def test_shares_are_of_texts_whose_number_is_found(run, monkeypatch, capsys):
    """A reader that remembers the last two thirds of a text."""

    def read(scorer, jobs, progress):
        for job in jobs:
            nll, greedy, questions = [], [], list(job)
            for question in questions:
                text = text_of(question[0].tokens[: question[0].start])
                seen = hidden(text) in text[len(text) // 3 :]
                nll += [0.0 if seen else 9.0, 1.0, 2.0, 3.0]
                greedy += [seen, False, False, False]
            ones, sizes = np.ones(len(nll), int), [CHOICES] * len(questions)
            yield Scores(np.array(nll), np.array(greedy), ones, sizes)

    monkeypatch.setattr(needle, "make_scorer", lambda *a: None)
    monkeypatch.setattr(needle, "scores", read)
    assert evaluate([str(run), "--needle", "256", "--limit", "3"]) == 0
    cells = json.loads((run / "needle.json").read_text())["cells"]
    assert [cell["depth"] for cell in cells] == list(DEPTHS)
    assert [cell["chosen"] for cell in cells] == [0, 0, 1, 1, 1]
    assert [cell["exact"] for cell in cells] == [0, 0, 1, 1, 1]
    assert all((cell["length"], cell["samples"]) == (256, 3) for cell in cells)
    out = capsys.readouterr().out
    assert "depth 100%" in out and "100% / 100%" in out


@pytest.mark.slow
def test_a_model_is_asked(run):
    out = run / "asked.json"
    assert evaluate([str(run), "--needle", "200,256", "--limit", "2", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 2 * len(DEPTHS) and all(0 <= c["chosen"] <= 1 for c in cells)
    assert all(c["exact"] == 0 for c in cells)  # it has seen one batch


def test_lengths_beyond_the_context_are_refused(run, capsys):
    assert evaluate([str(run), "--needle", "512"]) == 2
    err = capsys.readouterr().err
    assert "512 tokens are more than the context of 256; set model.context_length=512" in err
