"""Which programs an engine has, when they are compiled, and what runs in their place until then."""

import contextlib
import threading
import time
from collections import Counter

import jax
import pytest
from engine_cases import GREEDY, OPTIONS, letters, make_engine, model, prompts, run
from jax.experimental.compilation_cache import compilation_cache
from tiny import mesh_of

from jaxtrain.inference.engine import Engine, EngineOptions, Request
from jaxtrain.inference.engine.compiler import EngineCompiler
from jaxtrain.inference.engine.programs import (
    ProgramKey,
    Programs,
    minimal_programs,
    supports_first_chunks,
    table_sizes,
)
from jaxtrain.inference.engine.sampling import Sampler
from jaxtrain.parallel.axes import partition_spec

CONTEXT = 2048


def programs(in_place, first_chunks=False):
    options = EngineOptions(context=CONTEXT)
    sizes = table_sizes(options, CONTEXT // options.page_size, in_place)
    return Programs((), options, 0, sizes, 8, first_chunks=first_chunks)


def test_a_kernel_that_reads_pages_in_place_needs_few_programs():
    keys = programs(in_place=True).needed((), CONTEXT)
    layers = {"decode_slots": 2 * 5, "prefill_slots": 2}
    assert Counter(key.name for key in keys) == layers | {"sample_first": 3, "put_texts": 1}
    first = minimal_programs(keys)
    assert len(first) == 4 and {key.name for key in first} == {key.name for key in keys}
    assert all(any(a.covers(b) for a in first) for b in keys)


def test_gathered_pages_have_sizes():
    one = programs(in_place=False)
    assert [size * 32 for size in one.sizes] == [256, 1024, 2048]
    assert [one.pages_for(n) * 32 for n in (1, 256, 257, 1025, 2048, 2055)] == [
        256, 256, 1024, 2048, 2048, 2048,
    ]  # fmt: skip
    keys = one.needed((), CONTEXT)
    assert len(keys) == 3 * (2 * 5 + 2) + 3 + 1
    assert minimal_programs(keys) == minimal_programs(programs(in_place=True).needed((), CONTEXT))


def test_prompts_that_begin_have_programs_of_their_own():
    """Of one size of pages, and of more rows: nothing is gathered for them."""
    keys = programs(in_place=False, first_chunks=True).needed((), CONTEXT)
    found = {key for key in keys if key.name == "prefill_slots"}
    ones = {key for key in found if key.first_chunk}
    assert {(key.rows, key.pages) for key in ones} == {(n, 512 * 2 // 32) for n in (1, 4, 16)}
    assert {(x.rows, x.pages * 32) for x in found - ones} == {
        (n, size) for n in (1, 4) for size in (256, 1024, 2048)
    }
    other = ProgramKey("prefill_slots", 4, 64)
    assert all(other.covers(key) for key in ones if key.rows < 16)
    assert not any(key.covers(other) for key in ones)


def test_when_prompts_that_begin_are_computed_as_whole_rows():
    c = model("plain")[0]
    options = EngineOptions(context=32, chunk=16)
    assert supports_first_chunks(options, [c], None)
    for other in ({"slots": 1}, {"cache_dtype": "int8"}, {"draft_mtp": True}):
        assert not supports_first_chunks(options._replace(**other), [c], None)
    for changes in ({"attention": "mosaic"}, {"prompt": 4}, {"context_length": 8}):
        assert not supports_first_chunks(options, [c, c.model_copy(update=changes)], None)


def test_prompts_wait_for_a_program_that_they_fill_to_a_half():
    one = programs(in_place=True, first_chunks=True)
    counts = [one.prefill_batch(n, True) for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 40)]
    assert counts == [1, 2, 3, 4, 4, 4, 8, 12, 16, 16]
    assert [one.prefilling(n, 9, True).rows for n in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    assert [one.prefill_batch(n, False) for n in (1, 3, 16)] == [1, 3, 4]


def test_a_known_page_or_a_long_prompt_needs_programs_that_gather():
    one = programs(in_place=True, first_chunks=True)
    gathers = lambda *texts: (
        not all(
            key.first_chunk
            for key in one.needed(
                [Request(str(i), x, GREEDY) for i, x in enumerate(texts)], CONTEXT
            )
            if key.name == "prefill_slots"
        )
    )
    apart, long = tuple(range(40)), tuple(range(9, 600))
    assert not gathers(apart, apart[1:], apart[:30])
    assert gathers(apart, apart[:35]) and gathers(long) and one.needed((), CONTEXT)


def test_one_program_serves_in_the_place_of_a_cheaper_one():
    key = lambda *how: ProgramKey("decode_slots", 0, *how)
    wanted = key(8, 8, Sampler.TEMPERATURE)
    assert key(8, 1, Sampler.ALL).covers(wanted) and not wanted.covers(key(8, 1, Sampler.ALL))
    assert not key(4, 8, Sampler.ALL).covers(wanted)
    assert not key(8, 16, Sampler.ALL).covers(wanted)
    assert not ProgramKey("prefill_slots", 4, 8).covers(wanted)


@pytest.mark.slow
def test_requests_run_by_what_is_compiled_and_a_second_start_compiles_nothing(tmp_path):
    """The first ones by the few programs that serve all; their tokens are the same."""
    texts = prompts(3, 17, 9)
    how = GREEDY, GREEDY._replace(temperature=0.8), GREEDY._replace(temperature=0.8, top_k=5)
    requests = [Request(f"r{i}", text, how[i]) for i, text in enumerate(texts)]
    engine, gate = make_engine("plain", OPTIONS._replace(slots=1)), threading.Event()
    expected, events = run(make_engine("plain"), requests), Counter()
    lower, count = Programs.lower, lambda event, **_: events.update([event])
    again = make_engine("plain", OPTIONS._replace(slots=1))

    def lower_gated(self, key, *where):
        if key not in first:
            gate.wait(60)
        return lower(self, key, *where)

    first = minimal_programs(engine.programs.needed((), engine.context))
    cache = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in cache}

    def use(settings):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    jax.monitoring.register_event_listener(count)
    try:
        use(cache)
        jax.clear_caches()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Programs, "lower", lower_gated)
            assert engine.warm_up(background=True) == 10
            ready = [one.done() for one in engine.compiler.coming.values()]
            assert ready.count(True) == len(first) == 4
            assert run(engine, requests) == expected
            gate.set()
            engine.compiler.wait(list(engine.compiler.coming))
        missed = events["/jax/compilation_cache/cache_misses"]
        assert missed >= 11
        jax.clear_caches()
        again.warm_up()
        assert events["/jax/compilation_cache/cache_hits"] >= 11
        assert run(again, requests) == expected
        assert events["/jax/compilation_cache/cache_misses"] == missed
    finally:
        jax.monitoring.unregister_event_listener(count)
        use(before)


@pytest.mark.slow
def test_a_mesh_of_its_own_runs_the_programs_that_were_compiled():
    """What slots ask for is made anew when it changes, on the mesh as before."""
    c, graphdef, specs, params = model("plain")
    mesh, events = mesh_of(tensor=2), Counter()
    shard_of = lambda s: jax.sharding.NamedSharding(mesh, partition_spec(s.axes, s.shape, mesh))
    params = jax.device_put(params, jax.tree.map(shard_of, specs))
    engine = Engine(c, graphdef, params, letters(), options=OPTIONS, mesh=mesh)
    requests = [Request("a", prompts(3)[0], GREEDY._replace(logit_bias=((1, 2.0),)))]
    engine.warm_up(requests)
    listen = lambda event, _, fun_name="", **__: events.update([fun_name])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(engine, requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in events if "decode" in name or "sample_first" in name]


def test_long_contexts_are_listed_by_pages():
    """Each size of the table is there, though few of the lengths are looked at."""
    options = EngineOptions(context=1_000_001, page_size=32)
    many = Programs((), options, 0, table_sizes(options, 31251, in_place=False), 8)
    begin = time.perf_counter()
    keys = many.needed((), options.context)
    assert time.perf_counter() - begin < 5
    for name in ("prefill_slots", "decode_slots"):
        assert {key.pages for key in keys if key.name == name} == set(many.sizes)


def test_where_one_program_fails_the_others_are_left():
    """Those that were not begun; else the end of the process would wait for them."""
    gate, key = threading.Event(), lambda steps: ProgramKey("decode_slots", steps=steps)

    class Failing(jax.stages.Lowered):
        def __init__(self):
            pass

        def compile(self, **_):
            raise RuntimeError("no memory")

    def lower(one):
        if one != key(1):
            gate.wait(60)
        return Failing()

    compiler = EngineCompiler(contextlib.nullcontext)
    compiler.start([key(1)], [key(n) for n in range(2, 30)], lower)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            compiler.wait([key(1)])
        assert compiler.coming[key(29)].cancelled()
    finally:
        gate.set()


def test_the_cheapest_program_that_is_ready_is_picked(caplog):
    from concurrent.futures import Future

    key = lambda steps, sampler: ProgramKey("decode_slots", 0, 8, steps, sampler)
    dear, cheaper, wanted = key(1, Sampler.ALL), key(8, Sampler.ALL), key(8, Sampler.BEST)
    one = EngineCompiler(lambda: None)
    assert one.pick(wanted) == wanted  # it is compiled when it is called
    one.coming = {x: Future() for x in (dear, cheaper, wanted)}
    one.coming[dear].set_result(None)
    assert one.pick(wanted) == dear
    one.coming[cheaper].set_result(None)
    assert one.pick(wanted) == cheaper
    one.coming[wanted].set_exception(RuntimeError("no memory"))
    assert one.pick(wanted) == one.pick(wanted) == cheaper  # one that failed has a stand-in
    assert caplog.text.count("was not compiled: no memory") == 1
    assert one.pick(key(1, Sampler.BEST)) == dear  # nor one that was never begun
    one.coming = {wanted: one.coming[wanted]}
    assert one.pick(wanted) == wanted  # and is tried again, and raises, where it has none


@pytest.mark.slow
def test_one_text_of_many_slots_decodes_alone():
    """By a program of one row, also from another slot than the first, and its tokens stay."""
    lengths = {"a": 4, "b": 12, "c": 20}
    requests = [
        Request(name, text, GREEDY._replace(max_tokens=n))
        for (name, n), text in zip(lengths.items(), prompts(5, 9, 3))
    ]
    engine = make_engine(options=OPTIONS._replace(decode_steps=2))
    seen, pick = [], engine.compiler.pick
    engine.compiler.pick = lambda key: seen.append(key) or pick(key)
    together = run(engine, requests)
    rows = [key.rows for key in seen if key.name == "decode_slots"]
    assert set(rows) == {1, 4} and rows[-1] == 1
    for one in requests:
        alone = run(make_engine(options=OPTIONS._replace(slots=1)), [one])
        assert alone[one.id] == together[one.id]


def test_what_warm_up_has_compiled_serves_its_requests_to_their_end():
    """Also the last of them, which is alone."""
    requests = [
        Request(str(n), text, GREEDY._replace(max_tokens=n))
        for n, text in zip((4, 13), prompts(5, 9))
    ]
    engine = make_engine(options=OPTIONS._replace(decode_steps=2))
    engine.warm_up(requests)
    taken, pick = [], engine.compiler.pick
    engine.compiler.pick = lambda key: taken.append(pick(key)) or taken[-1]
    run(engine, requests)
    assert {key.name for key in taken} > {"decode_slots"} and set(taken) <= {
        *engine.compiler.coming
    }
