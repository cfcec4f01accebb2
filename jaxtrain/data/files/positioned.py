"""Base class of read-only, seekable files that are read by byte ranges."""

import io
from typing import override


class PositionedReader(io.RawIOBase):
    """Raw file with its byte position in `at`. A subclass's `readinto` reads there and moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def end(self) -> int:
        """Size of the file in bytes."""
        raise NotImplementedError

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self.at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at}
        self.at = (self.end() if whence == io.SEEK_END else base[whence]) + offset
        return self.at
