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


OPS = {"mov": lambda a: a, "xor": np.bitwise_xor, "or": np.bitwise_or, "shr": np.right_shift,
       "prmt": lambda a, b, selector: prmt(a, b, int(selector[0])), "lop3": lop3}  # fmt: skip


def emulate(text, operands, width, dtype):
    """Run the text on a warp. operands: [lanes] words each, after `width` results; returns two
    float32 [lanes, width]."""
    values = {f"${width + i}": words for i, words in enumerate(operands)}
    values["%ctaid.z"] = np.zeros(32, WORD)

    def read(name):
        if name in values:
            return values[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, number, WORD)

    results = np.zeros((2, 32, width), np.float32)
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
                results[p, :, int(names[0][0][1:])] = values[source].view(np.float32)
        else:
            values[names[0][0]] = OPS[name.partition(".")[0]](*(read(n) for [n] in names[1:]))
    return results


def words_of(tensor):
    """[1, 8, 4, values] -> 32-bit words of each lane, [values / per word, lanes]."""
    lanes = np.ascontiguousarray(tensor).reshape(32, -1)
    return list(lanes.view(WORD).T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("each", "width"), [(4, 4), (8, 4), (16, 8)])
@pytest.mark.parametrize("form", ["uint8", "int8"])
def test_the_lanes_of_a_warp_compute_the_formula(monkeypatch, form, each, width, dtype):
    rng = np.random.default_rng(0)
    shape = (1, *fragments.LANES, width)
    count = fragments.words(form, each)
    codes = [rng.integers(0, 256, shape).astype(np.uint8).view(form) for _ in range(each)]
    x = rng.standard_normal((*shape[:3], 2 * max(count, width))).astype(jnp.dtype(dtype))
    x_words = np.split(x.view(np.int32), max(1, count // width), -1)
    operands = [word for tensor in (*codes, *x_words) for word in words_of(tensor)]
    sums = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    arrays = [jnp.asarray(c) for c in codes], [jnp.asarray(w) for w in x_words]
    if form == "uint8":
        product = lambda interpret: fragments.int4_sums(*arrays, dtype, interpret)
    else:
        operands += [word for tensor in sums for word in words_of(tensor)]
        product = lambda interpret: fragments.int8_sums(*arrays, sums, dtype, interpret)
    expected = product(True)
    run = lambda text, args: emulate(text, operands, width, dtype)
    monkeypatch.setattr(fragments, "_run", run)
    assert_equal(product(False), expected)


@pytest.mark.parametrize(("each", "width"), [(4, 8), (16, 8)])
def test_the_lanes_of_a_warp_add_the_inputs(monkeypatch, each, width):
    rng = np.random.default_rng(0)
    shape = (1, *fragments.LANES, 2 * max(each, width))
    x = rng.standard_normal(shape).astype(jnp.bfloat16)
    x_words = np.split(x.view(np.int32), max(1, each // width), -1)
    operands = [word for tensor in x_words for word in words_of(tensor)]
    expected = fragments.input_sums([jnp.asarray(w) for w in x_words], each, "bfloat16", True)
    run = lambda text, args: emulate(text, operands, width, "bfloat16")
    monkeypatch.setattr(fragments, "_run", run)
    assert_equal(fragments.input_sums(x_words, each, "bfloat16", False), expected)


def assert_equal(ours, expected):
    for got, wanted in zip(ours, expected, strict=True):
        wanted = np.asarray(wanted).reshape(got.shape)
        np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
