"""Profile of a training step: a profiler trace of a few steps as a table of kernels."""

import json
import re
import tempfile
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.costs import Cost, in_order, read_costs
from benchmarks.tables import screen, to_rich
from benchmarks.timing import Ceilings
from jaxtrain.estimate.traffic import collectives

STEPS = 3
SHOWN = 30  # kernels on the screen; the JSON has all of them

# Kinds of kernels by pattern; the first one found in a kernel's name counts.
KINDS = {
    "collective": r"nccl|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|collective",
    "attention": r"sdpa|flash|fmha|attention",
    "matmul": r"nvjet|gemm|cutlass|xmma|matmul|cublas|convolution|(^|[_\W])dot($|[_\W])",
    "scatter/gather": r"scatter|gather",
    "reduction": r"reduc|norm|softmax|cumsum|sort|argmax",
    "copy/transpose": r"copy|transpose|memcpy|memset",
    "elementwise": r"fusion|wrapped|broadcast|convert|multiply|add|iota|slice|pad|concat|select",
}
LIBRARY = re.compile(r"nvjet|cutlass|xmma|.*gemm(?!_fusion)(?!.*splitK)")  # cuBLAS's matmuls
NESTED = re.compile(r"while|call|conditional")  # the operations of their bodies have own events


class Event(NamedTuple):
    """One execution of a kernel; `op` is the compiled program's instruction, '' if unknown."""

    name: str
    op: str
    start_ns: float
    duration_ns: float


def profile(
    step: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    compiled: Any,
    target: Path,
    limits: Ceilings,
    mesh_shape: dict[str, int],
    branch: float = 0.0,
) -> dict[str, float]:
    """Trace three steps; returns milliseconds per step by kind of kernel.

    Prints the tables; on several devices also their communication (branch: as in `collectives`) and
    how much of it is overlapped. Writes TARGET-profile.json (all kernels) and TARGET-profile.zip
    (the trace for Perfetto or xprof, and the compiled program).
    """
    hlo = compiled.as_text()

    def steps() -> None:
        for i in range(STEPS):
            result = step(*inputs[i % len(inputs)])
        jax.block_until_ready(result)

    events = trace(steps, hlo, target)
    source = sources(hlo)
    table = summarize(events, source, read_costs(hlo), limits)
    if prod(mesh_shape.values()) > 1:
        sent = [c._asdict() for c in collectives(hlo, mesh_shape, branch)]
        table["exchanges"] = {"sent": sent, **hidden(events, source)}
    Path(f"{target}-profile.json").write_text(json.dumps(table, indent=1) + "\n")
    show(table)
    return {kind["kind"]: kind["ms"] for kind in table["kinds"]}


