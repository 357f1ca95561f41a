"""Scan pages and volumes: read every page itself, and compare it with its copies.

In: an open repository whose records may be joined. Out: what its pages say, and findings. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..catalog.joined import Joined
from ..catalog.pages import PAGE_LIMIT_BYTES, VOLUME_LIMIT_BYTES, PageReader
from ..catalog.read_twice import listed, tried
from ..format.keys import page_key, parse_page_key, parse_volume_key
from ..format.pages import RecordPage, read_page, read_volume
from ..storage.base import ObjectStore
from .report import Findings


@dataclass(frozen=True, slots=True)
class PageScan:
    """The result of a scan of pages and volumes.

    Attributes:
        joined: by run.
        bad_volumes: keys of the volumes that are damaged, or differ from their pages.
        gone: keys of the pages that the index knows, and the store has not.
    """

    joined: dict[str, Joined]
    bad_volumes: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def scan_pages(store: ObjectStore, findings: Findings) -> PageScan:
    """Read all pages and volumes.

    Raises:
        StorageError: the store failed.
    """
    for key in listed(store, "pages/"):
        if parse_page_key(key) is None:
            findings.stray("page", key)
    joined = PageReader(store, takes_volumes=False).read(None)
    for one in joined.values():
        for key, why in one.damaged.items():
            findings.problem("page", key, why)
    bad: list[str] = []
    for key in sorted(listed(store, "volumes/")):
        parsed = parse_volume_key(key)
        if parsed is None:
            findings.stray("volume", key)
            continue
        run, first, _ = parsed
        pages = tried(store, partial(_pages_of, store, key))
        if pages is None:
            bad.append(key)
            continue
        for number, data in enumerate(pages, first):
            of = page_key(run, number)
            page = tried(store, partial(_page_of, store, of))
            if page is not None and page.data != data:
                bad.append(key)
                break
    for key in bad:
        findings.problem("volume", key, f"{key}: is damaged, or differs from its pages; a repair removes it")
    return PageScan(joined, tuple(bad))


def _page_of(store: ObjectStore, key: str) -> RecordPage:
    return read_page(store.get(key, limit_bytes=PAGE_LIMIT_BYTES), key)


def _pages_of(store: ObjectStore, key: str) -> list[bytes]:
    return [*read_volume(store.get(key, limit_bytes=VOLUME_LIMIT_BYTES), key)]
