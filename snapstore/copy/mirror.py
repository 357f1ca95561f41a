"""Mirror: copy the saves of one run to a second repository, and bring back snapshots that only the mirror has.

In: the commits of a manager, and the place of the mirror. Out: copies there, in the order of the saves, made by one
thread that never delays a save. Each snapshot that is due is announced there first, by a record which says that its
copy has begun: so a later process can tell which snapshots were lost with the first store. After a failure the thread
logs a warning and tries again. If one snapshot cannot be copied, the others are, and this one is tried again later
(mirror_order.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from .. import retention
from ..catalog import policy_store
from ..catalog.history import FIRST_SEQ, View, is_dropped
from ..context import Context
from ..errors import (
    CapabilityError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    StorageFullError,
    UnreadObjectError,
)
from ..format.keys import parse_record_key
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, Snapshot
from ..protocol.notes import in_need_of_quarantined
from ..protocol.same_repository import Opened, confirmed
from ..text import log, some
from .copy import COPY_BEGUN, UNCOPIED, Copier, require_same_seed
from .mirror_order import (
    Failures,
    due_tags,
    free_tags,
    is_later,
    is_mirrored,
    lacks,
    newest_of_both,
    only_there,
    wanted,
)
from .mirror_retention import Retention

#: After a failure the mirror waits RETRY_S, after each further failure twice as long, at most RETRY_MAX_S.
RETRY_S, RETRY_MAX_S = 1.0, 60.0
#: A copy that is given up ends within this time, unless its store does not answer [s].
GIVE_UP_S = 2.0


class OpenedMirror(Opened, Protocol):
    """The mirror, an open repository."""

    def close(self) -> None: ...  # noqa: D102


class Mirror:
    """The mirror of one run.

    Any thread may call it.

    Args:
        source: where the run is saved.
        open_target: opens the mirror, or makes it; called until it succeeds.
        keep: the policies of the mirror; none: it keeps everything.
        read_only: copy nothing; only `nearest`, `newest` and `view` are of use.
        verify: as in `Copier`, in both directions.

    Attributes:
        url: URL of the mirror.
        problem: why the last attempt failed; "": it did not.
        next_seq: the lowest sequence number for saves of the run: copies of what only the mirror has go before it.
    """

    def __init__(
        self,
        run: str,
        url: str,
        source: Context,
        open_target: Callable[[], OpenedMirror],
        keep: Sequence[retention.Policy] = (),
        *,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        self.run, self.url, self._source, self._open_target, self._keep = run, url, source, open_target, keep
        self.problem, self.read_only, self._verify, self.next_seq = "", read_only, verify, 0
        self._target: OpenedMirror | None = None
        self._copier: Copier | None = None
        self._pending: list[Snapshot] = []  # committed and not mirrored, oldest first
        self._unlisted: list[Snapshot] = []  # committed before; the mirror may lack them, until it has been listed
        self._retention = Retention(run, keep)
        self._failures = Failures()  # of snapshots that could not be copied, though both stores answer
        self._unknown: dict[str, int] = {}  # id -> step: its record here is not known, and it may not be mirrored
        self._named: set[str] = set()  # keys of records that a warning has named
        self._newest = (-1, 0.0)  # of the newest snapshot that the mirror is known to have: seq, created
        self._is_stored = False  # whether the mirror has the policies
        self._changed = threading.Condition()
        self._is_due, self._ends, self._is_idle, self._is_awaited = True, False, False, False
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()
        self._ended_by = ""  # the error that has ended the thread

    # -- begin and end

    def start(self) -> None:
        """Open the mirror, log which snapshots were lost with the first store, and begin to copy.

        If the mirror cannot be reached, only log a warning: training must not wait for it.

        Raises:
            InvalidInputError: it is the first store itself, or its digests have another seed.
            CapabilityError: no thread can be started.
            SnapstoreError: it is no repository that this release can use.
        """
        try:
            if not self.read_only:
                here = self._source.index.refresh(self.run)
                self._unlisted, self._unknown = here.snapshots(self.run), here.unknown_steps(self.run)
                # if the mirror cannot be reached, leave numbers for what it may have
                self.next_seq = (self._next_of(here) // FIRST_SEQ + 1) * FIRST_SEQ
            target = self._opened()
            self.next_seq = self._next_of(self._say_lost(target))
            if not self.read_only:
                self._store_policies(target)
        except (StorageError, ConflictError) as error:
            self._warn(error)
        except NotFoundError as error:
            if not self.read_only:
                raise
            self._warn(error)
        if not self.read_only:
            self._thread = threading.Thread(target=self._work, name=f"snapstore-mirror-{self.run}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                raise CapabilityError("cannot start the thread of the mirror; raise the limit on processes") from error

    def _next_of(self, view: View) -> int:
        try:
            return view.next_seq(self.run)
        except InvalidInputError:  # no number is left, which the next save or copy reports
            return 0

    def _store_policies(self, target: Context) -> None:
        if self._keep and not self._is_stored:
            with confirmed(target):
                policy_store.store(target.store, self.run, list(self._keep))
        elif not self._is_stored and (text := policy_store.warning_if_stored(target.store, self.run)):
            log.warning("%s", text)
        self._is_stored = True

    def _opened(self) -> Context:
        with self._opening:  # the thread opens it, and so may a caller of `nearest` or `newest`
            if self._target is None:
                target = self._open_target()
                try:
                    if not self.read_only or target.context.config.uuid != self._source.config.uuid:
                        require_same_seed(self._source, target.context)
                except InvalidInputError:
                    target.close()
                    raise
                self._target = target
            return self._target.context

    def close(self, timeout: float | None = None) -> list[int]:
        """Wait as `wait` does, at most `timeout` seconds, then end the thread; a copy that still runs commits nothing.

        Returns:
            The steps that are not mirrored; they are named in a warning. The next manager mirrors them.
        """
        try:
            left = self.wait(timeout)
        except StorageError as error:
            left, self.problem = self.behind(), str(error)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if left:
            steps = some([str(step) for step in left])
            log.warning("run=%s not mirrored in %s: steps %s: %s", self.run, self.url, steps, self._why_behind())
        if self._thread is not None:
            self._thread.join(GIVE_UP_S)
        if self.has_ended and self._target is not None:
            self._target.close()
        return left

    def _why_behind(self) -> str:
        with self._changed:
            whys = self._failures.whys()
            is_slow = bool(self._unlisted) or any(s.id not in self._failures for s in self._pending)
            unknown = ["their records cannot be read, or are gone"] if self._unknown else []
        return self.problem or ("too slow" if is_slow else some(whys + unknown))

    @property
    def has_ended(self) -> bool:
        """Return whether no thread of the mirror runs."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait until everything is mirrored, for at most `timeout` seconds, or until an attempt fails.

        It does not wait for a step whose record in the first store is damaged, cannot be read or is gone. If a step
        cannot be copied, it waits for one more attempt.

        Returns:
            The steps that are not mirrored, as `behind` returns them.

        Raises:
            InvalidInputError: the thread of the mirror calls, from a handler of the log for example.
            StorageError: the thread has ended with an error.
        """
        if self.read_only:
            return []
        if self._thread is threading.current_thread():
            raise InvalidInputError(
                f"run {self.run!r}: the mirror's own thread waits for the mirror, which would deadlock; call it in "
                "another thread"
            )
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._is_due, self._is_awaited, self._is_idle = True, True, False
            self.problem = ""
            self._changed.notify_all()
            while not (self._is_idle or self.problem or self._ended_by or self.has_ended):
                left = None if end is None else end - time.monotonic()
                if (left is not None and left <= 0) or not self._changed.wait(left):
                    break
        if self._ended_by:
            raise StorageError(f"{self.url}: the mirror's thread has ended with {self._ended_by}; make a new manager")
        return self.behind()

    # -- what is behind

    def note(self, snapshot: Snapshot) -> None:
        """Note a new commit of the run; it is copied after the earlier ones."""
        with self._changed:
            if all(snapshot.id != other.id for other in self._pending):  # the thread may have listed it already
                self._pending.append(snapshot)
            self._is_due, self._is_idle = True, False
            self._changed.notify_all()

    def behind(self) -> list[int]:
        """Return the steps that are committed and not mirrored. Reads nothing.

        The steps that may be so come first: their records in the first store cannot be read. The others follow in the
        order of their saves, also if they could not be copied. Until the mirror has been listed, they are all steps.
        """
        with self._changed:
            return sorted(self._unknown.values()) + [snapshot.step for snapshot in (*self._unlisted, *self._pending)]

    def newest_created(self) -> float:
        """Return when the newest snapshot was made that the mirror is known to have; 0: none. Reads nothing [s]."""
        return self._newest[1]

    def _note_newest(self, there: Snapshot | None) -> None:
        if there is not None:
            self._newest = max(self._newest, (there.seq, there.created))

    def held(self) -> set[str]:
        """Return the ids of the snapshots of the first store that may not be mirrored yet. Reads nothing."""
        with self._changed:
            return {snapshot.id for snapshot in (*self._unlisted, *self._pending)} | self._unknown.keys()

    # -- the thread

    def _work(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # no such error is known; without this, a wait would deadlock
            with self._changed:
                self._ended_by = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            raise

    def _follow(self) -> None:
        delay_s = RETRY_S
        while not self._ends:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._ends, self._failures.pause_s())
                if self._is_awaited:
                    self._failures.try_all()
                self._is_due = self._is_awaited = False
            try:
                done = self._catch_up()
                delay_s = RETRY_S
                with self._changed:
                    self.problem = "" if done else self.problem
                    self._is_idle = done and not self._is_due
                    self._changed.notify_all()
            except Exception as error:  # noqa: BLE001  training goes on, whatever it is
                self._warn(error)
                with self._changed:
                    self._is_due = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_awaited or self._ends, delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    def _warn(self, error: Exception) -> None:
        text = str(error)
        if text != self.problem:
            log.warning("run=%s the mirror in %s is behind, and tries again: %s", self.run, self.url, text)
        with self._changed:
            self.problem = text
            self._changed.notify_all()

    def _catch_up(self) -> bool:
        """Copy the snapshots that are due, oldest first, and apply the mirror's policies; return False if cut short."""
        target = self._opened()
        try:
            with self._source.index.one_write(), target.index.one_write():
                return self._copy_due(target)
        except StorageFullError:
            self._retention.make_room(target)
            raise

    def _copy_due(self, target: Context) -> bool:
        self._store_policies(target)  # if the mirror could not be reached at the start
        copier = self._copier = self._copier or Copier(self._source, target, self._require_going_on, due_tags, is_later)
        copier.verify = self._verify
        due, here, there = self._due(target)
        if due:
            copier.announce(itertools.takewhile(lambda _: not self._ends, due), here, there)
        for snapshot in due:
            if self._ends:
                return False
            if not self._failures.is_due(snapshot.id):
                continue
            try:
                copier.copy(snapshot, named=bool(snapshot.tags))
            except UNCOPIED as error:  # the others do not wait for it
                if self._is_committed(snapshot):
                    self._note_failure(snapshot, error)
                    continue
                self._say_left_out(snapshot, error)
            else:
                self._note_newest(snapshot)
            self.problem = ""
            with self._changed:
                self._failures.end(snapshot.id)
                self._pending = [s for s in self._pending if s.id != snapshot.id]
                self._changed.notify_all()
            self._retention.apply(target)
        return True

    def _is_committed(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is committed in the first store, or may be."""
        here = self._source.index.refresh(self.run)
        known = here.get(snapshot.id)
        return here.is_unknown(snapshot.id, self.run) or (known is not None and known.state == COMMITTED)

    def _note_failure(self, snapshot: Snapshot, error: Exception) -> None:
        with self._changed:
            is_news = self._failures.note(snapshot.id, str(error), RETRY_S)
        if is_news:
            self._say_left_out(snapshot, f"{error}; the mirror tries it again, each time later")

    def _require_going_on(self) -> None:
        if self._ends:
            raise StorageError("the copy was given up; nothing was committed; copy again")

    def _say_left_out(self, snapshot: Snapshot, why: object) -> None:
        log.warning("run=%s step=%d cannot be mirrored, and is left out: %s", self.run, snapshot.step, why)

    def _due(self, target: Context) -> tuple[list[Snapshot], View, View]:
        """Return the snapshots to copy: committed, not in the mirror, and kept by the mirror's policies.

        Before them come snapshots that are in the mirror and lack a tag there, so that no policy forgets them.

        Returns:
            (the snapshots, the records of the first store, those of the mirror).
        """
        with self._changed:
            noted = {snapshot.id: snapshot for snapshot in self._pending}
        there = target.index.refresh()
        self._note_newest(there.newest(self.run))
        self.next_seq = max(self.next_seq, self._next_of(there))
        with confirmed(self._source):  # an empty folder in its place would have no snapshots
            here = self._source.index.refresh()
        for snapshot in noted.values():
            try:
                here.require_record(snapshot.id)
                if here.get(snapshot.id) is None:
                    raise IntegrityError(f"its record {snapshot.key} is gone")
            except (IntegrityError, UnreadObjectError) as error:  # once the record is back, the snapshot is found below
                self._say_left_out(snapshot, error)
        self._note_unknown(here, there)
        committed = [(s, there.get(s.id)) for s in here.snapshots(self.run)]
        tagged = [
            s
            for s, known in committed
            if known and known.state == COMMITTED and not {*due_tags(here, there, s)} <= {*known.tags}
        ]
        if (found := [s for s, _ in committed if lacks(here, there, s)]) and self._keep:
            found = self._wanted(target, here, there, found)
        due = {s.id for s in found}
        with self._changed:  # a commit may have been noted since
            self._pending = found + [s for s in self._pending if s.id not in due | noted.keys()]
            self._unlisted = []
            self._failures.keep_only({s.id for s in tagged} | due)
        return tagged + found, here, there

    def _note_unknown(self, here: View, there: View) -> None:
        """Note the snapshots whose records in the first store are not known, and which are not in the mirror."""

        def is_absent(name: str) -> bool:
            return not is_mirrored(there.get(name))

        unknown = {name: step for name, step in here.unknown_steps(self.run).items() if is_absent(name)}
        with self._changed:
            self._unknown = unknown
        keys = [(key, parse_record_key(key)) for key in here.unknown(self.run)]
        absent = {key for key, parsed in keys if parsed is None or is_absent(parsed[2])}
        if absent - self._named:
            text = "run=%s records in %s cannot be read, or are gone; their snapshots are not mirrored; %s: %s"
            log.warning(text, self.run, self._source.store.url, "run 'snapstore repair'", some(sorted(absent)))
        self._named = absent

    def _wanted(self, target: Context, here: View, there: View, found: Sequence[Snapshot]) -> list[Snapshot]:
        """Return those of `found` that the policies of the mirror would keep."""
        kept = there.snapshots(self.run)
        damaged = in_need_of_quarantined(target, kept)  # no policy counts them
        return wanted(self._keep, here, [s for s in kept if s.id not in damaged], found, self._failures)

    # -- what only the mirror has

    def _say_lost(self, target: Context) -> View:
        """Log which snapshots were saved and not mirrored, if the first store lost them; return what the mirror has."""
        here, there = self._source.index.refresh(self.run), target.index.refresh(self.run)
        newest = there.newest(self.run)
        self._note_newest(newest)
        after = -1 if newest is None else newest.seq
        begun = [s for s in there.snapshots(self.run, (ABORTED,)) if s.reason == COPY_BEGUN and s.seq > after]
        if lost := [str(s.step) for s in begun if here.get(s.id) is None and not here.is_unknown(s.id, self.run)]:
            last = f"step {newest.step}" if newest else "nothing"
            text = "run=%s steps %s were saved and not mirrored, and %s has lost them; %s has %s"
            log.warning(text, self.run, ", ".join(lost), self._source.store.url, self.url, last)
        return there

    def newest(self) -> tuple[Snapshot | None, bool]:
        """Return (the newest snapshot of the run in both stores, whether only the mirror has it).

        Raises:
            IntegrityError, StorageError: as `newest_of_both` raises them.
        """
        here = self._source.index.refresh(self.run)
        return newest_of_both(here, self.view, self.run, f"{self.run}@latest in {self.url}")

    def view(self) -> View | None:
        """Return what the mirror has of the run; None if it cannot be reached."""
        try:
            return self._opened().index.refresh(self.run)
        except (StorageError, NotFoundError) as error:
            self._warn(error)
            return None

    def target(self) -> Context | None:
        """Return the mirror's repository; None: there is none, and this mirror is read-only, so it makes none.

        Raises:
            StorageError: it cannot be reached.
        """
        try:
            return self._opened()
        except NotFoundError:
            if not self.read_only:
                raise
            return None

    def advice(self, ref: str) -> str:
        """Return the end of an error of a restore from the first store: how the mirror helps; empty if it does not."""
        there, found = self.view(), None
        with suppress(SnapstoreError):  # the error of the restore is the one to see
            found = self._source.index.find(ref)
        known = there.get(found.id) if there is not None and found is not None else None
        if found is None or known is None or known.state not in (COMMITTED, FORGOTTEN) or is_dropped(known):
            return ""
        return f"; {self.url} has {found.ref} too{self.copy_advice(found)}"

    def copy_advice(self, found: Snapshot) -> str:
        """Return the end of an error: how to copy a snapshot of the mirror over what is damaged in the first store."""
        copy = f"snapstore copy id:{found.id[:12]} --repo {self.url} --to {self._source.store.url}"
        return f": to bring it back, run 'snapstore repair --apply', then '{copy}'"

    def nearest(self, name: str) -> Context:
        """Return the repository from which a snapshot of the run is to be restored.

        A snapshot that only the mirror has is first copied back, so that the next saves can build on it. If this mirror
        is read-only, return the mirror's repository instead.

        Args:
            name: a step, a tag or "latest".

        Raises:
            NotFoundError: the name names nothing in either store.
            IntegrityError, FormatError, CapabilityError, ConflictError, StorageError: as `Copier.copy` raises them.
        """
        if name == "latest":
            found, is_there = self.newest()
            found = found if is_there else None
        else:
            found = only_there(self._source.index.refresh(self.run), self.view, self.run, name)
        if found is None:
            return self._source
        if self.read_only:
            return self._opened()
        self.copy_back(found)
        return self._source

    def copy_back(self, found: Snapshot) -> None:
        """Copy a snapshot of the mirror into the first store; raises as `Copier.copy` does."""
        log.warning("run=%s step=%d is copied back from %s", self.run, found.step, self.url)
        copier = Copier(
            self._opened(),
            self._source,
            tags_of=free_tags,
            is_later=lambda here, there: not is_later(there, here),
            takes_tags=False,  # of two snapshots with a tag the later one counts, and policies keep both
        )
        copier.verify = self._verify
        copier.copy(found, named=True)