def trace(run: Callable[[], None], hlo: str, target: Path) -> list[Event]:
    """Trace a call and return its kernels; TARGET-profile.zip gets the trace and the program."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(f"{target}-profile.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.name.partition(".")[2])
            archive.writestr("hlo.txt", hlo)
        return list(read_events(next(p for p in files if p.name.endswith(".xplane.pb"))))


def read_events(path: Path) -> Iterator[Event]:
    """The kernels that the first device ran (on a CPU: the operations of XLA's thread pool)."""
    with warnings.catch_warnings():
        # The reader's first use triggers a DeprecationWarning in Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {p.name: p for p in jax.profiler.ProfileData.from_file(str(path)).planes}
        devices = sorted(name for name in planes if re.fullmatch(r"/device:[GT]PU:\d+", name))
        plane = devices[0] if devices else "/host:CPU"
        # A device also has lines that show the same time by module, step and framework op.
        wanted = "Stream" if "GPU" in plane else "XLA Ops" if "TPU" in plane else ""
        for line in planes[plane].lines:
            if not line.name.startswith(wanted):
                continue
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if devices or (op and event.duration_ns and not NESTED.match(op)):
                    yield Event(event.name, op, event.start_ns, event.duration_ns)


def sources(hlo: str) -> dict[str, str]:
    """Instruction -> the Python source line and the operation that it came from."""
    head, _, body = hlo.partition("\nStackFrames")
    files = dict(re.findall(r'^(\d+) "(.*)"$', head.partition("\nFunctionNames")[0], re.MULTILINE))
    lines = {
        at: f"{'/'.join(Path(files[file]).parts[-2:])}:{line} "
        for at, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", head, re.M)
    }
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", body, re.MULTILINE))
    instruction = r'^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name="([^"]*)"(?: stack_frame_id=(\d+))?'
    return {
        plain(name): f"{lines.get(frames.get(frame, ''), '')}{op.rpartition('/')[2]}"
        + (" backward" if "transpose(jvp" in op else "")
        for name, op, frame in re.findall(instruction, body, re.MULTILINE)
    }


def plain(name: str) -> str:
    """An instruction's name as its kernel spells it: characters invalid in C become `_`."""
    return re.sub(r"\W", "_", name)


def origin_of(event: Event, source: dict[str, str]) -> str:
    """The source of an event according to `sources`; '' if unknown."""
    return source.get(plain(event.op)) or source.get(plain(event.name), "")


def kind_of(name: str, origin: str) -> str:
    """The kind of a kernel by its name, or for a generic fusion by its source."""
    text = origin if re.match(r"(ynn_)?fusion", name) else name.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), "other")


