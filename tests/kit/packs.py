"""Find the blobs of a pack without its footer, as docs/format.md promises."""

from __future__ import annotations

from collections.abc import Iterator

from snapstore import FormatError, IntegrityError
from snapstore.format.blobs import blob, pack


def scan(data: bytes | bytearray | memoryview, where: str) -> Iterator[tuple[int, blob.Header]]:
    """Yield (offset, header) of every whole blob from the start of a pack's bytes, up to the first damage."""
    data = memoryview(data)
    at = pack.HEADER.size
    while at + blob.HEADER.size <= len(data):
        try:
            header = blob.parse(data[at:], f"{where} at {at}")
        except (FormatError, IntegrityError):
            return
        yield at, header
        at += blob.length_of(header)
        at += -at % blob.ALIGNMENT
