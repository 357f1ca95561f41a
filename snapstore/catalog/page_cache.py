"""Page cache: the pages that processes of this user have read, in a file for each run beside the index.

In: pages as they were read, what they say as rows, and how a listing showed them. Out: the rows of all pages up to the
first that is missing, and single pages. Pages never change, so a file only grows. If it is damaged, foreign or cannot
be written, that costs requests or memory, nothing else: rows have a checksum, and each page its own, its run and its
number.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
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
_NOTES = msgpack_decoder(tuple[Shown | None, list[int]])


@dataclass(frozen=True, slots=True)
class KnownPage:
    """What is kept in memory of a page.

    Attributes:
        mends: the numbers of damaged pages whose facts it has.
        shown: how it is listed; None: no listing had shown it.
    """

    number: int
    rows: JoinedRows
    mends: list[int]
    shown: Shown | None


class PageCache:
    """The files of one repository.

    Args:
        folder: for the files; None: the pages stay in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._places: dict[str, dict[int, tuple[int, int]]] = {}  # run -> number -> where its page is in the file
        self._held: dict[str, dict[int, bytes]] = {}  # run -> number -> a page that could not be written

    def load(self, run: str) -> list[KnownPage]:
        """Return the pages of a run from number 0 on; if the file is damaged, none."""
        if self._folder is None:
            return []
        found: list[KnownPage] = []
        places = self._places[run] = {}
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
                    if number == len(found):  # else another process has added it before
                        shown, mends = _NOTES.decode(notes)
                        found.append(KnownPage(number, JoinedRows.unpack(rows), mends, shown))
                        places[number] = begin, page_bytes
                    file.seek(begin + page_bytes)
        except FileNotFoundError:
            pass
        except (OSError, struct.error, ValueError, msgspec.DecodeError) as error:
            log.info("the cached pages of run %s are damaged: %s", run, error)
            self._remove(run)
            return []
        return found

    def page(self, run: str, number: int) -> bytes | None:
        """Return the bytes of a page, which may be damaged; None: it is not here."""
        place = self._places.get(run, {}).get(number)
        if place is None or self._folder is None:
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
        if (
            self._folder is None
            or in_memory
            or [known.number for _, known in pages] != [*range(first, first + len(pages))]
        ):
            self._held.setdefault(run, {}).update({page.number: page.data for page, _ in pages})
            return
        parts: list[bytes] = []
        ends: dict[int, tuple[int, int]] = {}
        size = 0
        for page, known in pages:
            notes, rows = _ENCODER.encode((known.shown, known.mends)), known.rows.pack()
            checksum = xxhash.xxh3_64_intdigest(notes + rows)
            head = _HEAD.pack(known.number, len(notes), len(rows), len(page.data), checksum)
            parts += [head, notes, rows, page.data]
            size += sum(map(len, parts[-4:]))
            ends[known.number] = size, len(page.data)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not first:
                (self._folder / run).unlink(missing_ok=True)
            file = os.open(self._folder / run, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            try:
                os.write(file, b"".join(parts))
                begin = os.lseek(file, 0, os.SEEK_CUR) - size
            finally:
                os.close(file)
            places = {number: (begin + end - page_bytes, page_bytes) for number, (end, page_bytes) in ends.items()}
            self._places.setdefault(run, {}).update(places)
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
