"""Keys and values of a block's split of a head, which a warp loads into slots of shared memory.

The last split of a head is the new token, which is not in the pages yet; the others have equal
parts of the earlier tokens. A slot has keys of STEPS steps, then their values: a step has a token
for each half of a warp that multiplies.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import Int, const, loop, ptx, select

if TYPE_CHECKING:
    from jaxtrain_kernels.decode_layers.hopper.block import LayersBlock


class SplitRange(NamedTuple):
    """Positions begin .. end of a head's tokens; groups: of a slot each."""

    begin: Int
    end: Int
    groups: Int


def key_range(block: "LayersBlock", layer: Int, start: Int) -> SplitRange:
    """The block's tokens in the pages. start: position of the new token."""
    plan, at = block.plan, block.refs.windows + (layer * 4).wide()
    window = Int(ptx("ld.global.b32 $0, [$1];", at, out="r"))
    first = start - window
    first = select(first < 0, const(0), first)
    parts, split = plan.splits - 1, block.block % plan.splits
    each = (start - first + (parts - 1)) // parts
    begin = first + split * each
    end = begin + each
    end = select(end < start, end, start)
    groups = (end - begin + (plan.tokens - 1)) // plan.tokens
    has_keys = arith.andi(block.block < plan.shape.heads * plan.splits, split < parts)
    has_keys = arith.andi(has_keys, begin < end)
    return SplitRange(begin, end, select(has_keys, groups, const(0)))


def token_row(block: "LayersBlock", layer: Int, token: Int) -> Int:
    """Byte of a token's head in the pages."""
    plan, s = block.plan, block.plan.shape
    at = block.refs.table + ((token // plan.page) * 4).wide()
    page = Int(ptx("ld.global.b32 $0, [$1];", at, out="r"))
    row = ((layer * plan.pages + page) * plan.page + token % plan.page) * s.kv_heads
    return (row + block.block // plan.splits).wide() * (s.head_dim * 2)


def load_keys(block: "LayersBlock") -> None:
    """Load the keys and values of all layers, by one warp: half of it a token's key, and half its
    value, so that the weights' loads need not wait for those of many small rows."""
    plan, ring, refs = block.plan, block.keys, block.refs
    start, _ = block.load_start()
    row_bytes, lane = plan.shape.head_dim * 2, block.lane
    is_key, piece = lane < 16, (lane & 15) * 16
    source = select(is_key, refs.keys, refs.values_kept) + piece.wide()
    offset = piece + select(is_key, const(0), const(plan.tokens * row_bytes))

    def layer(index: Int, carried: list[Any]) -> list[Any]:
        tokens = key_range(block, index, start)

        def group(i: Int, carried: list[Any]) -> list[Any]:
            number, position = Int(carried[0]), carried[1:]
            slot, full = ring.await_free(number, position)
            first = tokens.begin + i * plan.tokens
            count = tokens.end - first
            count = select(count < plan.tokens, count, const(plan.tokens))

            def copy(token: Int, _: list[Any]) -> list[Any]:
                at = slot + offset + token * row_bytes
                ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16;",
                    at, source + token_row(block, index, first + token),
                )  # fmt: skip
                return []

            loop(count, [], copy)
            ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", full)
            return [(number + 1).value, *ring.next(position)]

        return loop(tokens.groups, carried, group)

    loop(const(plan.shape.depth), [const(0).value, *ring.start], layer)
