"""Products of up to 8 rows with integer codes on tensor cores, from registers (`mma.m16n8k16`).

A warp's lane (c, q), c < 8 and q < 4, holds words of 4 codes: columns 4 c .. 4 c + 3 of some rows
(`fragment_order`). That is how `mma` wants its left operand where two rows of it are two of these
columns, and the pairs of inputs along it two rows of codes: `prmt` puts the two rows' bytes side by
side, and a bit operation makes two 16-bit floats of them. No conversion, no subtraction and no
shared memory: 1 operation a code of int4, 1.5 of int8.

An integer becomes a float by its bits: those of 128 (bfloat16) or 1024 (float16) take `n` as their
low bits, which gives 128 + n. int4 begins its sums with -(128 + 8) times the sum of the inputs.
int8 multiplies 128 + (code & 127) by the inputs and 128 + (code & 128) by the negative inputs;
the difference is the code. Products are exact and sums float32. The errors were emulated in NumPy,
with sums truncated after each `mma`, for up to 14,336 bfloat16 inputs. Inputs had outliers (1 in
200 is 100 times as large) or a mean as large as their deviation. The largest error of 256 columns
is 8e-6 (int8) and 4e-5 (int4) of the results' root mean square. Rounding to bfloat16 costs more,
4e-3 to 8e-3.

Every tensor is [warps, 8, 4, 4], so that Triton gives each lane the last 4 values of (c, q). Of
codes they are 4 rows, of sums 4 columns. The right operand's lane (c, q) has the inputs of row c of
x, at the rows of codes of q. A result's lane has rows 2q and 2q + 1 of x at its own columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

LANES = (8, 4)  # c, q
BASE = {"bfloat16": 0x4300, "float16": 0x6400}  # bits of 128 and 1024
ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}  # two ones


def int4_sums(loaded, x_words, dtype: str, interpret: bool):
    """Sums of x (codes - 8) over a step's rows of codes, for rows 2q and 2q + 1 of x.

    loaded: int32 tensors, each with 4 rows of codes; x_words: int32 tensors, each with words of 4
    rows of codes. Returns two float32 tensors.
    """
    if interpret:
        codes = _unpacked(loaded, jnp.uint8)
        halves = jnp.stack([codes & 15, codes >> 4], 4)
        values = halves.reshape(*codes.shape[:3], -1, 4).astype(jnp.float32) - 8
        return _interpreted(values, x_words, dtype)
    return _run(_int4_text(4 * len(loaded), dtype), (*loaded, *x_words))


def int8_sums(loaded, x_words, sums, dtype: str, interpret: bool):
    """`sums` (two float32 tensors, as `int4_sums` returns) plus x codes of a step's rows."""
    if interpret:
        more = _interpreted(_unpacked(loaded, jnp.int8).astype(jnp.float32), x_words, dtype)
    else:
        text = _int8_text(4 * len(loaded), dtype)
        both = sums if len(sums) == 2 else (*sums, jnp.zeros_like(sums[0]))
        return _run(text, (*loaded, *x_words, *both))[: len(sums)]
    return tuple(a + b for a, b in zip(sums, more, strict=False))


def input_sums(x_words, dtype: str, interpret: bool):
    """Sums of the inputs of a step's rows of int4 codes, as `int4_sums` returns them."""
    if interpret:
        ones = jnp.ones((*x_words[0].shape[:3], 8 * len(x_words), 4))
        return _interpreted(ones, x_words, dtype)
    x = [f"${4 + i}" for i in range(4 * len(x_words))]
    lines = _inputs_text(x[::2], x[1::2], ONES[dtype], dtype)
    lines += [f"mov.f32 d{4 * p + j}, n{p};" for p in range(2) for j in range(4)]
    return _run(_wrapped(0, lines), x_words)


def gram_sums(x_words, sums, loaded, dtype: str, interpret: bool):
    """`sums` (float32) plus products of rows of x with each other, whose diagonal is squares.

    A lane's first two results are those of row c with rows 2q and 2q + 1; the others are 0.
    loaded: int32 tensors of a step, whose loads must not be later than this.
    """
    if interpret:
        pairs = jax.lax.bitcast_convert_type(jnp.concatenate(x_words, -1), jnp.dtype(dtype))
        x = pairs.reshape(*pairs.shape[:3], -1).astype(jnp.float32)
        products = jnp.einsum("wmqk,wnqk->wmn", x, x, precision="highest")
        both = products.reshape(*products.shape[:2], 4, 2)
        return sums + jnp.pad(both, ((0, 0),) * 3 + ((0, 2),))
    words = 4 * (len(x_words) + len(loaded))
    [out] = plgpu.elementwise_inline_asm(
        _gram_text(4 * len(x_words), len(loaded), dtype),
        args=(sums, *x_words, *loaded),
        constraints=",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * words),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(sums.shape, jnp.float32)],
    )
    return out


