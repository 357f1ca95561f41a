"""SaveSession: a save's claim, with the snapshots that it may build on. SharedSession: another rank's part in it.

In: run, step, parent. Out: lineage, bases and the next sequence number, chosen after the session is announced; then the
committed record. The bases are committed snapshots whose packs no mark names, so no gc is deleting what this save will
reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import nlargest
from typing import Any, Self

import msgspec

from ..catalog.config import is_foreign
from ..catalog.history import View
from ..catalog.needed_keys import keys_of, needed_keys
from ..context import Context
from ..errors import DAMAGE, CapabilityError, FormatError, IntegrityError, StorageError
from ..format import records
from ..format.keys import record_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.records import COMMITTED, MadeFor, ManifestRef, Snapshot
from ..text import log
from .claim import Claim, Putter
from .liveness import aborted
from .same_repository import confirmed

#: The command that proves the snapshots that were copied without verification.
PROVE = "snapstore repair --level restore --apply"
#: The first save of a run reads at most so many manifests and records of other runs; of each snapshot only the largest
#: manifests, that hold at least one byte in SMALL_PART of its state.
MOST_MANIFESTS, MOST_RECORDS, SMALL_PART = 8, 16, 64
#: Ids of the last saves that this process has begun.
_begun: deque[str] = deque(maxlen=256)


class SaveSession(Claim):
    """One save in flight. Use as a context manager: an exception before the commit leaves no snapshot.

    Args:
        also: ids of further snapshots that may become bases.
        last: id of this process's last save of the run; None: there is none, or it has restored the run since.
        first_seq: the lowest sequence number to take.

    Attributes:
        id: of the snapshot to commit.
        parent: id of the parent; None: the newest of the run.
        usable_bases: the snapshots that this save may reference, best first.
        others: ids of those that are only looked through for equal chunks: snapshots of other runs.
        manifests: of these that were read, by SHA-256.
    """

    _last: str | None = None
    _first_seq = 0
    _trusted: str | msgspec.UnsetType = msgspec.UNSET  # uuid: snapshots that are `unproven` by it may be bases

    def __init__(
        self,
        context: Context,
        run: str,
        step: int,
        *,
        parent: str | None,
        also: Sequence[str] = (),
        last: str | None = None,
        first_seq: int = 0,
    ) -> None:
        super().__init__(context, record_key(run, step, records.new_id(), 0), "save", self._aborted)
        self._index, self._also, self.parent, self._last = context.index, also, parent, last
        self._first_seq = first_seq
        _begun.append(self.id)
        self.usable_bases: list[Snapshot] = []
        self.others: set[str] = set()
        self.manifests: dict[str, Manifest] = {}
        self.seq = 0

    def _look(self) -> None:
        """Choose lineage, bases and sequence number.

        The records of the run suffice, unless the parent or another base is in another run. They are listed twice: if
        one listing lacks what other processes have saved, the save would count as older than that, and policies would
        forget it.
        """
        marked = self.marked()
        view = self._index.refresh(self.run, list_twice=True)
        if any(view.get(name) is None for name in (self.parent, *self._also) if name):
            view = self._index.refresh()
        self._warn_of_others(view)
        self._choose(view, marked)
        self.seq = view.next_seq(self.run, self._first_seq)
        parent = view.get(self.parent) if self.parent else None  # if it is of this run, it may be forgotten
        is_first = view.newest(self.run) is None and not self.usable_bases
        has_none = self.parent is None or (parent is not None and parent.run == self.run)
        if is_first and has_none and marked is not None and self._context.options.share_runs:
            self._choose_others(marked)
        if not self.usable_bases:
            self._compare_seed()

    def _warn_of_others(self, view: View) -> None:
        """Warn if another process has saved the run since this process's last save."""
        last, newest = view.get(self._last) if self._last else None, view.newest(self.run)
        if last is not None and newest is not None and newest.seq > last.seq and newest.id not in _begun:
            log.warning(
                "run=%s another process has put %s (id:%s) since this one saved %s; if it is another job: two jobs on "
                "one run replace each other's steps, so stop one of them, or give it another run",
                self.run,
                newest.ref,
                newest.id[:12],
                last.ref,
            )

    def _compare_seed(self) -> None:
        """Compare the digest seed with that of a manifest, of any run. If there are bases, the save compares theirs.

        Raises:
            FormatError: the config seems to be another repository's.
        """
        with suppress(StorageError):  # manifests that cannot be read say nothing
            if is_foreign(self.store, self._context.config):
                raise FormatError(
                    f"{self.store.url}: config and manifests have different digest seeds, so one of them belongs to "
                    "another repository; run 'snapstore check', and if it reports config, 'snapstore repair --apply'"
                )

    def _choose(self, view: View, marked: set[str] | None) -> None:
        """Set the parent, and choose the bases: the parent, the newest of the run and `also`.

        A snapshot is no base if a mark names one of its packs or manifests, if it is damaged, or if it was copied
        without verification: a chunk there may have other content than its digest says, and a save reads no such chunk.
        """
        newest = view.newest(self.run)
        newest_id = newest.id if newest else None
        if self.parent is None and self.verb == "save":  # the source of a copy tells its parent
            try:
                view.latest(self.run)
            except (IntegrityError, StorageError) as error:
                log.warning("run=%s the parent of this save may not be the newest snapshot: %s", self.run, error)
        self.parent = self.parent or newest_id
        for name in dict.fromkeys((self.parent, newest_id, *self._also)):
            snapshot = view.get(name) if name else None
            if marked is None or snapshot is None or snapshot.state != COMMITTED or snapshot in self.usable_bases:
                continue
            if snapshot.unproven and snapshot.unproven != self._trusted:
                text = "run=%s base %s was copied without verification: not used; run '%s' to prove it"
                (log.warning if self.verb == "save" else log.info)(text, self.run, snapshot.ref, PROVE)
                continue
            try:
                if marked.isdisjoint(needed_keys(self._index, snapshot)):
                    self.usable_bases.append(snapshot)
                else:
                    log.info("run=%s base %s is being collected: not used", self.run, snapshot.ref)
            except (*DAMAGE, StorageError) as error:
                log.warning("run=%s base %s cannot be read and is not used: %s", self.run, snapshot.ref, error)

    def _choose_others(self, marked: set[str]) -> None:
        """Let the newest snapshots of other runs be bases of a run without a snapshot, for equal chunks alone.

        The rules of `_choose` hold. A manifest is read whole: its header names the objects that no mark may name.
        """
        left = MOST_MANIFESTS
        try:
            for snapshot in self._index.newest_elsewhere(self.run, MOST_RECORDS):
                if not left:
                    break
                wanted = [ref for ref in main_manifests(snapshot) if ref.sha256 not in self.manifests]
                if snapshot.unproven or self._index.marks.why(snapshot) or not 0 < len(wanted) <= left:
                    continue
                left -= len(wanted)
                try:
                    self.manifests |= {ref.sha256: manifest.read(self.store, ref, None) for ref in wanted}
                except (*DAMAGE, CapabilityError) as error:
                    log.info("run=%s %s is not looked through: %s", self.run, snapshot.ref, error)
                    continue
                headers = [self.manifests[ref.sha256].header for ref in main_manifests(snapshot)]
                has_seed = all(header.digest_seed == self._context.config.digest_seed for header in headers)
                if has_seed and marked.isdisjoint(keys_of(snapshot, headers)):
                    self.usable_bases.append(snapshot)
                    self.others.add(snapshot.id)
        except StorageError as error:
            log.info("run=%s no further snapshot of another run is looked through: %s", self.run, error)

    def commit(self, **fields: Any) -> Snapshot:
        """Create the record; see `publish` for what it raises."""
        snapshot = Snapshot(
            id=self.id,
            run=self.run,
            step=self.step,
            seq=self.seq,
            state=COMMITTED,
            write_id=records.new_id(),
            parent=self.parent,
            **fields,
        )
        return self.publish(snapshot)

    def _aborted(self, reason: str) -> Snapshot:
        return msgspec.structs.replace(aborted(self.run, self.step, self.id, reason), seq=self.seq, created=0.0)


