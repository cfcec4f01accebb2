"""Text by an engine of its own: samples while a run trains, batches of prompts, a talk."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from engine_cases import OPTIONS, letters, make_engine
from tiny import T, build, mesh_of

from jaxtrain.inference import generate
from jaxtrain.inference.engine import Request, SamplingParams
from jaxtrain.inference.generate import LanguageModel, Sampling
from jaxtrain.parallel.axes import partition_spec


def model(**changes):
    c, graphdef, _, params = build(depth=2, **changes)
    encode = lambda texts: [np.array([ord(x) - 48 for x in text], np.int32) for text in texts]
    return LanguageModel(c, graphdef, params, dataclasses.replace(letters(), encode_batch=encode))


@pytest.fixture(scope="module")
def plain():
    return model()


HOW = Sampling(6, 1.0, seed=3)


def test_each_prompt_has_a_seed_of_its_own(plain):
    requests = generate.make_requests(plain, ["", "", ""], HOW)
    assert [list(one.prompt) for one in requests] == [[0]] * 3
    assert [one.sampling.seed for one in requests] == [3, 4, 5]


@pytest.mark.slow
def test_a_row_is_a_function_of_its_prompt_and_its_place(plain):
    """Not of its neighbours; and the same prompt twice is continued in two ways."""
    found = generate.generate(plain, ["", "", ""], HOW)
    assert found == generate.generate(plain, ["", "", ""], HOW) and len(set(found)) == 3
    assert generate.generate(plain, [""], HOW._replace(seed=4)) == found[1:2]


def compiled_by(work):
    events = []
    listen = lambda event, duration_secs, **_: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return [event for event in events if "backend_compile" in event]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[""], ["", ""]], ids=len)
@pytest.mark.quick("2")
def test_nothing_is_compiled_when_samples_are_written(prompts):
    """All was compiled from the parameters' shapes; and few programs at that."""
    one, mesh = model(short_window=7 + len(prompts)), mesh_of()  # of no other test
    whole = jax.device_put(one.params, jax.sharding.NamedSharding(mesh, jax.P()))
    shapes = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    ahead = one._replace(params=jax.tree.map(shapes, whole))
    requests = generate.make_requests(one, prompts, HOW)
    engine = lambda m: generate.make_engine(m, requests, all_pages=True)
    with jax.set_mesh(mesh):
        assert len(compiled_by(lambda: engine(ahead).warm_up(requests))) <= 9
        later = engine(one._replace(params=whole))
        assert compiled_by(lambda: generate.run_requests(later, requests)) == []


def test_an_engine_of_a_batch_has_the_room_that_it_asks_for(plain):
    requests = generate.make_requests(plain, ["", ""], HOW)
    engine = generate.make_engine(plain, requests)
    assert engine.context == T and engine.pool.total == 2 * engine.width == 2
    long = generate.make_requests(plain, [""], HOW._replace(tokens=200))
    assert generate.make_engine(plain, long).context == 201  # positions that turn have no end


@pytest.mark.slow
def test_learned_positions_end_a_text():
    learned = model(position_embedding="learned")
    requests = generate.make_requests(learned, [""], Sampling(256))
    assert requests[0].sampling.max_tokens == T - 1
    assert len(generate.run_requests(generate.make_engine(learned, requests), requests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2}], ids=str)
def test_samples_on_a_mesh_are_those_of_one_device(plain, sizes):
    how, mesh = Sampling(8, 0.0), mesh_of(**sizes)
    prompts = ["", "", ""]
    _, _, specs, params = build(depth=2)
    where = lambda s: jax.sharding.NamedSharding(mesh, partition_spec(s.axes, s.shape, mesh))
    split = jax.device_put(params, jax.tree.map(where, specs))
    alone = generate.generate(plain, prompts, how)
    with jax.set_mesh(mesh):
        assert generate.generate(plain._replace(params=split), prompts, how) == alone


def test_a_turn_does_not_compute_the_talk_again():
    engine = make_engine(options=OPTIONS._replace(slots=1))
    say = SamplingParams(8, temperature=0.0, ignore_stop=True)
    prompt = tuple(range(10))
    first = list(generate.stream(engine, Request("0", prompt, say)))
    answer = tuple(x - 48 for x in "".join(first).encode())
    assert len(answer) == 8
    list(generate.stream(engine, Request("1", (*prompt, *answer, 5, 6), say)))
    assert engine.stats().prefix_hits == 16  # of 4 full pages


def test_ctrl_c_cancels_an_answer_and_the_engine_goes_on():
    engine = make_engine(options=OPTIONS._replace(slots=1))
    say = SamplingParams(30, temperature=0.0, ignore_stop=True)
    before, pieces = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        for piece in generate.stream(engine, Request("0", (1, 2, 3), say)):
            pieces.append(piece)
            if len(pieces) == 5:
                signal.raise_signal(signal.SIGINT)
    assert 5 <= len(pieces) < 10 and signal.getsignal(signal.SIGINT) is before
    assert not engine.busy and engine.stats().pages_used == 0
    whole = "".join(generate.stream(engine, Request("1", (1, 2, 3), say)))
    assert len(whole) == 30 and whole.startswith("".join(pieces))
