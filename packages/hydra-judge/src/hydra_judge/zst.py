# SPDX-License-Identifier: Apache-2.0
"""A Zstandard stream that says when it breaks off.

The stream reader of the `zstandard` package ends silently where a file was cut; half a corpus would then look like a
whole one.
"""

import io
from pathlib import Path
from typing import Any

import zstandard

__all__ = ["ZstReader"]

_CHUNK = 1 << 16


class ZstReader(io.RawIOBase):
    """Decompressed bytes of a file of one or more frames.

    `readinto` raises EOFError where the file breaks off and OSError where it is damaged, as gzip does.
    """

    def __init__(self, path: Path):
        self._file = path.open("rb")
        self._object: Any = None
        self._input = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._input:
                self._input = self._file.read(_CHUNK)
            if not self._input:
                if self._object is not None:
                    raise EOFError("the compressed file breaks off")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        if self._object is None:
            self._object = zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._object.decompress(self._input)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._input = b""
        if self._object.eof:
            self._input, self._object = self._object.unused_data, None

    def close(self) -> None:
        self._file.close()
        super().close()
