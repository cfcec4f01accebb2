"""The model that lm-evaluation-harness asks."""

import importlib
import importlib.machinery
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
from task_cases import T, score_alone

from jaxtrain.data import Scored


class Instance(NamedTuple):
    """As lm_eval's, in what we read of it."""

    args: tuple


@pytest.fixture
def lm(model, monkeypatch):
    """The adapter, under a harness of nothing."""

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
    return lm


LONG = "A text that is longer than the context, " * 5


@pytest.mark.slow
def test_the_harness_model_answers_as_the_plain_model(lm, alone):
    pairs = [("Two and two make ", "four"), ("Two and two make ", "five"), ("", "b"), (LONG, "so")]
    found = lm.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found):
        tokens = np.array([256, *(context + continuation).encode()], np.int32)
        answer = len(continuation) + len(context) - len(context.rstrip())
        lost = max(0, len(tokens) - T - 1)
        nll, likeliest, _ = score_alone(alone, Scored(tokens[lost:], len(tokens) - lost - answer))
        assert value == pytest.approx(-nll, rel=2e-5) and greedy == likeliest

    tokens = np.array([256, *LONG.encode()], np.int32)
    windows = [(1, 1 + T), (1 + T, 1 + 2 * T), (1 + 2 * T, len(tokens))]
    total = 0.0
    for begin, end in windows:
        first = max(0, end - T - 1)
        total -= score_alone(alone, Scored(tokens[first:end], begin - first))[0]
    rolled = lm.loglikelihood_rolling([Instance((LONG,)), Instance(("ab",))])
    assert rolled[0] == pytest.approx(total, rel=2e-5) and len(rolled) == 2


@pytest.mark.slow
def test_the_harness_model_goes_on_as_the_plain_model(lm, alone):
    greedy = [256, *b"Say: "]
    for _ in range(6):
        greedy.append(int(alone(np.array(greedy, np.int32))[len(greedy) - 1].argmax()))
    text = bytes(t for t in greedy[6:] if t < 256).decode(errors="replace")
    settings = {"until": [], "max_gen_toks": 6}
    cut = {"until": [text[2:4]], "max_gen_toks": 6}
    asked = [Instance(("Say: ", settings)), Instance(("Say: ", cut)), Instance((LONG, settings))]
    assert lm.generate_until(asked)[:2] == [text, text.split(text[2:4])[0]]


def test_the_harness_is_named_when_it_is_missing(model, capsys):
    harness = importlib.import_module("jaxtrain.evaluation.lm_eval")
    if harness.INSTALLED:
        pytest.skip("it is installed")
    assert harness.main([str(model.tokenizer_dir.parent), "--tasks", "mmlu"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err
