"""Communication volume of a compiled step, and the least time of its collectives and matmuls."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from jaxtrain.estimate.hlo import SHAPE, Instruction, computations_of, counts_of, size_of
from jaxtrain.estimate.liveness import VIEWS
from jaxtrain.runs.environment import peak_flops
from jaxtrain.settings import UserError

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Rates(NamedTuple):
    """One device: memory in bytes, MFU (share of the bf16 peak), links in bytes/s each way."""

    memory: int
    mfu: float
    link: float  # to its neighbours on the host
    network: float  # to other hosts
    per_host: int = 8
    # Capability that a dry run compiles for: Hopper kernels would not compile for a CPU.
    capability: tuple[int, int] = (8, 0)

    @property
    def flash(self) -> bool:
        """Whether a fused attention kernel exists. XLA's backend keeps score tiles in memory."""
        return self.capability >= (8, 0)


# Memory and links come from NVIDIA's data sheets: B200 (DGX B200: 1,440 GB in eight, NVLink 1.8
# TB/s in both directions together), H200, H100 SXM, A100 SXM 80GB (NVLink 900, 900 and 600 GB/s,
# likewise), T4 (PCIe 3.0 x16), DGX B200, H100 and A100 (network 8 x 400, 8 x 400 and 8 x 200
# Gbit/s). A cloud host of four T4s has 50 Gbit/s. Smaller cards: data sheets of L4, L40S and A10;
# NVIDIA's white papers on GA102 (RTX 3090), Ada (RTX 4090, RTX 6000 Ada) and RTX Blackwell (RTX
# 5090, RTX PRO 6000). PCIe x16 has 32 GB/s each way (generation 4) or 64 GB/s (generation 5); a
# host of four cards is assumed to have 100 Gbit/s. MFU: gpt_d24 on one H200 with the Hopper kernels
# (step-gpt_d24-bf16-nvidia_h200.json) and without (...-xla-...); other cards are assumed to reach
# the same share.
RATES = {
    "H200": Rates(141 * 10**9, 0.52, 450e9, 50e9),
    "H100": Rates(80 * 10**9, 0.52, 450e9, 50e9),
    "A100": Rates(80 * 10**9, 0.47, 300e9, 25e9),
    "B200": Rates(180 * 10**9, 0.47, 900e9, 50e9),
    "L40S": Rates(48 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "L4": Rates(24 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "A10": Rates(24 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "RTX-6000-Ada": Rates(48 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "RTX-PRO-6000": Rates(96 * 10**9, 0.47, 64e9, 3.1e9, 4),
    "RTX-5090": Rates(32 * 10**9, 0.47, 64e9, 3.1e9, 4),
    "RTX-4090": Rates(24 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "RTX-3090": Rates(24 * 10**9, 0.47, 32e9, 3.1e9, 4),
    "T4": Rates(16 * 10**9, 0.47, 16e9, 1.6e9, 4, (7, 5)),
    "CPU": Rates(16 * 10**9, 0.47, 10e9, 1e9, 1, (0, 0)),
}


def device_named(text: str) -> str:
    """The key of RATES that a name means: `NVIDIA GeForce RTX 4090` and `4090` are RTX-4090.

    Raises UserError if no key matches, or several do.
    """
    plain = lambda name: re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    asked = plain(text)
    found = [kind for kind in RATES if plain(kind) == asked]
    found = found or [kind for kind in RATES if len(asked) > 2 and asked in plain(kind)]
    found = found or [kind for kind in RATES if plain(kind) in asked and kind.startswith("RTX")]
    if len(found) != 1:
        which = f"is {' or '.join(found)}" if found else "has no figures here"
        raise UserError(f"--device {text} {which}; there are {', '.join(RATES)}")
    return found[0]


def rates_of(kind: str) -> Rates:
    """The entry of RATES. Raises UserError for an unknown kind."""
    if kind not in RATES:
        raise UserError(f"--device {kind}: no figures for it; there are {', '.join(RATES)}")
    return RATES[kind]


class Collective(NamedTuple):
    """All of a step's collectives of one kind over the same mesh axes."""

    kind: str
    axes: tuple[str, ...]
    group_size: int  # devices in a replica group
    times: float
    bytes: float  # sent by one device, with ring algorithms


def collectives(hlo: str, mesh_shape: dict[str, int], branch: float = 0.0) -> list[Collective]:
    """The collectives of a compiled program, each in a loop counted once per iteration. Loops whose
    trip count depends on the data, as for a MoE's overflow tokens, are not counted.

    branch: the fraction of steps in which a branch of a conditional runs.
    """
    computations, entry = computations_of(hlo)
    total: dict[tuple[str, tuple[str, ...], int], list[float]] = {}
    for kind, axes, group_size, times, sent in _walk(computations, entry, 1.0, mesh_shape, branch):
        row = total.setdefault((kind, axes, group_size), [0.0, 0.0])
        row[0] += times
        row[1] += times * sent
    found = [Collective(*key, *row) for key, row in total.items() if row[1]]
    return sorted(found, key=lambda c: -c.bytes)


def _walk(
    computations: dict[str, list[Instruction]],
    name: str,
    times: float,
    mesh_shape: dict[str, int],
    branch: float,
) -> Iterator[tuple[str, tuple[str, ...], int, float, float]]:
    instructions = computations.get(name, [])
    by_name = {i.name: i for i in instructions}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for i in instructions:
        for operand in i.operands:
            users[operand].append(i)
    for i in instructions:
        if i.op == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', i.rest)
            inner = times * int(trips[1] if trips else 0)
            yield from _walk(computations, i.attribute("body"), inner, mesh_shape, branch)
        for called in i.attributes("branch") if branch and i.op == "conditional" else ():
            yield from _walk(computations, called, times * branch, mesh_shape, branch)
        for called in i.attributes("to_apply", "calls") if i.op in ("call", "async-start") else ():
            yield from _walk(computations, called, times, mesh_shape, branch)
        kind = i.op.removesuffix("-start")
        if kind not in KINDS:
            continue
        group = group_of_first(i.rest, prod(mesh_shape.values()))
        places = np.unravel_index(group, tuple(mesh_shape.values()))
        axes = tuple(a for a, at in zip(mesh_shape, places) if len(set(at.tolist())) > 1)
        if not axes:  # each device sends only to itself
            continue
        sizes: dict[tuple[str, tuple[str, ...], int], float] = defaultdict(float)
        for operand_index, operand in enumerate(i.operands):
            size = _narrowest(by_name, operand)
            if kind == "all-gather" and len(i.operands) == 1:
                whole = size_of(by_name[operand].type)
                size = min(size, round(whole * _read(i, users[i.name])))
            steps = [(kind, axes, len(group), float(size))]
            if kind == "all-reduce" and prod(mesh_shape[a] for a in axes) == len(group):
                taken = _taken(computations, i, operand_index, size, users)
                steps = _in_two_steps(axes, mesh_shape, taken, float(size))
            for step, along, group_size, part in steps:
                sizes[step, along, group_size] += part
        for (step, along, group_size), size in sizes.items():
            yield step, along, group_size, times, size * factor(step, group_size)


def _in_two_steps(
    axes: tuple[str, ...], mesh_shape: dict[str, int], taken: int, size: float
) -> list[tuple[str, tuple[str, ...], int, float]]:
    """Steps (kind, axes, group_size, bytes) of an all-reduce. Each device reads one of `taken`
    shards. The GPU compiler emits a reduce-scatter over the axes that shard it, then an
    all-reduce of the shard over the others. The CPU compiler emits an all-reduce and a slice."""
    first = sorted(axes, key=lambda axis: axis != "fsdp")
    for count in range(1, len(axes) + 1):
        for inner in combinations(first, count):
            if prod(mesh_shape[a] for a in inner) == taken:
                outer = tuple(a for a in axes if a not in inner)
                inner = tuple(a for a in axes if a in inner)
                rest = ("all-reduce", outer, prod(mesh_shape[a] for a in outer), size / taken)
                return [("reduce-scatter", inner, taken, size), *[rest] * bool(outer)]
    return [("all-reduce", axes, prod(mesh_shape[a] for a in axes), size)]


def factor(kind: str, n: int) -> float:
    """Bytes that a device sends for each byte of its operand."""
    share = (n - 1) / n
    return {"all-reduce": 2 * share, "all-gather": n - 1.0, "collective-permute": 1.0}.get(
        kind, share
    )


def group_of_first(text: str, devices: int) -> list[int]:
    """The first replica group, in any of XLA's notations."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        ids = np.arange(devices).reshape(list(sizes.values()))
        mine = re.findall(r"'([^']+)'", found[2])
        return ids[tuple(slice(None) if a in mine else 0 for a in sizes)].ravel().tolist()
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source, turn = ([int(n) for n in (g or "").split(",") if n] for g in found.groups())
        ids = np.arange(prod(source)).reshape(source)
        return (ids.transpose(turn) if turn else ids).reshape(shape)[0].tolist()
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", text):
        pairs = [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])]
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return [int(n) for n in found[1].split(",")]
    return list(range(devices))


def _narrowest(by_name: dict[str, Instruction], name: str) -> int:
    """Bytes of an operand in its narrowest dtype. The CPU compiler widens 16-bit values to send."""
    values, width = 0, 16
    while (i := by_name.get(name)) is not None:
        here = sum(counts_of(i.type))
        values = values or here
        width = min(width, size_of(i.type) // max(here, 1))
        if not _looks(i) or i.op == "get-tuple-element" or len(i.operands) != 1:
            break
        name = i.operands[0]
    return values * width


def _looks(i: Instruction) -> bool:
    """Whether an instruction is only a view, slice or conversion of its operand."""
    names = ("wrapped_co", "wrapped_tr", "wrapped_slice")
    return i.op in VIEWS or i.op == "slice" or i.name.startswith(names)


def _read(i: Instruction, users: Sequence[Instruction]) -> float:
    """The share of a result's bytes that is left if all its users convert it to a narrower dtype.
    The GPU compiler converts before it gathers."""
    narrows = lambda u: u.op == "convert" or u.name.startswith("wrapped_convert")
    share = lambda u: size_of(u.type) / size_of(i.type) if narrows(u) else 1.0
    return max(map(share, users), default=1.0)


def _taken(
    computations: dict[str, list[Instruction]],
    i: Instruction,
    operand_index: int,
    size: int,
    users: dict[str, list[Instruction]],
) -> int:
    """Number of shards of an all-reduced result (at `operand_index` of the tuple) if each device
    reads only its own shard, else 1.

    Also 1 if the sum is first converted to a narrower dtype: the GPU compiler then makes no
    reduce-scatter of it, unless the CPU compiler had widened the sum from `size` bytes.
    """
    todo, one = list(users[i.name]), i.type
    if one.startswith("("):
        todo = [u for u in todo if re.search(rf"index={operand_index}\b", u.rest)]
        one = todo[0].type if todo else one
    found, widened = set(), size < size_of(one)
    while todo:
        u = todo.pop()
        slices = [x for x in computations.get(u.attribute("calls"), [u]) if x.op == "dynamic-slice"]
        if slices:
            found |= {_parts(one, x.type) for x in slices}
        elif _looks(u) and (widened or size_of(u.type) >= size_of(one)):
            todo += users[u.name]
        else:
            return 1
    return int(found.pop()) if len(found) == 1 else 1


def _parts(whole: str, part: str) -> float:
    """The number of parts in the whole if it is cut along one dimension, else 1."""
    dims = lambda kind: Counter(re.findall(r"\d+", SHAPE.findall(kind)[0][1]))
    cut = (dims(whole) - dims(part)).total() == 1
    return counts_of(whole)[0] / counts_of(part)[0] if cut else 1.0


def step_seconds(
    flops: float, sent: Sequence[Collective], kind: str, across: dict[str, int]
) -> tuple[float, float, float]:
    """Seconds (compute, collectives within hosts, collectives between hosts) of a step per device.

    across: the number of hosts that each mesh axis spans. The overlap of collectives with compute
    can only be measured.
    """
    rates = rates_of(kind)
    compute = flops / ((peak_flops(kind.replace("-", " ")) or 1e12) * rates.mfu)
    near = sum(c.bytes for c in sent if all(across.get(a, 1) == 1 for a in c.axes))
    far = sum(c.bytes for c in sent) - near
    return compute, near / rates.link, far / rates.network
