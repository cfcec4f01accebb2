"""The PTX of products with integer codes on tensor cores, as an emulated warp runs it."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.matmul.integers.triton import fragments

WORD = np.uint32


def floats(words, dtype):
    """[lanes] words -> [lanes, 2] values, the low half first."""
    halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
    return halves.view(jnp.dtype(dtype)).astype(np.float64)


def mma(dtype, left, right, before):
    """m16n8k16 with PTX's layout of the operands; before and result: four float32 a lane."""
    lane = np.arange(32)
    group, q = lane // 4, lane % 4
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, word in enumerate(left):
        for half in (0, 1):
            rows, inputs = group + 8 * (i % 2), 2 * q + half + 8 * (i // 2)
            a[rows, inputs] = floats(word, dtype)[:, half]
    for i, word in enumerate(right):
        for half in (0, 1):
            b[2 * q + half + 8 * i, group] = floats(word, dtype)[:, half]
    cells = [(group + 8 * (i // 2), 2 * q + i % 2) for i in range(4)]
    for cell, value in zip(cells, before, strict=True):
        c[cell] = value.view(np.float32)
    d = (a @ b + c).astype(np.float32)
    return [np.ascontiguousarray(d[cell]).view(WORD) for cell in cells]


def prmt(a, b, selector):
    pool = np.stack(
        [*((a >> 8 * i) & 0xFF for i in range(4)), *((b >> 8 * i) & 0xFF for i in range(4))]
    )
    return sum(pool[selector >> 4 * i & 7].astype(WORD) << WORD(8 * i) for i in range(4))


def lop3(a, b, c, table):
    assert table[0] == 0xEA  # (a & b) | c
    return (a & b) | c


OPS = {"mov": lambda a: a, "xor": np.bitwise_xor, "or": np.bitwise_or, "and": np.bitwise_and,
       "shr": np.right_shift, "prmt": lambda a, b, selector: prmt(a, b, int(selector[0])),
       "lop3": lop3}  # fmt: skip


def emulate(text, operands, dtype, results=4):
    """Run the text on a warp. operands: [lanes] words each, after so many results. Returns the
    registers, and two float32 [lanes, 4] of those with 64 bits."""
    values = {f"${results + i}": words for i, words in enumerate(operands)}
    values["%ctaid.z"] = np.zeros(32, WORD)

    def read(name):
        if name in values:
            return values[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, number, WORD)

    wide = np.zeros((2, 32, 4), np.float32)
    for line in text.strip("{}\n").split("\n"):
        name, _, rest = line.partition(" ")
        names = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^,{}; ]+", rest)]
        if name == ".reg":
            continue
        if name.startswith("mma"):
            assert f".{'bf16' if dtype == 'bfloat16' else 'f16'}.f32" in name
            new = mma(dtype, *([read(n) for n in part] for part in names[1:]))
            values |= dict(zip(names[0], new, strict=True))
        elif name == "mov.b64":
            for p, source in enumerate(names[1]):
                wide[p, :, int(names[0][0][1:])] = values[source].view(np.float32)
        elif name.startswith("fma"):
            assert name == f"fma.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}x2"
            x, by, plus = (floats(read(n), dtype) for [n] in names[1:])
            rounded = (x * by + plus).astype(jnp.dtype(dtype))
            values[names[0][0]] = np.ascontiguousarray(rounded).view(WORD)[:, 0]
        else:
            values[names[0][0]] = OPS[name.partition(".")[0]](*(read(n) for [n] in names[1:]))
    return values, wide


def words_of(tensor):
    """[1, 8, 4, 4] -> 32-bit words of each lane, [4, lanes]."""
    return list(np.ascontiguousarray(tensor).reshape(32, 4).view(WORD).T)


def draw(rng, count):
    """`count` tensors of words."""
    shape = count, 1, *fragments.LANES, 4
    return list(rng.integers(0, 2**32, shape).astype(WORD).view(np.int32))


def inputs(rng, count, dtype):
    """`count` tensors of words of two inputs."""
    x = rng.standard_normal((count, 1, *fragments.LANES, 8)).astype(jnp.dtype(dtype))
    return list(x.view(np.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("loads", [1, 2, 4])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_the_lanes_of_a_warp_compute_the_formula(monkeypatch, form, loads, dtype):
    rng = np.random.default_rng(0)
    codes = draw(rng, loads)
    x_words = inputs(rng, loads if form == "int4" else max(1, loads // 2), dtype)
    operands = [word for tensor in (*codes, *x_words) for word in words_of(tensor)]
    sums = list(rng.standard_normal((2, 1, *fragments.LANES, 4)).astype(np.float32))
    arrays = [jnp.asarray(c) for c in codes], [jnp.asarray(w) for w in x_words]
    if form == "int4":
        product = lambda interpret: fragments.int4_sums(*arrays, dtype, interpret)
    else:
        operands += [word for tensor in sums for word in words_of(tensor)]
        product = lambda interpret: fragments.int8_sums(*arrays, sums, dtype, interpret)
    expected = product(True)
    monkeypatch.setattr(fragments, "_run", lambda text, args: emulate(text, operands, dtype)[1])
    assert_equal(product(False), expected)


@pytest.mark.parametrize("loads", [1, 4])
def test_the_lanes_of_a_warp_add_the_inputs(monkeypatch, loads):
    x_words = inputs(np.random.default_rng(0), loads, "bfloat16")
    operands = [word for tensor in x_words for word in words_of(tensor)]
    expected = fragments.input_sums([jnp.asarray(w) for w in x_words], "bfloat16", True)
    run = lambda text, args: emulate(text, operands, "bfloat16")[1]
    monkeypatch.setattr(fragments, "_run", run)
    assert_equal(fragments.input_sums(x_words, "bfloat16", False), expected)


@pytest.fixture
def emulated(monkeypatch):
    """`elementwise_inline_asm` of texts with one result, in a warp."""

    def run(text, *, args, constraints, pack, result_shape_dtypes):
        words = [np.asarray(x).view(WORD).reshape(32, 4).T for x in args]
        assert constraints.count(",") == pack * (1 + len(args)) - 1
        out = np.zeros((4, 32), WORD)
        for first in range(0, 4, pack):
            operands = [word for tensor in words for word in tensor[first : first + pack]]
            values, _ = emulate(text, operands, "bfloat16", pack)
            out[first : first + pack] = [values[f"${i}"] for i in range(pack)]
        [result] = result_shape_dtypes
        return [np.ascontiguousarray(out.T).view(result.dtype).reshape(result.shape)]

    monkeypatch.setattr(fragments.plgpu, "elementwise_inline_asm", run)


@pytest.mark.parametrize("loads", [1, 2])
def test_the_lanes_of_a_warp_multiply_rows_with_each_other(emulated, loads):
    """Squares of rows, besides products that nobody reads."""
    rng = np.random.default_rng(0)
    x_words = [jnp.asarray(w) for w in inputs(rng, loads, "bfloat16")]
    sums = rng.standard_normal((1, *fragments.LANES, 4)).astype(np.float32)
    sums[..., 2:] = 0
    args = x_words, jnp.asarray(sums), draw(rng, 3), "bfloat16"
    ours, expected = (fragments.gram_sums(*args, interpret) for interpret in (False, True))
    assert_equal([ours], [expected])
    x = np.concatenate([np.asarray(w).view(jnp.bfloat16) for w in x_words], -1)
    squares = np.square(x.astype(np.float32)).sum((0, 2, 3)) + 0
    c = np.arange(8)
    np.testing.assert_allclose((ours - sums)[0, c, c // 2, c % 2], squares, rtol=1e-5)


def test_the_lanes_of_a_warp_multiply_inputs_by_gains(emulated):
    words, gains = inputs(np.random.default_rng(0), 2, "bfloat16")
    args = jnp.asarray(words), jnp.asarray(gains), "bfloat16"
    ours, expected = (fragments.scale_inputs(*args, interpret) for interpret in (False, True))
    np.testing.assert_array_equal(ours, expected)


def assert_equal(ours, expected):
    for got, wanted in zip(ours, expected, strict=True):
        wanted = np.asarray(wanted).reshape(got.shape)
        np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
