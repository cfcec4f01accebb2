"""Text that has to match a regular expression or a JSON schema."""

import json
import re
import sys

import pytest
from engine_cases import finish
from tiny import FEW_PARTS, assignments, byte_model, random_run

from jaxtrain.inference.engine import (
    EngineOptions,
    Grammar,
    Request,
    SamplingParams,
    load_engine,
)
from jaxtrain.settings import UserError

OPTIONS = EngineOptions(slots=3, page_size=8, chunk=16, decode_steps=1)
GUESSING = OPTIONS._replace(drafts=3, pages=9)  # fewer than three texts need
DATE = Grammar("regex", "[0-9]{4}-[0-9]{2}")
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "ok"],
    "properties": {"name": {"type": "string", "maxLength": 3}, "ok": {"type": "boolean"}},
}  # fmt: skip
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    more = assignments(**FEW_PARTS)
    fields = byte_model(128, "train.precision=float32", "model.depth=1", *more)
    return random_run(tmp_path_factory.mktemp("run"), fields)


def answers(engine, *asked):
    for i, (grammar, how) in enumerate(asked):
        sampling = SamplingParams(max_tokens=60, seed=i, grammar=grammar)._replace(**how)
        engine.add(Request(f"{i}", (256, 65, 66), sampling))
    found = finish(engine)
    return [found[f"{i}"] for i in range(len(asked))]


FREE = (None, {"max_tokens": 20, "ignore_stop": True})
ASKED = [(DATE, {}), FREE, (OBJECT, {"temperature": 0.0}), (OBJECT, {"temperature": 2.0})]


@pytest.mark.slow
def test_the_text_matches_beside_others(saved):
    """Greedy and sampled, beside a request that may say anything."""
    engine = load_engine(saved, None, OPTIONS)
    found = answers(engine, *ASKED)
    assert re.fullmatch(DATE.source, found[0][1]) and found[0][2] == "stop"
    for _, text, reason in found[2:]:
        if reason == "stop":
            told = json.loads(text)
            assert set(told) == {"name", "ok"} and len(told["name"]) <= 3
    assert found[1] == answers(engine, (None, {}), FREE)[1]


@pytest.mark.slow
def test_the_text_with_guesses_is_that_without(saved):
    guessing = load_engine(saved, None, GUESSING)
    assert answers(guessing, *ASKED) == answers(load_engine(saved, None, OPTIONS), *ASKED)


@pytest.mark.slow
def test_preempted_it_goes_on_in_the_same_text(saved):
    asked = [(DATE._replace(source="[ab]{20}"), {}) for _ in range(3)]
    few = load_engine(saved, None, GUESSING)
    found = answers(few, *[(g, {"max_tokens": 24}) for g, _ in asked])
    assert found == answers(load_engine(saved, None, OPTIONS), *asked)
    assert few.stats().preemptions > 0 and all(re.fullmatch("[ab]{20}", x[1]) for x in found)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "[0-9"), "request a: grammar regex: .*invalid regex"),
        (Grammar("json_schema", '{"type": 3}'), "request a: grammar json_schema: type must be"),
        (Grammar("json_schema", "{"), "request a: grammar json_schema: "),
    ],
)
def test_what_is_no_grammar_is_refused(saved, grammar, message):
    engine = load_engine(saved, None, OPTIONS)
    with pytest.raises(UserError, match=message):
        engine.add(Request("a", (256,), SamplingParams(max_tokens=9, grammar=grammar)))
    assert not engine.busy


def test_without_the_library_it_says_what_to_install(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = load_engine(saved, None, OPTIONS)
    with pytest.raises(UserError, match=r"needs llguidance: uv sync --extra constrained"):
        engine.add(Request("a", (256,), SamplingParams(max_tokens=9, grammar=DATE)))
