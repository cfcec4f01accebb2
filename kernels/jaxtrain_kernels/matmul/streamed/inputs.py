"""Inputs of a warp of `streamed` that multiplies, as operands of `mma`.

A piece of 32 inputs of a row is 64 bytes, which 4 lanes load. With fewer rows than 8 a load of the
warp has several pieces of each row, and the lanes that need them get them by shuffles: so one row's
inputs need an eighth of the loads and registers that 8 rows' do.
"""

import functools
import itertools
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import Int, const, ptx, run_if, select, zero
from jaxtrain_kernels.hopper.words import floats
from jaxtrain_kernels.matmul.streamed import exchange
from jaxtrain_kernels.matmul.streamed.order import PIECE
from jaxtrain_kernels.matmul.streamed.plan import StreamPlan

PIECE_BYTES = 2 * PIECE


class WarpInputs:
    """Of one phase. source: address of the rows, of `width` values each. exchanged: some may not
    have been written yet."""

    def __init__(
        self,
        plan: StreamPlan,
        p: int,
        source: Int,
        width: int,
        warp: Int,
        lane: Int,
        exchanged: bool,
    ):
        self.plan, self.p, self.source, self.width = plan, p, source, width
        self.warp, self.lane, self.exchanged = warp, lane, exchanged
        phase = plan.phases[p]
        self.in_turn = plan.pieces * phase.deep  # pieces
        self.count = self.in_turn * phase.turns
        self.lanes = 32 // plan.most_rows  # of a row
        self.each = self.lanes // 4  # pieces of a row in a load
        self.row, self.piece = lane // self.lanes, (lane % self.lanes) // 4
        self.t = lane & 3
        # The lane that has the first piece of a load which this lane multiplies.
        self.from_lane = ((lane >> 2) & (plan.most_rows - 1)) * self.lanes + self.t

    def offset(self, piece: Int) -> Int:
        """Of one of the warp's pieces in a row."""
        turn, rest = piece // self.in_turn, piece % self.in_turn
        at = ((turn * self.plan.warps + self.warp) * self.in_turn + rest) * PIECE_BYTES
        return at + self.t * 16

    def address(self, n: Int) -> Int:
        """Of the lane's 16 bytes of load n; lanes without a piece have the last one."""
        piece, last = n * self.each + self.piece, const(self.count - 1)
        if self.count % self.each:
            piece = select(piece < self.count, piece, last)
        most = const(self.plan.rows - 1)
        row = select(self.row < self.plan.rows, self.row, most)
        return self.source + (row * (2 * self.width) + self.offset(piece)).wide()

    @property
    def stride(self) -> int:
        """Bytes from a load to the next one in the same turn."""
        return self.each * PIECE_BYTES

    def load(self, first: Int, loads: int) -> list[Any]:
        """Words of some loads of a turn from number `first` on; some may not have been written."""
        return exchange.load_words(self.address(first), loads, self.stride)

    def complete(self, first: Int, words: list[Any]) -> list[Any]:
        """The words of `load`, when all are there."""
        if not self.exchanged:
            return words
        return exchange.complete_words(self.address(first), words, self.stride)

    def await_some(self) -> None:
        """Wait until some of the inputs are there: many rows are not loaded again and again."""
        if self.exchanged and self.plan.most_rows > 2:
            piece = self.t * (self.count // 4)
            row = const((self.plan.rows - 1) * 2 * self.width)
            exchange.await_word(self.source + (row + self.offset(piece) - self.t * 16).wide())

    def load_gains(self, gain: Int, loads: int) -> list[Any]:
        """Gains of the lane's inputs, for a norm."""
        piece = self.piece & (self.count - 1) if self.count < self.each else self.piece
        return exchange.load_words(gain + self.offset(piece).wide(), loads, self.stride)

    def put_squares(self, words: list[Any], squares: Int) -> None:
        """Write the sums of squares of the warp's inputs, which `words` are, to shared memory."""
        totals = [zero() for _ in range(4)]
        for i, x in enumerate(itertools.chain(*(floats(word) for word in words))):
            square = "fma.rn.f32 $0, $1, $1, $2;"
            totals[i % 4] = ptx(square, x, totals[i % 4], out="f", effects=False)
        total = functools.reduce(arith.addf, totals)
        if self.count < self.each:
            total = select(self.piece < self.count, Int(total), Int(zero())).value
        for distance in (1, 2, 4, 8, 16):
            if distance < self.lanes:
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        at = squares + ((self.warp + self.p * self.plan.warps) * 8 + self.row) * 4
        is_first = (self.lane % self.lanes).equals(0)
        run_if(is_first, lambda: ptx("st.shared.f32 [$0], $1;", at, total))

    def pieces(self, words: list[Any], skipped: int, count: int) -> list[list[Any]]:
        """Operands of some pieces of loads, without the first ones: 4 words each."""
        found = []
        for n in range(skipped, skipped + count):
            load, piece = words[n // self.each * 4 :][:4], n % self.each
            if self.each > 1:
                shuffle = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
                lane = self.from_lane + 4 * piece
                load = [ptx(shuffle, word, lane, out="r", effects=False) for word in load]
            found.append(load)
        return found