def main_manifests(snapshot: Snapshot) -> list[ManifestRef]:
    """Return the manifests of a snapshot that the first save of another run looks through."""
    large = [ref for ref in snapshot.manifests if ref.logical_bytes * SMALL_PART >= snapshot.logical_bytes]
    return nlargest(MOST_MANIFESTS, large, key=lambda ref: ref.logical_bytes)


class SharedSession(Putter):
    """A rank's part in the session of its job, which rank 0 holds. A writer uses it as it uses a `SaveSession`.

    Use as a context manager. It puts packs and manifests, and never a record. Rank 0's session protects and explains
    them; if rank 0 gives the save up, its aborted record explains them. Gcs see only the session of rank 0.

    Args:
        snapshot_id, step: of the save that rank 0 has begun.
        bases: the snapshots that it may build on; rank 0 has looked at the marks.
        others: ids of those that are only looked through for equal chunks.
        watch: called with every heartbeat; raises once rank 0 has given the save up.

    Attributes:
        See `SaveSession`.
    """

    def __init__(
        self,
        context: Context,
        run: str,
        step: int,
        snapshot_id: str,
        bases: list[Snapshot],
        others: set[str],
        watch: Callable[[], object],
    ) -> None:
        super().__init__(context, "save", snapshot_id, MadeFor(bytes.fromhex(snapshot_id), 0, run, step))
        self.run, self.step, self.usable_bases, self.watch = run, step, bases, watch
        self.others, self.manifests = others, dict[str, Manifest]()

    def __enter__(self) -> Self:
        """Pin the place of the repository, as rank 0's session does on its host."""
        self._same_repository.enter_context(confirmed(self._context))
        return self

    def __exit__(self, *_: object) -> None:
        self._same_repository.close()
