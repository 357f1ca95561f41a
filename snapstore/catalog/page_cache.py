"""Page cache: the pages that processes of this user have read, in a file for each run beside the index.

In: pages as they were read, what they say as rows, and how a listing showed them. Out: the rows of all pages up to the
first that is missing, and single pages. Pages never change, so a file only grows. If it is damaged, foreign or cannot
be written, that costs requests or memory, nothing else: rows have a checksum, and each page its own, its run and its
number.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from ..format.pages import RecordPage
from ..text import log
from ..threads import msgpack_decoder
from .joined import JoinedRows

#: The size of a page, its time and its tag, as a listing shows them.
Shown = tuple[int, float, str]
#: Before each page: its number, the lengths of what is known of it, of its rows and of itself, and a checksum of the
#: first two.
_HEAD = struct.Struct("<QQQQQ")
_ENCODER = msgspec.msgpack.Encoder()
_NOTES = msgpack_decoder(tuple[Shown | None, list[int], int])


@dataclass(frozen=True, slots=True)
class KnownPage:
    """What is kept in memory of a page.

    Attributes:
        mends: the numbers of damaged pages whose facts it has.
        shown: how it is listed; None: no listing had shown it.
        digest: XXH3-64 of its bytes.
    """

    number: int
    rows: JoinedRows
    mends: list[int]
    shown: Shown | None
    digest: int


class PageCache:
    """The files of one repository.

    Args:
        folder: for the files; None: the pages stay in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._places: dict[str, array[int]] = {}  # by run: where each page is in the file, and its length
        self._held: dict[str, dict[int, bytes]] = {}  # run -> number -> a page that could not be written

    def load(self, run: str) -> Iterator[KnownPage]:
        """Yield the pages of a run from number 0 on; up to where the file is damaged."""
        if self._folder is None:
            return
        places, at = self._places.setdefault(run, array("Q")), 0
        del places[:]
        try:
            with (self._folder / run).open("rb", buffering=1 << 16) as file:
                end = os.fstat(file.fileno()).st_size
                while (at := file.tell()) < end:
                    number, notes_bytes, rows_bytes, page_bytes, checksum = _HEAD.unpack(file.read(_HEAD.size))
                    begin = at + _HEAD.size + notes_bytes + rows_bytes
                    if begin + page_bytes > end:
                        raise ValueError("it ends early")
                    notes, rows = file.read(notes_bytes), file.read(rows_bytes)
                    if xxhash.xxh3_64_intdigest(notes + rows) != checksum:
                        raise ValueError("its checksum differs")
                    if number == len(places) // 2:  # else another process has added it before
                        shown, mends, digest = _NOTES.decode(notes)
                        places.extend((begin, page_bytes))
                        yield KnownPage(number, JoinedRows.unpack(rows), mends, shown, digest)
                    file.seek(begin + page_bytes)
        except FileNotFoundError:
            pass
        except (OSError, struct.error, ValueError, msgspec.DecodeError) as error:
            log.info("the cached pages of run %s are damaged: %s", run, error)
            with suppress(OSError):
                os.truncate(self._folder / run, at)

    def page(self, run: str, number: int) -> bytes | None:
        """Return the bytes of a page, which may be damaged; None: it is not here."""
        place = self._places.get(run, array("Q"))[2 * number : 2 * number + 2]
        if not place or self._folder is None:
            return self._held.get(run, {}).get(number)
        with suppress(OSError), (self._folder / run).open("rb") as file:
            return os.pread(file.fileno(), place[1], place[0])
        return None

    def runs(self) -> list[str]:
        """Return the runs of which it has pages."""
        with suppress(OSError):
            return sorted(file.name for file in self._folder.iterdir()) if self._folder is not None else []
        return []

    def add(
        self, run: str, first: int, pages: Sequence[tuple[RecordPage, KnownPage]], *, in_memory: bool = False
    ) -> None:
        """Add the pages of a run that follow the first ones, in order.

        Args:
            in_memory: write them into no file.
        """
        places = self._places.setdefault(run, array("Q"))
        if not first:
            del places[:]
        is_next = [known.number for _, known in pages] == [*range(len(places) // 2, len(places) // 2 + len(pages))]
        if self._folder is None or in_memory or not is_next:
            self._held.setdefault(run, {}).update({page.number: page.data for page, _ in pages})
            return
        parts: list[bytes] = []
        for page, known in pages:
            notes, rows = _ENCODER.encode((known.shown, known.mends, known.digest)), known.rows.pack()
            checksum = xxhash.xxh3_64_intdigest(notes + rows)
            head = _HEAD.pack(known.number, len(notes), len(rows), len(page.data), checksum)
            parts += [head + notes + rows, page.data]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not first:
                (self._folder / run).unlink(missing_ok=True)
            file = os.open(self._folder / run, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            try:
                size = sum(map(len, parts))
                written = os.write(file, b"".join(parts))
                end = os.lseek(file, 0, os.SEEK_CUR) - written
                if written < size:
                    os.ftruncate(file, end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            for about, data in zip(parts[::2], parts[1::2], strict=True):
                places.extend((end + len(about), len(data)))
                end += len(about) + len(data)
        except OSError as error:
            log.info("pages of run %s are not cached: %s", run, error)
            self._held.setdefault(run, {}).update({page.number: page.data for page, _ in pages})

    def wipe(self, run: str | None = None) -> None:
        """Remove the pages of a run; None: of all."""
        if run is not None:
            self._remove(run)
            return
        self._places.clear()
        self._held.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove(self, run: str) -> None:
        self._places.pop(run, None)
        self._held.pop(run, None)
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / run).unlink(missing_ok=True)
