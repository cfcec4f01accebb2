"""Peak memory of a scheduled program, as a GPU compiler would allocate it.

XLA's CPU compiler has no 16-bit arithmetic and no matmul of transposed operands. It keeps float32
and transposed copies that a GPU does not, so its own figure is far above a GPU's. Here a value and
its conversions, transposes and copies share one buffer, of the narrowest size. An elementwise
result is recomputed at its users if its operands are in memory anyway, as GPU fusion does.
"""

from itertools import accumulate
from typing import Any

from jaxtrain.estimate.hlo import Instruction, computations_of, size_of

Computations = dict[str, list[Instruction]]
Buffers = dict[str, tuple[str, ...]]  # by instruction, and by name#k for a tuple's element k

# Their result is a view of an operand.
VIEWS = {
    "bitcast", "reshape", "transpose", "copy", "convert", "get-tuple-element", "bitcast-convert",
    "copy-start", "copy-done",
}  # fmt: skip
FREE = {"constant", "iota", "partition-id", "replica-id", "after-all", "broadcast"}
# Operations that are not elementwise: their operands and results are in memory.
SOLID = {
    "dot", "convolution", "custom-call", "scatter", "gather", "sort", "while", "call", "all-reduce",
    "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "dynamic-update-slice",
    "concatenate", "conditional", "reduce-window", "select-and-scatter",
}  # fmt: skip
SMALL = 1024  # bytes; smaller buffers are ignored


class Lives:
    """Live ranges of a computation's buffers (first and last use), and their bytes."""

    def __init__(self, computations: Computations, instructions: list[Instruction]):
        self.buffers = _buffers(computations, instructions)
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        for at, i in enumerate(instructions):
            mine = self.buffers[i.name]
            for name in (*mine, *self.read_by(i)):
                self.first.setdefault(name, at)
                self.last[name] = at
            if len(mine) == 1 and not i.type.startswith("(") and size_of(i.type) >= SMALL:
                size = size_of(i.type)
                self.sizes[mine[0]] = min(size, self.sizes.get(mine[0], size))

    def read_by(self, i: Instruction) -> set[str]:
        return {name for operand in i.operands for name in self.buffers.get(operand, ())}


def peak_bytes(hlo: str) -> int:
    """Peak bytes of a step's temporary buffers, without arguments and results."""
    computations, entry = computations_of(hlo)
    return _peak(computations, entry) if entry else 0


def _peak(computations: Computations, name: str) -> int:
    instructions = computations[name]
    lives = Lives(computations, instructions)
    outside = {
        name
        for i in instructions
        if i.op == "parameter" or i.root
        for name in lives.buffers[i.name]
    }
    _recompute(computations, instructions, lives)
    change = [0] * (len(instructions) + 1)
    for name, size in lives.sizes.items():
        if name not in outside:
            change[lives.first[name]] += size
            change[lives.last[name] + 1] -= size
    inside = {
        at: max(
            _peak(computations, called) for called in i.attributes("body", "to_apply", "branch")
        )
        for at, i in enumerate(instructions)
        if i.op in ("while", "call", "conditional")
    }
    return max(live + inside.get(at, 0) for at, live in enumerate(accumulate(change)))


def _recompute(computations: Computations, instructions: list[Instruction], lives: Lives) -> None:
    """Drop buffers that cost more to keep than the operands from which they can be recomputed.

    Operands of a matmul or another SOLID operation have to be in memory, so they stay.
    """
    inner = {i.name: computations.get(i.attribute("calls"), [i]) for i in instructions}
    solid = {i.name for i in instructions if any(x.op in SOLID for x in inner[i.name])}
    needed = {name for i in instructions if i.name in solid for name in lives.read_by(i)}
    for i in instructions:
        reduces = any(x.op in ("reduce", "rng") for x in inner[i.name]) or i.op == "parameter"
        keep = i.name in needed or i.name in solid or reduces
        if keep or i.name not in lives.sizes or lives.buffers[i.name] != (i.name,):
            continue
        until = lives.last[i.name]
        sources = {name for name in lives.read_by(i) if name in lives.sizes}
        longer = sum(lives.sizes[n] * max(0, until - lives.last[n]) for n in sources)
        if longer < lives.sizes[i.name] * (until - lives.first[i.name]):
            for name in sources:
                lives.last[name] = max(lives.last[name], until)
            del lives.sizes[i.name]


def _buffers(computations: Computations, instructions: list[Instruction]) -> Buffers:
    """Buffers of each instruction: its own, or those that it is a view of."""
    found: Buffers = {}
    for i in instructions:
        operands = i.operands
        if i.op in ("tuple", "opt-barrier", "optimization-barrier"):
            found[i.name] = tuple(name for o in operands for name in found.get(o, ()))
            found |= {f"{i.name}#{k}": found.get(o, ()) for k, o in enumerate(operands)}
        elif i.op == "get-tuple-element":
            key = f"{operands[0]}#{i.rest.partition('index=')[2].partition(',')[0].strip()}"
            if key not in found:
                found[key] = (key,)
                found[operands[0]] = (*found.get(operands[0], ()), key)
            found[i.name] = found[key]
        elif i.op == "while":  # its results reuse the buffers of its operands
            start = f"{operands[0]}#"
            carried = {k: v for k, v in found.items() if k.startswith(start)}
            found |= {f"{i.name}#{k.removeprefix(start)}": v for k, v in carried.items()}
            found[i.name] = found.get(operands[0], ())
        elif operands and (i.op in VIEWS or _only_looks(computations, i)):
            found[i.name] = found.get(operands[0], ())
        else:
            found[i.name] = () if i.op in FREE or i.type.startswith("(") else (i.name,)
    return found


def _only_looks(computations: Computations, i: Instruction) -> bool:
    """Whether a fusion only converts, transposes or copies its single operand."""
    inner: Any = computations.get(i.attribute("calls"), []) if i.op == "fusion" else []
    return bool(inner) and len(i.operands) == 1 and all(
        x.op in VIEWS or x.op == "parameter" for x in inner
    )  # fmt: skip
