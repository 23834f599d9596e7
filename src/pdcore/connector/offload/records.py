"""The format of one saved block, in host memory and on disk alike.

A record is a header of 256 bytes and the block's bytes behind it::

    offset  size
         0     8  magic
         8     4  CRC-32 of everything behind it; 0 in host memory
        12     4  zeros
        16     8  number of the write, on disk; newer ones are larger
        24     8  bytes of the block
        32    32  digest of what the bytes mean: model, dtype, layout, rank, cache resets
        64     1  bytes of the key
        65    64  the key, filled up with zeros
       129   127  zeros

A record that goes to disk is sealed with its checksum. One that comes from there counts only if
all of it is as it was sealed, so a file that was cut, torn by a crash or damaged costs its blocks
and no more. The checksum finds damage, not forgery: who can write the files can forge them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["HEADER_BYTES", "MAX_KEY_BYTES", "Header", "RecordFormat"]

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 256
MAX_KEY_BYTES = 64
_MAGIC = b"pdcoreK2"
_HEADER = struct.Struct("<8sI4xQQ32sB64s")
_CHECKED_FROM = 12
_MAX_NUMBER = 2**63
"""Nobody writes so often: a header that says so is damaged, and no number could follow it."""


@attrs.frozen
class Header:
    """Whose record it is, and which write it was."""

    key: bytes
    number: int


class RecordFormat:
    """Writes and checks the records of one kind of block.

    Args:
        fingerprint: describes the block's bytes; records of another fingerprint are refused.
        num_bytes: of a block.
    """

    def __init__(self, fingerprint: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.record_bytes = HEADER_BYTES + num_bytes
        self._fingerprint = fingerprint
        self.reset(0)

    def reset(self, num_resets: int) -> None:
        """Refuse the records that were stamped before as many cache resets, wherever they are."""
        text = f"{self._fingerprint}/{self.num_bytes}/{num_resets}".encode()
        self.digest = hashlib.blake2b(text, digest_size=32).digest()

    def stamp(self, record: Bytes, key: bytes) -> None:
        """Write the header of a record whose bytes were just copied."""
        header = _HEADER.pack(_MAGIC, 0, 0, self.num_bytes, self.digest, len(key), key)
        record[:HEADER_BYTES] = 0
        record[: len(header)] = np.frombuffer(header, np.uint8)

    def seal(self, record: Bytes, number: int) -> None:
        """Add number and checksum. Cost: about 0.3 ms a megabyte, not holding the interpreter."""
        record[16:24] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        record[8:12] = np.frombuffer(_checksum(record).to_bytes(4, "little"), np.uint8)

    def header(self, data: bytes) -> Header | None:
        """Read a header; None where there is no record, or one of another kind of block."""
        magic, _, number, num_bytes, digest, key_bytes, key = _HEADER.unpack(data[: _HEADER.size])
        if (magic, num_bytes, digest) != (_MAGIC, self.num_bytes, self.digest):
            return None
        if number >= _MAX_NUMBER:
            return None
        return Header(key[:key_bytes], number)

    def fault(self, record: Bytes, key: bytes, *, is_sealed: bool) -> str | None:
        """Say what is wrong with a record, or None.

        Args:
            record: uint8 (record_bytes,).
            key: whose record it must be.
            is_sealed: whether it must be intact as well; without it, only the header counts.
        """
        header = self.header(record[: _HEADER.size].tobytes())
        if header is None:
            return "there is no record of this model, layout and version"
        if header.key != key:
            return "the record is of another prefix"
        if is_sealed and record[8:12].tobytes() != _checksum(record).to_bytes(4, "little"):
            return "the record is damaged: its checksum does not fit"
        return None


def _checksum(record: Bytes) -> int:
    return zlib.crc32(record[_CHECKED_FROM:].data)
