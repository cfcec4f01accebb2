"""Integers, floats and PTX of Hopper kernels, as operations of MLIR on values of one thread."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf


def int_type() -> Any:
    return ir.IntegerType.get_signless(32)


def long_type() -> Any:
    return ir.IntegerType.get_signless(64)


def float_type() -> Any:
    return ir.F32Type.get()


class Int:
    """An int32 or int64 of a thread, with Python's operators."""

    def __init__(self, value: Any):
        self.value = value

    @property
    def type(self) -> Any:
        return self.value.type

    def _other(self, x: Any) -> Any:
        return x.value if isinstance(x, Int) else arith.constant(self.type, x)

    def __add__(self, x: Any) -> "Int":
        return Int(arith.addi(self.value, self._other(x)))

    def __sub__(self, x: Any) -> "Int":
        return Int(arith.subi(self.value, self._other(x)))

    def __mul__(self, x: Any) -> "Int":
        return Int(arith.muli(self.value, self._other(x)))

    def __floordiv__(self, x: Any) -> "Int":
        return Int(arith.divui(self.value, self._other(x)))

    def __mod__(self, x: Any) -> "Int":
        return Int(arith.remui(self.value, self._other(x)))

    def __and__(self, x: Any) -> "Int":
        return Int(arith.andi(self.value, self._other(x)))

    def __or__(self, x: Any) -> "Int":
        return Int(arith.ori(self.value, self._other(x)))

    def __xor__(self, x: Any) -> "Int":
        return Int(arith.xori(self.value, self._other(x)))

    def __rshift__(self, x: Any) -> "Int":
        return Int(arith.shrui(self.value, self._other(x)))

    def __lshift__(self, x: Any) -> "Int":
        return Int(arith.shli(self.value, self._other(x)))

    def compare(self, how: str, x: Any) -> Any:
        return arith.cmpi(getattr(arith.CmpIPredicate, how), self.value, self._other(x))

    def __lt__(self, x: Any) -> Any:
        return self.compare("slt", x)

    def equals(self, x: Any) -> Any:
        return self.compare("eq", x)

    def wide(self) -> "Int":
        """As an int64, with its sign."""
        return Int(arith.extsi(long_type(), self.value))


def const(x: int) -> Int:
    return Int(arith.constant(int_type(), x))


def select(condition: Any, yes: Int, no: Int) -> Int:
    return Int(arith.select(condition, yes.value, no.value))


def zero() -> Any:
    return arith.constant(float_type(), ir.FloatAttr.get(float_type(), 0.0))


def float_const(x: float) -> Any:
    return arith.constant(float_type(), ir.FloatAttr.get(float_type(), x))


def address(ref: Any) -> Int:
    """Address of memory: int64, of shared memory int32."""
    pointer = mgpu.utils.memref_ptr(ref)
    space = llvm.PointerType(pointer.type).address_space
    return Int(llvm.ptrtoint(int_type() if space == 3 else long_type(), pointer))


def ptx(code: str, *args: Any, out: str = "", effects: bool = True, early: bool = False) -> Any:
    """Inline PTX. out: a letter for each result, r (int32) or f (float32). early: results are
    written before all arguments are read. Returns raw values, a list if there are several."""
    kinds = [{"r": int_type, "f": float_type, "l": long_type}[x]() for x in out]
    raw = [x.value if isinstance(x, Int) else x for x in args]
    letter = lambda x: "f" if x.type == float_type() else "l" if x.type == long_type() else "r"
    constraints = [f"=&{x}" if early else f"={x}" for x in out] + [letter(x) for x in raw]
    result: Any = ir.Type.parse("!llvm.void")
    if kinds:
        result = kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds)
    found = llvm.inline_asm(
        result,
        raw,
        code,
        ",".join(constraints),
        has_side_effects=effects or not kinds,
        convergent="bar." in code or ".sync" in code,
    )
    if not kinds:
        return None
    if len(kinds) == 1:
        return found
    return [llvm.extractvalue(kind, found, [i]) for i, kind in enumerate(kinds)]


def run_if(condition: Any, body: Callable[[], None]) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.yield_([])


def loop(count: Int, carried: Sequence[Any], body: Callable[[Int, list], Sequence[Any]]) -> list:
    """body(i, carried) -> carried, for i from 0 to count - 1; carried: raw values."""
    start, step = const(0), const(1)
    op = scf.ForOp(start.value, count.value, step.value, list(carried))
    with ir.InsertionPoint(op.body):
        results = body(Int(op.induction_variable), list(op.inner_iter_args))
        scf.yield_(list(results))
    return list(op.results)


def loop_while(
    carried: Sequence[Any], condition: Callable[[list], Any], body: Callable[[list], Sequence[Any]]
) -> list:
    """body(carried) -> carried, while condition(carried); carried: raw values."""
    types = [x.type for x in carried]
    op = scf.WhileOp(types, list(carried))
    before, after = op.before.blocks.append(*types), op.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        scf.condition(condition(list(before.arguments)), list(before.arguments))
    with ir.InsertionPoint(after):
        scf.yield_(list(body(list(after.arguments))))
    return list(op.results)


def concurrently(*roles: tuple[Any, Callable[[], None]]) -> None:
    """Each body by the threads of its condition. Threads of different ones may wait for each
    other."""
    for condition, body in roles:
        run_if(condition, body)


def init_barrier(barrier: Int, arrivals: int) -> None:
    ptx(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", barrier)


def arrive(barrier: Int) -> None:
    ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", barrier)


def wait_barrier(barrier: Int, parity: Int) -> None:
    """Wait for the end of a barrier's phase: the first, of parity 0, or a later one."""
    ptx(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
        " @!p bra AGAIN; }",
        barrier, parity,
    )  # fmt: skip


def after(address: Int, read: Int) -> Int:
    """The address, known only with `read`, which depends on loads: they have ended before it is
    used. %ctaid.z is 0, which the compiler does not know."""
    zero = Int(ptx("mov.u32 $0, %ctaid.z;", out="r", effects=False))
    return address + (read & zero)
