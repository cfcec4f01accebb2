"""Bytes and FLOPs of each instruction of a compiled program, parsed from its HLO text.

No device is needed. A pass over activations takes about bytes / copy rate, a matmul about FLOPs /
matmul rate, so the cost of a change can be estimated before it is run.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.estimate.hlo import SHAPE, Instruction, computations_of, size_of

LIBRARY_MATMUL = re.compile(r'custom_call_target="__cublas')
# Instructions that move no bytes, or whose bytes another instruction counts.
FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "partition-id",
    "copy-done", "async-done", "opt-barrier", "after-all",
}  # fmt: skip
SLICES = {"slice", "dynamic-slice", "gather"}


class Cost(NamedTuple):
    """The cost of one execution of an instruction. `matmul`: a library matmul, whose kernel name
    differs from the instruction's."""

    name: str
    times: int  # executions per step, counting loop iterations
    bytes: int  # read and written
    flops: float  # of its matmuls
    matmul: bool


def read_costs(hlo: str) -> list[Cost]:
    """The device's instructions in scheduled order; a loop is replaced by its body."""
    computations, entry = computations_of(hlo)
    return list(_walk(computations, entry, 1)) if entry else []


def in_order(costs: Sequence[Cost]) -> list[Cost]:
    """Every execution of a step's library matmuls in order, with loops unrolled.

    A loop's body is a run of costs of equal `times` above 1.
    """
    found = [cost for cost in costs if cost.matmul]
    order, at = [], 0
    while at < len(found):
        stop = at + 1
        while stop < len(found) and found[stop].times == found[at].times > 1:
            stop += 1
        order += found[at:stop] * found[at].times
        at = stop
    return order


def _walk(computations: dict[str, list[Instruction]], name: str, times: int) -> Iterator[Cost]:
    types = _types(computations[name])
    for i in computations[name]:
        if i.op in FREE:
            continue
        if i.op == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', i.rest)
            yield from _walk(
                computations, i.attribute("body"), times * int(trips[1] if trips else 1)
            )
        elif i.op == "call":
            yield from _walk(computations, i.attribute("to_apply"), times)
        else:
            inner = computations.get(i.attribute("calls"), [])
            moved = _fusion_bytes(i, inner, types) if inner else size_of(i.type) + sum(
                size_of(types.get(x, "")) for x in i.operands
            )  # fmt: skip
            yield Cost(
                i.name, times, moved, _flops(i, inner, types), bool(LIBRARY_MATMUL.search(i.rest))
            )


def _fusion_bytes(fusion: Instruction, inner: list[Instruction], types: dict[str, str]) -> int:
    """Bytes that a fusion reads and writes. A sliced operand counts by its slices, and an array
    updated in place by the updated slice."""
    sizes = {i.name: size_of(i.type) for i in inner}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for i in inner:
        for operand in i.operands:
            users[operand].append(i)
    moved = sizes[next(i.name for i in inner if i.root)]
    for i in inner:
        if i.op == "dynamic-update-slice" and i.root:
            moved = sizes[i.operands[1]]
        if i.op != "parameter":
            continue
        index = int(i.rest.partition(")")[0])
        size, uses = size_of(types.get(fusion.operands[index], "")), users[i.name]
        if uses and all(use.op in SLICES for use in uses):
            size = min(size, sum(sizes[use.name] for use in uses))
        elif uses and all(u.op == "dynamic-update-slice" and u.operands[0] == i.name for u in uses):
            size = 0
        moved += size
    return moved


def _flops(i: Instruction, inner: list[Instruction], types: dict[str, str]) -> float:
    if inner:
        types = _types(inner)
        return sum((_flops(x, [], types) for x in inner if x.op == "dot"), 0.0)
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.rest)
    if i.op not in ("dot", "custom-call") or not contracted:
        return 0.0
    left, (out, *_) = _dims(types.get(i.operands[0], ""))[0], _dims(i.type)
    depth = math.prod(left[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    return 2.0 * math.prod(out) * depth


def _types(instructions: list[Instruction]) -> dict[str, str]:
    """Instruction -> type of its result; `name#k` -> type of the k-th result of a tuple."""
    types = {}
    for i in instructions:
        types[i.name] = i.type
        if i.type.startswith("("):
            types |= {f"{i.name}#{k}": m[0] for k, m in enumerate(SHAPE.finditer(i.type))}
    return types


def _dims(kind: str) -> list[list[int]]:
    return [[int(n) for n in dims.split(",") if n] for _, dims in SHAPE.findall(kind)]
