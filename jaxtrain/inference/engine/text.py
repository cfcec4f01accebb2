"""Incremental detokenization: emits whole characters, and holds back a possible stop string."""

import codecs
from collections.abc import Sequence

from jaxtrain.data import Tokenizer


class TextStream:
    """Text of one request's new tokens. behind: as in `Request`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], behind: bool = False):
        self.pieces, self.prefix = tokenizer.pieces, b"" if behind else tokenizer.prefix
        self.stops = [stop for stop in stops if stop]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # text that may begin a stop string

    def add(self, token: int) -> tuple[str, bool]:
        """Text that a token adds, and whether a stop string ends the text here."""
        piece = self.pieces[token] if token < len(self.pieces) else b""
        if self.prefix and piece:
            piece, self.prefix = piece.removeprefix(self.prefix), b""
        return self._cut(self.decoder.decode(piece))

    def add_all(self, tokens: Sequence[int]) -> str:
        """Text that tokens add, if there are no stop strings."""
        text, begin = "", 0
        while self.prefix and begin < len(tokens):  # it is cut off the first piece that has bytes
            text += self.add(tokens[begin])[0]
            begin += 1
        known = len(self.pieces)
        new = b"".join(self.pieces[token] for token in tokens[begin:] if token < known)
        return text + self.decoder.decode(new)

    def end(self) -> tuple[str, bool]:
        """Text that was held back, and whether it contains a stop string after all."""
        text, stopped = self._cut(self.decoder.decode(b"", final=True))
        if stopped:
            return text, True
        text, self.pending = text + self.pending, ""
        return text, False

    def _cut(self, new: str) -> tuple[str, bool]:
        if not self.stops:
            return new, False
        text = self.pending + new
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.pending = ""
            return text[: min(found)], True
        self.pending = text[len(text) - self._waiting(text) :]
        return text[: len(text) - len(self.pending)], False

    def _waiting(self, text: str) -> int:
        """Number of last characters that may be the beginning of a stop string."""
        most = max(map(len, self.stops), default=1) - 1
        for size in range(min(most, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
