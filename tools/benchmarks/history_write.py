"""Write the history of a run as saves, policies and joins leave it: pages, volumes and loose records.

In: how many snapshots a run has made, and how many are kept. Out: the objects of the repository, in a folder. Kept
snapshots share the manifest of one real save, so that a restore, a gc and a check find what they need. A page is made
after 63 saves, and a volume after each page, as protocol/joining.py makes them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from snapstore import Repository, SaveOptions
from snapstore.format import records
from snapstore.format.keys import page_key
from snapstore.format.pages import make_page, make_volume
from snapstore.format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot
from snapstore.storage.base import ObjectStore
from snapstore.storage.local import LocalStore

#: Saves from one page to the next: the newest snapshot and those kept by KeepLast(3) count twice.
EACH_PAGE = 63
#: Each volume covers as many pages, or this many times as many, as one before it.
GROWTH = 8
#: Policy and reason of a swept snapshot.
POLICY, REASON = "KeepLast(3)", "kept by no policy"
UPLOADS_AT_ONCE = 16


@dataclass(frozen=True)
class RunHistory:
    """The snapshots of a run.

    Attributes:
        made: how many snapshots, those of `after` included.
        keep: how many KeepLast has kept; None: all.
        after: how many snapshots were made since the policy ended; they are kept.
        loose: how many saves have followed the last join.
    """

    run: str
    made: int
    keep: int | None = None
    after: int = 0
    loose: int = 0

    def swept_at(self, made: int) -> int:
        """Return how many snapshots were swept when so many had been made."""
        return 0 if self.keep is None else max(0, min(made, self.made - self.after) - self.keep)

    @property
    def kept(self) -> range:
        """The numbers of the kept snapshots; a number is the step, too."""
        return range(self.swept_at(self.made), self.made)

    @property
    def joins(self) -> list[int]:
        """How many snapshots had been made at each join."""
        return [*range(self.made - self.loose, 1, -EACH_PAGE)][::-1]

    def record(self, template: Snapshot, number: int, state: str = COMMITTED) -> Snapshot:
        """Return a revision of a snapshot's record."""
        revision = (COMMITTED, FORGOTTEN, SWEPT).index(state)
        return msgspec.structs.replace(
            template,
            id=self._id(number),
            run=self.run,
            step=number,
            seq=template.seq + number,
            state=state,
            revision=revision,
            write_id=records.new_id(),
            parent=self._id(number - 1) if number else None,
            bases=[self._id(number - 1)] if number else [],
            created=template.created + number,
            metrics={"loss": 1 / (1 + number), "lr": 3e-4},
            policy=POLICY if revision else "",
            reason=REASON if revision else "",
        )

    def _id(self, number: int) -> str:
        return hashlib.md5(f"{self.run} {number}".encode(), usedforsecurity=False).hexdigest()


def volume_ranges(pages: int) -> list[tuple[int, int]]:
    """Return the first and last page of each volume that is left after so many joins, by ascending numbers."""
    found: list[tuple[int, int]] = []
    while pages:
        size = 1
        while pages % (size * GROWTH) == 0:
            size *= GROWTH
        found.append((pages - size, pages - 1))
        pages -= size
    return found[::-1]


def objects_of(history: RunHistory, template: Snapshot) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the bytes of each object of a run but manifests and packs."""
    graves = whole = 0  # the numbers below are graves of earlier pages, or whole there
    last_pages: list[bytes] = []
    volumes = iter(volume_ranges(len(history.joins)))
    first, last = next(volumes, (0, 0))
    for number, made in enumerate(history.joins):
        swept = history.swept_at(made)
        chosen = [(history.record(template, n, SWEPT), b"") for n in range(graves, swept)]
        live = [history.record(template, n) for n in range(max(whole, swept), made - 1)]
        page = make_page(history.run, number, chosen + [(record, records.encode(record)) for record in live])
        yield page_key(history.run, number), page
        last_pages.append(page)
        if number == last:
            yield make_volume(history.run, first, last_pages)
            last_pages = []
            first, last = next(volumes, (0, 0))
        graves, whole = swept, made - 1
    for number in range(graves, history.made):
        states = [COMMITTED] if number in history.kept else [COMMITTED, FORGOTTEN, SWEPT]
        for state in states[number < whole :]:
            record = history.record(template, number, state)
            yield record.key, records.encode(record)


def write_histories(folder: Path, histories: Iterable[RunHistory]) -> int:
    """Make a repository in a folder, with these runs; return the number of its objects. No cache knows it then."""
    histories = list(histories)
    fresh_cache()
    with Repository.create(folder, options=SaveOptions(threads=1)) as repository:
        template = repository.save({"w": np.arange(64)}, run=histories[0].run, step=0)
        manifests = [ref.key for ref in template.manifests]
        is_kept = any(history.kept for history in histories)
        repository.store.delete([template.key, *([] if is_kept else manifests)])
    folders: set[Path] = set()
    for history in histories:
        for key, data in objects_of(history, template):
            file = folder / key
            if file.parent not in folders:
                file.parent.mkdir(parents=True, exist_ok=True)
                folders.add(file.parent)
            file.write_bytes(data)
    fresh_cache()
    return sum(1 for _ in LocalStore(folder).list(""))


def upload(folder: Path, store: ObjectStore) -> None:
    """Copy every object of a repository in a folder into another store."""
    source = LocalStore(folder)
    keys = [info.key for info in source.list("")]
    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
        for _ in pool.map(partial(_copy, folder, store), keys):
            pass


def _copy(folder: Path, store: ObjectStore, key: str) -> None:
    store.put(key, (folder / key).read_bytes())


def fresh_cache() -> None:
    """Let repositories that are opened from here on begin with an empty cache."""
    os.environ["SNAPSTORE_CACHE_DIR"] = tempfile.mkdtemp(dir=Path(os.environ["SNAPSTORE_CACHE_DIR"]).parent)
