"""How many steps a call has: one where the host waits for the device at any rate."""

import numpy as np
import pytest
from engine_cases import OPTIONS, make_engine, prompts, tokens_of

from jaxtrain.inference.engine.pace import PATIENCE, TRIED, UNSETTLED, Pace, step_counts


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def work(pace, clock, calls, device, host):
    """Calls of a device that takes so long for a step, and a host for a call."""
    seen = []
    for _ in range(calls):
        steps = pace.steps
        pace.called(steps)
        seen.append(steps)
        clock.now += host
        with pace.waiting():
            clock.now += max(0.0, steps * device - host)
    return seen


def test_a_slow_step_is_a_call_of_its_own():
    clock = Clock()
    seen = work(Pace(8, clock), clock, 20, device=10.0, host=2.0)
    tried = TRIED + UNSETTLED - 1  # calls of a choice until it is changed
    assert seen == [8] * tried + [4] * tried + [1] * (20 - 2 * tried)


def test_a_host_that_one_step_keeps_busy_goes_back_to_several():
    clock = Clock()
    seen = work(Pace(8, clock), clock, 60, device=1.0, host=4.5)
    assert seen[-40:] == [8] * 40 and 4 in seen and 1 not in seen
    assert work(Pace(8, clock), clock, PATIENCE, device=1.0, host=7.0) == [8] * PATIENCE


def test_four_steps_where_one_keeps_the_host_busy():
    """As of 32 rows of a small model: a prompt that joins waits for four steps, not for eight."""
    clock = Clock()
    assert work(Pace(8, clock), clock, 40, device=1.0, host=3.0)[-30:] == [4] * 30
    assert 1 in (seen := work(Pace(8, clock), clock, 60, device=1.0, host=1.5))
    assert seen[-40:] == [4] * 40
    assert step_counts(8) == [1, 4, 8] and step_counts(2) == [1, 2] and step_counts(1) == [1]


@pytest.mark.parametrize(("adapt", "expected"), [(True, {1: {1, 8}, 3: {1, 4, 8}}), (False, None)])
def test_programs_for_the_steps_that_may_be_chosen(adapt, expected):
    options = OPTIONS._replace(adapt_steps=adapt, slots=3, decode_steps=8)
    engine, found = make_engine(options=options), {}
    for key in engine.programs.needed((), engine.context):
        if key.name == "decode_slots":
            found.setdefault(key.rows, set()).add(key.steps)
    assert found == (expected or {1: {1, 8}, 3: {1, 8}})


def test_the_first_calls_after_a_change_are_not_measured():
    """As of a device that had nothing to do: the host waits for it only after some calls."""
    clock = Clock()
    pace = Pace(8, clock)
    for _ in range(TRIED):
        assert pace.steps == 8
        pace.reset()
        work(pace, clock, UNSETTLED - 2, device=0.1, host=9.0)
        work(pace, clock, 2, device=10.0, host=1.0)
    assert pace.steps == 4


def test_what_is_not_decoding_is_not_judged():
    clock, pace = Clock(), None
    pace = Pace(8, clock)
    for _ in range(20):
        assert work(pace, clock, 1, device=10.0, host=1.0) == [8]
        pace.reset()


@pytest.mark.slow
def test_texts_do_not_depend_on_the_pace(monkeypatch):
    texts = prompts(3, 17, 9)
    engine = make_engine(options=OPTIONS._replace(adapt_steps=True))
    steps = iter(np.tile([1, 8, 4, 8, 1, 4], 100).tolist())
    monkeypatch.setattr(Pace, "called", lambda self, _: setattr(self, "steps", next(steps)))
    assert tokens_of(engine, texts) == tokens_of(make_engine(), texts)
