"""Products of a tile's keys and values with a head's queries and probabilities, in a warp.

Rows of the products on tensor cores are tokens, then channels; columns are the queries. A lane has
the queries 2t and 2t + 1, in scores of tokens g and g + 8, and in sums of channels.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.attention.paged.hopper.plan import HEAD, PageStreamPlan
from jaxtrain_kernels.attention.paged.hopper.ring import PageRing
from jaxtrain_kernels.hopper.emit import (
    Int,
    const,
    float_const,
    ptx,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.hopper.words import LOAD, bf16_of_int8, mma, to_word

MASKED = -3e38


class Queries:
    """Loads a head's queries as columns: 16 channels for each product, in the order of the keys."""

    def __init__(self, plan: PageStreamPlan, q: Int, head: Int, g: Int, t: Int):
        self.plan, self.q, self.head, self.g, self.t = plan, q, head, g, t

    def load(self, b: Int) -> list[list[Any]]:
        """Two words of each 16 channels."""
        plan, found = self.plan, []
        real = self.g < plan.G
        row = (b * plan.K + self.head) * plan.G + select(real, self.g, const(0))
        at = self.q + (row * HEAD).wide() * 2
        load = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        for piece in range(HEAD // 64 if plan.quantized else HEAD // 32):
            lane = (self.t * 32 + 128 * piece) if plan.quantized else (self.t * 16 + 64 * piece)
            for part in range(2 if plan.quantized else 1):
                words = ptx(load, at + (lane + 16 * part).wide(), out="rrrr")
                words = [select(real, Int(x), const(0)).value for x in words]
                for i in range(2):
                    pair = words[2 * i : 2 * i + 2]
                    if plan.quantized:  # channels 0 and 2, then 1 and 3, as `bf16_of_int8` has them
                        codes = "0x5410", "0x7632"
                        pair = [
                            ptx(f"prmt.b32 $0, $1, $2, {x};", *pair, out="r", effects=False)
                            for x in codes
                        ]
                    found.append(pair)
        return found


class HeadTile:
    """Adds tiles of a head to an online softmax."""

    def __init__(self, plan: PageStreamPlan, ring: PageRing, queries: list, head: Int, lane: Int):
        self.plan, self.ring, self.queries, self.head, self.lane = plan, ring, queries, head, lane
        self.g, self.t = lane >> 2, lane & 3
        self.groups = plan.tokens // 16

    def add(self, carried: list[Any], first: Int, length: Int) -> list[Any]:
        """Add the tile whose first token has this position. carried: position of the ring, peaks,
        totals, sums."""
        position, peaks, totals, sums = carried[:2], carried[2:4], carried[4:6], carried[6:]
        position, scores = self.scores(position)
        scores = [self.masked(x, first + 16 * m, length) for m, x in enumerate(scores)]
        tops = []
        for e in range(2):
            top = peaks[e]
            own = [x[i] for x in scores for i in (e, 2 + e)]
            best = own[0]
            for x in own[1:]:
                best = arith.maxnumf(best, x)
            for distance in (4, 8, 16):
                best = arith.maxnumf(best, mgpu.utils.shfl_bfly(best, distance))
            tops.append(arith.maxnumf(top, best))
        shares = [self._exp2(arith.subf(old, new)) for old, new in zip(peaks, tops, strict=True)]
        scores = [[self._exp2(arith.subf(x[i], tops[i % 2])) for i in range(4)] for x in scores]
        for e in range(2):
            total = arith.mulf(totals[e], shares[e])
            for x in scores:
                total = arith.addf(total, arith.addf(x[e], x[2 + e]))
            totals = [total if i == e else old for i, old in enumerate(totals)]
        sums = [arith.mulf(x, shares[i % 2]) for i, x in enumerate(sums)]
        position, sums = self.values(position, scores, sums)
        return [*position, *tops, *totals, *sums]

    def _exp2(self, x: Any) -> Any:
        return ptx("ex2.approx.ftz.f32 $0, $1;", x, out="f", effects=False)

    def scales(self, begin: Int, m: int) -> list[Any]:
        """Scales of tokens g and g + 8 of a group of 16."""
        at = begin + (self.plan.scales_at + 64 * self.plan.K * m) + self.head * 4
        rows = self.g * (4 * self.plan.K), (self.g + 8) * (4 * self.plan.K)
        return [ptx("ld.shared.f32 $0, [$1];", at + row, out="f") for row in rows]

    def scores(self, position: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Scores in base 2 of each group of 16 tokens."""
        plan, found, read = self.plan, [], const(0)
        begin, stride = self.ring.await_slot(position), plan.strides[0]
        row_bytes = HEAD if plan.quantized else 2 * HEAD
        own = begin + self.head * row_bytes + self.t * 16 + self.g * stride
        for m in range(self.groups):
            parts = [[zero() for _ in range(4)] for _ in range(2)]
            for piece in range(row_bytes // 64):
                rows = [
                    ptx(LOAD, own + ((16 * m + 8 * r) * stride + 64 * piece), out="rrrr")
                    for r in range(2)
                ]
                read = read | Int(rows[0][0]) | Int(rows[1][0])
                if plan.quantized:
                    for i in range(4):
                        a = [bf16_of_int8(row[i], shift) for shift in (0, 8) for row in rows]
                        parts[i % 2] = mma(a, self.queries[4 * piece + i], parts[i % 2])
                else:
                    for i in range(2):
                        a = [row[2 * i + n] for n in range(2) for row in rows]
                        parts[i] = mma(a, self.queries[2 * piece + i], parts[i])
            scores = [arith.addf(a, b) for a, b in zip(*parts, strict=True)]
            factors = [float_const(plan.factor)] * 2
            if plan.quantized:
                scales = self.scales(begin, m)
                factors = [arith.mulf(x, y) for x, y in zip(scales, factors, strict=True)]
            found.append([arith.mulf(x, factors[i // 2]) for i, x in enumerate(scores)])
        return self.ring.release(position, self.lane, read), found

    def masked(self, scores: list[Any], first: Int, length: Int) -> list[Any]:
        """Scores of 16 tokens without those that the query does not see."""
        found = list(scores)
        for row in range(2):
            token = first + self.g + 8 * row
            seen = token < length
            if self.plan.window is not None:
                seen = arith.andi(seen, token.compare("sge", length - (1 + self.plan.window)))
            for i in (2 * row, 2 * row + 1):
                found[i] = arith.select(seen, scores[i], float_const(MASKED))
        return found

    def values(
        self, position: list[Any], scores: list[list[Any]], sums: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Add the values times their probabilities to the sums of channels."""
        plan, sums, read = self.plan, list(sums), const(0)
        begin, stride = self.ring.await_slot(position), plan.strides[1]
        upper = self.lane & 7  # a lane gives the address of a row of one of four matrices
        first, second = (self.lane >> 3) & 1, self.lane >> 4
        token, channel = (first, second) if plan.quantized else (second, first)
        own = begin + self.head * (HEAD if plan.quantized else 2 * HEAD)
        own = own + (upper + token * 8) * stride + channel * 16
        load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
        for m in range(self.groups):
            p = scores[m]
            if plan.quantized:
                scales = self.scales(begin, m)
                p = [arith.mulf(x, scales[i // 2]) for i, x in enumerate(p)]
            turn = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            b = [ptx(turn, to_word(*p[2 * r : 2 * r + 2]), out="r") for r in range(2)]
            for j in range(HEAD // (32 if plan.quantized else 16)):
                words = ptx(load, own + (16 * m * stride + 32 * j), out="rrrr")
                read = read | Int(words[0])
                if not plan.quantized:
                    sums[4 * j : 4 * j + 4] = mma(words, b, sums[4 * j : 4 * j + 4])
                    continue
                for i in range(2):
                    four = slice(8 * j + 4 * i, 8 * j + 4 * i + 4)
                    a = [
                        bf16_of_int8(words[2 * i + n], shift) for n in range(2) for shift in (0, 8)
                    ]
                    sums[four] = mma(a, b, sums[four])
        return self.ring.release(position, self.lane, read), sums