def _gram_text(count: int, loads: int, dtype: str) -> str:
    """Text for `count` words of x, which waits for the first word of each load."""
    four = lambda first: "{" + ",".join(f"${first + i}" for i in range(4)) + "}"
    firsts = [f"${8 + count + 4 * i}" for i in range(loads)]
    lines = [".reg .b32 t, z;", *_waited(firsts), "and.b32 z, t, z;"]
    for i in range(8, 8 + count, 2):
        left, before = f"{{${i},z,${i + 1},z}}", four(4 if i == 8 else 0)
        lines.append(_mma(dtype, four(0), left, f"${i}", f"${i + 1}", before))
    return "\n".join(["{", *lines, "}"])


def _waited(words: list[str]) -> list[str]:
    """Registers t, which depends on these words, and z = 0, which ptxas does not know: the third
    grid index. Without such a use, ptxas delays loads to save registers, and few bytes are in
    flight."""
    ors = [f"or.b32 t, t, {word};" for word in words[1:]]
    return [f"mov.b32 t, {words[0]};", *ors, "mov.u32 z, %ctaid.z;"]


def scale_inputs(words, gains, dtype: str, interpret: bool):
    """Inputs times gains, rounded to dtype; int32, two of them a word."""
    if interpret:
        x, by = (jax.lax.bitcast_convert_type(w, jnp.dtype(dtype)) for w in (words, gains))
        return jax.lax.bitcast_convert_type(x * by, jnp.int32)
    [out] = plgpu.elementwise_inline_asm(
        _scale_text(dtype),
        args=(words, gains),
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
    )
    return out


def _scale_text(dtype: str) -> str:
    """Text for a word. A product is a sum with -0, as Ampere has no other for bfloat16."""
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    lines = [".reg .b32 z;", f"mov.b32 z, {0x80008000};", f"fma.rn.{kind} $0, $1, $2, z;"]
    return "\n".join(["{", *lines, "}"])


