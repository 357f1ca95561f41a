"""Bad sectors: if a disk cannot read some bytes, a second read leaves out the gaps between the wanted ranges.

In: reads of packs that join neighbouring ranges. Out: the same bytes in place. So a bad sector in a blob that no
snapshot needs stops no restore and no rewrite of the blobs around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..arrays import Column
from ..errors import StorageError
from ..format.blobs import pack
from ..storage.os_errors import is_unreadable
from ..text import log


def read_around(
    fill: Callable[[Sequence[pack.RangeRead]], None],
    reads: Sequence[pack.RangeRead],
    ranges: tuple[Column, Column, Column],
) -> None:
    """Call `fill(reads)`; if the disk cannot read some bytes, call it again without the gaps between the ranges.

    Args:
        fill: fills the memory of some reads.
        reads: some of the reads that `pack.plan_reads` has returned for these ranges.
        ranges: offsets and lengths (m,), and their positions (m,) from `pack.plan_reads`.

    Raises:
        StorageError: bytes of a range cannot be read, or the store failed in another way.
    """
    try:
        fill(reads)
        return
    except StorageError as error:
        apart = pack.apart(reads, *ranges) if is_unreadable(error.__cause__) else []
        if not apart:
            raise
        log.warning("%s; skipping bytes that nothing needs", str(error))  # a log record must not hold the error
    fill(apart)  # after the `except`: else a second error would keep the first one, and with it the memory to be filled
