"""Parser of HLO text: computations, their instructions and sizes."""

import math
import re
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2} | {f"f8{x}": 1 for x in ("e4m3fn", "e5m2", "e4m3", "e8m0fnu")}
SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[fsuc]\d+)\[([\d,]*)\]")
COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")


class Instruction(NamedTuple):
    name: str
    type: str
    op: str
    rest: str  # operands and attributes
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+(?:#\d+)?)", self.rest.split("), ")[0])

    def attribute(self, name: str) -> str:
        found = re.search(name + r"=%([\w.-]+)", self.rest)
        return found[1] if found else ""

    def attributes(self, *names: str) -> list[str]:
        """Computations named by attributes with these prefixes: single ones, or lists in braces."""
        found = re.findall(rf"(?:{'|'.join(names)})\w*=(%[\w.-]+|\{{%[^}}]*)", self.rest)
        return re.findall(r"%([\w.-]+)", " ".join(found))


def computations_of(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a program's text, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    current, entry = "", ""
    for line in hlo.splitlines():
        if line.startswith("}"):
            current = ""
        elif current and (found := INSTRUCTION.match(line)):
            name, kind, op, rest = found.groups()
            root = line.lstrip().startswith("ROOT")
            computations[current].append(Instruction(name, kind, op, rest, root))
        elif not current and (found := COMPUTATION.match(line)):
            current = found[1]
            entry = current if line.startswith("ENTRY") else entry
            computations[current] = []
    return computations, entry


def counts_of(kind: str) -> list[int]:
    """Number of elements in each array of a type."""
    return [math.prod(int(n) for n in dims.split(",") if n) for _, dims in SHAPE.findall(kind)]


def size_of(kind: str) -> int:
    total = 0
    for dtype, dims in SHAPE.findall(kind):
        width = WIDTHS.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8
        total += width * math.prod(int(n) for n in dims.split(",") if n)
    return total