def _unpacked(loaded, dtype):
    """Codes [warps, 8, 4, rows, 4 columns] of words."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(w, dtype) for w in loaded], 3)


def _interpreted(values, x_words, dtype: str):
    """The same sums without `mma`. values [warps, 8, 4, inputs, 4 columns]."""
    pairs = jax.lax.bitcast_convert_type(jnp.concatenate(x_words, -1), jnp.dtype(dtype))
    x = pairs.reshape(*pairs.shape[:3], -1).astype(jnp.float32)  # axis 1: row of x
    x = x[..., : values.shape[3]]  # few rows of codes: their words are there more than once
    y = jnp.einsum("wcqkj,wmqk->wcmj", values, x, precision="highest")
    both = y.reshape(*y.shape[:2], 4, 2, y.shape[-1])
    return both[..., 0, :], both[..., 1, :]


def _run(text: str, args):
    """Run the text on each lane's values. It returns two sums in a 64-bit word: JAX 0.11.2 cannot
    lower two results."""
    shape = args[0].shape
    inputs = "".join(4 * {"float32": "f", "int32": "r"}[arg.dtype.name] for arg in args)
    [both] = plgpu.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(["=&l"] * 4 + list(inputs)),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, np.dtype("int64"))],
    )
    with jax.enable_x64(True):
        halves = both, jax.lax.shift_right_logical(both, jnp.full(shape, 32, jnp.int64))
        words = [half.astype(jnp.int32) for half in halves]
    return tuple(jax.lax.bitcast_convert_type(word, jnp.float32) for word in words)


def _int4_text(each: int, dtype: str) -> str:
    """Text for `each` rows of codes."""
    base = BASE[dtype] * 0x10001
    code, x = _operands(each)
    b = [f"b{i}" for i in range(each)]
    lines = _after(each, base)
    for i in range(0, each, 2):  # even inputs of two rows of codes, then odd ones
        lines += [f"prmt.b32 b{i}, {x(i)}, {x(i + 1)}, 0x5410;",
                  f"prmt.b32 b{i + 1}, {x(i)}, {x(i + 1)}, 0x7632;"]  # fmt: skip
    lines += _inputs_text(b[::2], b[1::2], (base | 0x80008) ^ 0x80008000, dtype)
    for j in (0, 2):
        for i in range(0, each, 2):
            lines.append(f"prmt.b32 p, {code(i)}, {code(i + 1)}, {_adjacent(j)};")
            for a, shift in enumerate((0, 8, 4, 12)):
                lines += [*_shifted(shift), _placed(f"a{a}", shift, 0x000F000F)]
            out = _quad(j)
            before = out if i else "{n0,n1,n2,n3}"
            lines.append(_mma(dtype, out, "{a0,a1,a2,a3}", b[i], b[i + 1], before))
    return _wrapped(each, lines)


def _inputs_text(low, high, ones: int, dtype: str) -> list[str]:
    """n = ones x the sum of the inputs: n0 and n2 of row 2q of x, n1 and n3 of row 2q + 1."""
    n = "{n0,n1,n2,n3}"
    lines = [f"mov.b32 o, {ones};", *(f"mov.f32 n{i}, 0f00000000;" for i in range(4))]
    return lines + [_mma(dtype, n, "{o,o,o,o}", *b, n) for b in zip(low, high, strict=True)]


def _int8_text(each: int, dtype: str) -> str:
    """Text for `each` rows of codes."""
    base = BASE[dtype] * 0x10001
    code, x = _operands(each)
    first = 4 + each + max(4, each // 2)
    lines = _after(each, base)
    lines += [f"xor.b32 b{i}, {x(i)}, 0x80008000;" for i in range(each // 2)]
    for j in (0, 2):
        for i in range(0, each, 4):
            w = i // 2
            for a, row in ((0, i), (2, i + 2)):
                lines.append(f"prmt.b32 p, {code(row)}, {code(row + 1)}, {_adjacent(j)};")
                for column, shift in ((0, 0), (1, 8)):
                    lines += [*_shifted(shift),
                              _placed(f"a{a + column}", shift, 0x007F007F),
                              _placed(f"s{a + column}", shift, 0x00800080)]  # fmt: skip
            out = _quad(j)
            before = out if i else _quad(j, "$", first)
            lines += [_mma(dtype, out, "{a0,a1,a2,a3}", x(w), x(w + 1), before),
                      _mma(dtype, out, "{s0,s1,s2,s3}", f"b{w}", f"b{w + 1}", out)]  # fmt: skip
    return _wrapped(each, lines)


def _after(each: int, base: int) -> list[str]:
    """Register f = base, which the compiler takes to depend on every row of codes."""
    waited = _waited([f"${4 + i}" for i in range(each)])
    return [*waited, f"lop3.b32 f, t, z, {base}, 0xEA;"]


def _wrapped(words_of_x: int, lines: list[str]) -> str:
    """Declare the registers, and pack the sums d of each column into a 64-bit result."""
    registers = [f".reg .b32 f, o, p, t, z, a<4>, s<4>, b<{words_of_x + 1}>;",
                 ".reg .f32 n<4>, d<8>;"]  # fmt: skip
    results = [f"mov.b64 ${j}, {{d{j},d{4 + j}}};" for j in range(4)]
    return "\n".join(["{", *registers, *lines, *results, "}"])


def _mma(dtype: str, out: str, left: str, low: str, high: str, before: str) -> str:
    kind = "bf16" if dtype == "bfloat16" else "f16"
    op = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return f"{op} {out}, {left}, {{{low},{high}}}, {before};"


def _operands(each: int):
    """Names of the operands with the codes of row i and with the i-th word of x."""
    return lambda i: f"${4 + i}", lambda i: f"${4 + each + i}"


def _quad(j: int, name: str = "d", first: int = 0) -> str:
    """Sums of columns j and j + 1 for rows 2q and 2q + 1 of x."""
    numbers = (j, 4 + j, j + 1, 4 + j + 1)
    return "{" + ",".join(f"{name}{first + n}" for n in numbers) + "}"


def _adjacent(j: int) -> str:
    """Selector of `prmt`: columns j and j + 1 of one row, then of another."""
    return "0x7632" if j else "0x5410"


def _shifted(shift: int) -> list[str]:
    return [f"shr.u32 t, p, {shift};"] if shift else []


def _placed(name: str, shift: int, mask: int) -> str:
    """Two floats: the base f, with bits of p (or its shifted value t) under the mask."""
    return f"lop3.b32 {name}, {'t' if shift else 'p'}, {mask}, f, 0xEA;"
