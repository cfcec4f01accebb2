"""Profile of the engine's decoding: kernels of a step, gaps between them, host functions."""

import cProfile
import itertools
import json
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.costs import read_costs
from benchmarks.profile import Event, show, sources, summarize, trace
from benchmarks.tables import screen, to_rich
from benchmarks.timing import Ceilings
from jaxtrain.inference.engine import Engine, Request

TOKENS = 24  # traced tokens per sequence; as many again are timed on the host
SETTLED = 4  # tokens per sequence before the trace
GAPS_US = (3.0, 10.0, 100.0)  # upper bounds of the classes of gaps between kernels
CALLS = 20  # host functions shown


def profile_decoding(
    engine: Engine, requests: Sequence[Request], target: Path, limits: Ceilings
) -> None:
    """Trace steps in which all requests decode; each must request more than 60 tokens.

    Prints tables, and writes TARGET-profile.json and .zip as `profile` does. A step means one token
    per sequence, even if the device computes several before it returns to the host.
    """
    for request in requests:
        engine.add(request)
    rows, begun = len(requests), set[str]()
    while len(begun) < rows:
        begun |= {update.id for update in engine.step() if update.tokens}
    decode(engine, rows * SETTLED)
    host = host_table(engine, rows)
    hlo = engine.decode_program().compile().as_text() or ""
    steps = 0.0

    def run() -> None:
        nonlocal steps
        steps = decode(engine, rows * TOKENS) / rows

    events = trace(run, hlo, target)
    count = max(1, round(steps))
    table = summarize(events, sources(hlo), read_costs(hlo), limits, count)
    table |= {"rows": rows, "idle": idle_of(events, count), "host": host}
    Path(f"{target}-profile.json").write_text(json.dumps(table, indent=1) + "\n")
    show(table)
    show_gaps(table)
    for request in requests:
        engine.cancel(request.id)
    while engine.busy:
        engine.step()


def decode(engine: Engine, tokens: int) -> int:
    """Step until at least `tokens` new tokens are read; returns their number. The device is idle
    before and after, so that the steps in between match the tokens that were read."""
    jax.block_until_ready(engine.state)
    found = 0
    while found < tokens and engine.busy:
        found += sum(len(update.tokens) for update in engine.step())
    jax.block_until_ready(engine.state)
    return found


def host_table(engine: Engine, rows: int) -> dict[str, Any]:
    """Host time without a device trace: milliseconds per step, and per function in a further run
    that cProfile slows down. A function that reads an array waits for the device."""
    begin, before = time.perf_counter(), engine.stats().steps
    steps = max(1.0, decode(engine, rows * TOKENS) / rows)
    wall, calls = time.perf_counter() - begin, engine.stats().steps - before
    profiler = cProfile.Profile()
    profiler.enable()
    profiled = max(1.0, decode(engine, rows * SETTLED) / rows)
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    functions = [
        {
            "name": f"{'/'.join(Path(file).parts[-2:])}:{line} {name}",
            "calls": n / profiled,
            "ms": 1e3 * own / profiled,
        }
        for (file, line, name), (_, n, own, _, _) in stats.stats.items()
    ]
    functions.sort(key=lambda one: -one["ms"])
    return {"ms": 1e3 * wall / steps, "calls": calls / steps, "functions": functions[:CALLS]}


def idle_of(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Kernels, busy milliseconds and gaps between kernels, per step."""
    ends = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in events)
    busy, gaps, until = 0.0, list[float](), ends[0][0]
    for start, end in ends:
        if start > until:
            gaps.append(start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    edges = (0.0, *(1e3 * x for x in GAPS_US), float("inf"))
    between = lambda a, b: [gap for gap in gaps if a <= gap < b]
    names = [f"below {x:g} us" for x in GAPS_US] + [f"from {GAPS_US[-1]:g} us"]
    sizes = {name: between(*pair) for name, pair in zip(names, itertools.pairwise(edges))}
    return {
        "kernels": len(events) / steps,
        "ms_busy": busy / steps / 1e6,
        "busy_share": busy / max(until - ends[0][0], 1.0),
        "gaps": [
            {"size": name, "count": len(some) / steps, "ms": sum(some) / steps / 1e6}
            for name, some in sizes.items()
        ],
    }


def show_gaps(table: dict[str, Any]) -> None:
    """Print the tables of gaps and of host functions."""
    idle, host, console = table["idle"], table["host"], screen()
    title = (
        f"{table['rows']} rows: {idle['kernels']:.0f} kernels a step, {idle['ms_busy']:.3f} ms, "
        f"busy {idle['busy_share']:.0%}"
    )
    gaps = [[g["size"], f"{g['count']:.1f}", f"{g['ms']:.3f}"] for g in idle["gaps"]]
    console.print(to_rich(title, ["gaps", "a step", "ms"], gaps))
    title = f"the host: {host['ms']:.3f} ms a step, {host['calls']:.2f} calls of Engine.step"
    functions = [[f["name"], f"{f['calls']:.1f}", f"{f['ms']:.3f}"] for f in host["functions"]]
    console.print(to_rich(title, ["function", "calls", "own ms"], functions))
