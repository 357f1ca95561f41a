"""Page cache: the pages that processes of this user have read, in a file for each run beside the index.

In: pages as they were read, and how a listing showed them. Out: the same, in order, up to the first that is missing.
Pages never change, so a file only grows. If it is damaged, foreign or cannot be written, that costs requests, nothing
else: each page has its checksum, its run and its number.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import DAMAGE
from ..format.keys import page_key
from ..format.pages import RecordPage, read_page
from ..text import log
from ..threads import msgpack_decoder

#: The size of a page, its time and its tag, as a listing shows them.
Shown = tuple[int, float, str]
#: Before each page: its number, the length of what a listing shows, packed, and its own length.
_HEAD = struct.Struct("<QQQ")
_ENCODER = msgspec.msgpack.Encoder()
_SHOWN = msgpack_decoder(list[Shown])  # one, or none


class PageCache:
    """The files of one repository.

    Args:
        folder: for the files; None: nothing is cached.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, run: str) -> list[tuple[RecordPage, Shown | None]]:
        """Return the pages of a run from number 0 on, and how they were listed; None: no listing had shown one."""
        if self._folder is None:
            return []
        found: list[tuple[RecordPage, Shown | None]] = []
        with suppress(OSError, struct.error, msgspec.DecodeError, *DAMAGE):
            data, at = (self._folder / run).read_bytes(), 0
            while at < len(data):
                number, shown, size = _HEAD.unpack_from(data, at)
                begin = at + _HEAD.size + shown
                listed, page = data[at + _HEAD.size : begin], data[begin : begin + size]
                at = begin + size
                if number == len(found):  # else another process has added it before
                    shown_as = _SHOWN.decode(listed)
                    found.append((read_page(page, page_key(run, number)), shown_as[0] if shown_as else None))
        return found

    def runs(self) -> list[str]:
        """Return the runs of which it has pages."""
        with suppress(OSError):
            return sorted(file.name for file in self._folder.iterdir()) if self._folder is not None else []
        return []

    def add(self, run: str, first: int, pages: Sequence[tuple[RecordPage, Shown | None]]) -> None:
        """Add the pages of a run that follow the first ones, in order."""
        if self._folder is None or [page.number for page, _ in pages] != [*range(first, first + len(pages))]:
            return
        whole = b"".join(
            part
            for page, shown in pages
            for packed in [_ENCODER.encode([shown] if shown else [])]
            for part in (_HEAD.pack(page.number, len(packed), len(page.data)), packed, page.data)
        )
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            file = os.open(self._folder / run, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            try:
                os.write(file, whole)
            finally:
                os.close(file)
        except OSError as error:
            log.info("pages of run %s are not cached: %s", run, error)

    def wipe(self, run: str | None = None) -> None:
        """Remove the pages of a run; None: of all."""
        if self._folder is not None and run is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self._folder is not None and run is not None:
            with suppress(OSError):
                (self._folder / run).unlink(missing_ok=True)
