"""Exchange of results between blocks: 8-byte words that carry a tag, and waits for them.

A word has two bfloat16 or a float32, and in its upper half the number of the layer that wrote it,
from 1 on. A word is written and read atomically, so no fence and no counter is needed: a reader
polls the words that it needs until they have the tag. All words are zeros before a call.

All layers use the same words. None is overwritten too early: a block writes words of a layer after
it has all words of the phase before, for which each block has read all that it needs of the
earlier ones.
"""

from collections.abc import Sequence
from typing import Any

from jaxtrain_kernels.hopper.emit import Int, ptx


def poll(places: Sequence[tuple[Int, int]], tag: Int, left: Int) -> tuple[list[Any], Int]:
    """Wait until the two adjacent words at each place (address, offset) have the tag; return the
    words' values, and `left`, or 0 after a timeout. left: most reads; 0 after an earlier timeout,
    when all words are read once. Only words that were missing are read again."""
    many, (addresses, offsets) = len(places), zip(*places, strict=True)
    wanted, most = f"${3 * many + 1}", f"${3 * many + 2}"
    declared = "".join(f" .reg .pred d{i}; .reg .b64 a{i}, b{i};" for i in range(many))
    # Without a value before the loop, a word's register would be live in all of the kernel.
    begin = "".join(
        f" setp.ne.b32 d{i}, u, u; mov.b64 a{i}, 0; mov.b64 b{i}, 0;" for i in range(many)
    )
    loads = "".join(
        f" @!d{i} ld.relaxed.gpu.global.v2.b64 {{a{i}, b{i}}}, [${2 * many + 1 + i}+{offset}];"
        for i, offset in enumerate(offsets)
    )
    tests = "".join(
        f" mov.b64 {{u, v}}, a{i}; setp.eq.b32 d{i}, v, {wanted};"
        f" mov.b64 {{u, v}}, b{i}; setp.eq.and.b32 d{i}, v, {wanted}, d{i};"
        + (f" and.pred all, all, d{i};" if i else " mov.pred all, d0;")
        for i in range(many)
    )
    ends = "".join(
        f" mov.b64 {{${2 * i}, v}}, a{i}; mov.b64 {{${2 * i + 1}, v}}, b{i};" for i in range(many)
    )
    *words, left_value = ptx(
        f"{{ .reg .pred all, more;{declared} .reg .b32 u, v, n; mov.b32 u, 0; mov.b32 n, {most};"
        f"{begin} AGAIN:{loads}{tests} vote.sync.all.pred all, all, 0xffffffff; @all bra DONE;"
        f" sub.s32 n, n, 1; setp.gt.s32 more, n, 0; @more bra AGAIN; DONE:"
        f" selp.b32 ${2 * many}, {most}, 0, all;{ends} }}",
        *addresses, tag, left, out="r" * (2 * many + 1),
    )  # fmt: skip
    return words, Int(left_value)


def write_word(address: Int, value: Any, tag: Int, offset: int = 0) -> None:
    """Write a word."""
    ptx(
        f"{{ .reg .b64 w; mov.b64 w, {{$1, $2}}; st.relaxed.gpu.global.b64 [$0+{offset}], w; }}",
        address, value, tag,
    )  # fmt: skip