def summarize(
    events: Sequence[Event],
    source: dict[str, str],
    costs: Sequence[Cost],
    limits: Ceilings,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Kernels of one step (their `calls`, `ms`, `share` of all kernels' time) and their kinds.

    `ms_idle_before`: device idle time before them. A profiled program runs in CUDA graphs only with
    XLA's option `xla_enable_command_buffers_during_profiling`; otherwise its kernels are launched
    one by one, with longer gaps.

    If the compiled program has a kernel's bytes and FLOPs, its row has `bytes`, `flops` and
    `floor`, the share of its time that these take at the device's measured rates. Kernels whose
    names differ only in a number and that come from the same line of the model share a row.
    """
    kernels: dict[tuple[str, str], list[tuple[float, Cost | None]]] = defaultdict(list)
    idle: dict[tuple[str, str], float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    each = zip(events, costs_of(events, costs, steps), idle_before(events), strict=True)
    for event, cost, waited in each:
        origin = origin_of(event, source)
        key = re.sub(r"([._]\d+)+$", "", event.name), origin
        kernels[key].append((event.duration_ns, cost))
        idle[key] += waited
        kinds[kind_of(event.name, origin)] += event.duration_ns
    busy = sum(kinds.values())
    first = min((e.start_ns for e in events), default=0.0)
    last = max((e.start_ns + e.duration_ns for e in events), default=0.0)
    rows = [
        {
            "name": name,
            "kind": kind_of(name, origin),
            "from": origin,
            "calls": len(calls) / steps,
            "ms": sum(ns for ns, _ in calls) / steps / 1e6,
            "share": sum(ns for ns, _ in calls) / busy,
            "ms_idle_before": idle[name, origin] / steps / 1e6,
            **work(calls, limits, steps),
        }
        for (name, origin), calls in kernels.items()
    ]
    return {
        "steps": steps,
        "ms_busy": busy / steps / 1e6,
        "ms_span": (last - first) / steps / 1e6,
        "ms_idle": sum(idle.values()) / steps / 1e6,
        "kinds": [
            {"kind": kind, "ms": ns / steps / 1e6, "share": ns / busy}
            for kind, ns in sorted(kinds.items(), key=lambda item: -item[1])
        ],
        "kernels": sorted(rows, key=lambda row: -row["ms"]),
    }


def idle_before(events: Sequence[Event]) -> list[float]:
    """Idle nanoseconds of the device before each event."""
    waited, end = [0.0] * len(events), min((e.start_ns for e in events), default=0.0)
    for i in sorted(range(len(events)), key=lambda i: events[i].start_ns):
        waited[i] = max(0.0, events[i].start_ns - end)
        end = max(end, events[i].start_ns + events[i].duration_ns)
    return waited


def hidden(events: Sequence[Event], source: dict[str, str]) -> dict[str, float]:
    """Milliseconds per step with a running collective (`ms`), and those of them in which nothing
    else runs (`ms_alone`)."""
    ends: list[tuple[float, int, int]] = []  # (time, +1 or -1, whether it is a collective)
    for e in events:
        exchange = int(kind_of(e.name, origin_of(e, source)) == "collective")
        ends += [(e.start_ns, 1, exchange), (e.start_ns + e.duration_ns, -1, exchange)]
    running, since, total, alone = [0, 0], 0.0, 0.0, 0.0
    for when, change, exchange in sorted(ends):
        if running[1]:
            total += when - since
            alone += when - since if not running[0] else 0.0
        running[exchange] += change
        since = when
    return {"ms": total / STEPS / 1e6, "ms_alone": alone / STEPS / 1e6}


def costs_of(events: Sequence[Event], costs: Sequence[Cost], steps: int) -> list[Cost | None]:
    """The cost of each event. Kernels of fusions are matched by name. Library matmuls are matched
    by order, if there are as many as in the program."""
    named = {plain(cost.name): cost for cost in costs if not cost.matmul}
    found = [named.get(plain(e.name)) or named.get(plain(e.op)) for e in events]
    library = [i for i in range(len(events)) if LIBRARY.match(events[i].name)]
    library.sort(key=lambda i: events[i].start_ns)
    expected = in_order(costs) * steps
    if len(library) == len(expected):
        for i, cost in zip(library, expected):
            found[i] = cost
    return found


def work(
    calls: Sequence[tuple[float, Cost | None]], limits: Ceilings, steps: int
) -> dict[str, float]:
    known = [cost for _, cost in calls if cost is not None]
    if not calls or len(known) < len(calls):
        return {}
    floors = [max(c.bytes / limits.copy_gbps, c.flops / limits.matmul_tflops / 1e3) for c in known]
    return {
        "bytes": sum(c.bytes for c in known) / steps,
        "flops": sum(c.flops for c in known) / steps,
        "floor": sum(floors) / sum(ns for ns, _ in calls),
    }


KERNEL_COLUMNS = ["kernel", "from", "calls", "ms", "share", "idle", "GB", "TF/s", "floor"]


def show(table: dict[str, Any]) -> None:
    console = screen()
    kinds = [[k["kind"], f"{k['ms']:.3f}", f"{k['share']:.1%}"] for k in table["kinds"]]
    title = f"a step by kind: {table['ms_busy']:.2f} ms busy of {table['ms_span']:.2f} ms"
    title += f", {table['ms_idle']:.2f} idle"
    console.print(to_rich(title, ["kind", "ms", "share"], kinds))
    kernels = [
        [
            k["name"][:60],
            k["from"][-60:],
            f"{k['calls']:.1f}",
            f"{k['ms']:.3f}",
            f"{k['share']:.1%}",
            f"{k['ms_idle_before']:.3f}",
            f"{k['bytes'] / 1e9:.2f}" if "bytes" in k else "-",
            f"{k['flops'] / 1e9 / k['ms']:.0f}" if k.get("flops") else "-",
            f"{k['floor']:.0%}" if "floor" in k else "-",
        ]
        for k in table["kernels"][:SHOWN]
    ]
    console.print(to_rich("kernels", KERNEL_COLUMNS, kernels))
    if exchanges := table.get("exchanges"):
        title = (
            f"exchanges: {exchanges['ms']:.2f} ms, {exchanges['ms_alone']:.2f} with nothing else"
        )
        rows = [
            [c["kind"], " x ".join(c["axes"]), f"{c['times']:.0f}", f"{c['bytes'] / 1e9:.2f}"]
            for c in exchanges["sent"]
        ]
        console.print(to_rich(title, ["kind", "over", "times", "GB sent"], rows))
