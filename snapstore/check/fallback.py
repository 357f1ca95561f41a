"""Fallback: fill a state from the newest snapshot that every rank can read whole.

In: the snapshots of a run, newest first, and a state to fill. Out: the snapshot that was restored, and those that were
skipped, with the damage of each.

Each rank first rebuilds every chunk that it would read, without keeping the bytes, and votes. The state is filled only
from a snapshot that every rank has found whole; until then nothing in it changes. Damage is a reason to skip one.
A target that does not fit, a format or machine that is not enough, and a store that is away are errors: an older
snapshot would silently lose training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..catalog.history import View, run_of
from ..catalog.read_twice import read_object_twice, read_small, require_damage
from ..context import Context
from ..distributed import messages
from ..distributed.messages import Failed, Vote
from ..distributed.questions import Questions
from ..errors import (
    DAMAGE,
    CapabilityError,
    IntegrityError,
    NotFoundError,
    OutputError,
    SnapstoreError,
    StorageError,
    add_line,
)
from ..format.records import SWEPT, Snapshot
from ..protocol.notes import settle_marks
from ..protocol.same_repository import confirmed
from ..restore.overlaps import Overlap
from ..restore.pipeline import BeforeFill, deleted_meanwhile
from ..state.fill.buffers import RestoreBuffers, Want
from ..state.fill.plan import PARTLY_FILLED
from ..text import log, some, strip_hint
from .mark_damage import mark_damaged
from .verify_chunks import tensor_of
from .verify_wanted import LostChunk, first_lost, lost_chunk_in

#: Fills the state from a snapshot; calls its last argument before anything of the state changes.
Fill = Callable[[Context, Snapshot, BeforeFill], Snapshot]
BringBack = Callable[[str], Snapshot | None]


@dataclass
class Skipped:
    """The snapshots that a restore with `fallback=Skipped()` skipped; each restore fills it again.

    Attributes:
        snapshots: (step, id, why) of each; `why` is its damage in words.
    """

    snapshots: list[tuple[int, str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.snapshots)

    def __len__(self) -> int:
        return len(self.snapshots)


class SkippedSnapshot(NamedTuple):
    """A snapshot that a restore has skipped, as in `Skipped`."""

    step: int
    id: str
    why: str


@dataclass(frozen=True)
class Choice:
    """What rank 0 has decided.

    Attributes:
        key: of the record to try next; "": every rank has found the last one whole.
        skipped: all that were skipped so far.
    """

    key: str
    skipped: list[SkippedSnapshot]

    def text(self) -> str:
        """Return it as the answer to a question."""
        return json.dumps([self.key, self.skipped])

    @classmethod
    def of(cls, text: str) -> Choice:
        """Return the choice of a text."""
        key, skipped = json.loads(text)
        return cls(key, [SkippedSnapshot(*one) for one in skipped])


class RestoreCandidates:
    """The snapshots of a run that may be restored, in the order in which they are tried: the newest first.

    Those that are marked as damaged in the index are skipped without a read. They are tried only if no other is whole.

    Args:
        first: the newest one that is wanted; None: the newest of the run.
        named: the step that was asked for, if its record is damaged, and `first` is the newest one below it.

    Attributes:
        context: of the repository.
        bring_back: brings a damaged snapshot back from elsewhere, by its id; it returns its new revision, or None. It
            raises if elsewhere may have it whole, and it cannot be brought back.
        is_earlier: returns whether elsewhere has the snapshot of an id, and has it before another snapshot.
        skipped: those that were skipped so far.
    """

    def __init__(self, context: Context, run: str, view: View, first: Snapshot | None, named: int | None) -> None:
        self.context, self._run, self._view = context, run, view
        self.bring_back: BringBack = lambda name: None
        self.is_earlier: Callable[[str, Snapshot], bool] = lambda name, snapshot: False
        self._brought = set[str]()
        self.skipped: list[SkippedSnapshot] = []
        self._current: Snapshot | None = None
        found = view.snapshots(run)[::-1]
        if first is not None:
            found = [s for s in found if (s.seq, s.id) <= (first.seq, first.id) and s.step <= first.step]
            found = found if first.id in {s.id for s in found} else [first, *found]
        found = _in_line(found)
        settle_marks(context, found)
        self._marked = [s for s in found if context.index.marks.why(s)]
        self._left = [s for s in found if not context.index.marks.why(s)]
        self._to_note = list(self._marked)  # those that are not among `skipped` yet
        steps, unknown = view.unknown_steps(run), view.unknown_ids(run)
        self._unknown = {name: (steps[name], *of) for name, of in unknown.items()}  # (step, key, another revision)
        if first is not None:
            last_step = max(first.step, named or 0)
            self._unknown = {
                name: (step, key, known)
                for name, (step, key, known) in self._unknown.items()
                if (step <= last_step if known is None else (known.seq, name) < (first.seq, first.id)) or step == named
            }

    def next(self) -> Choice:
        """Return the next one to try.

        Raises:
            IntegrityError: none is left; or a damaged one is whole elsewhere, and cannot be brought back.
            StorageError: a record that may be newer is withheld: it may be whole; or elsewhere is away.
            UnknownFormatError: a record that may be newer is of another release.
        """
        following = self._left.pop(0) if self._left else None
        if (known_again := self._skip_unknown(following)) is not None:
            self._left[:0] = [following] if following is not None else []
            following = known_again
        for s in list(self._to_note):
            if following is None or (s.seq, s.id) > (following.seq, following.id):
                self._to_note.remove(s)
                if (healed := self._healed(s)) is not None:
                    self._marked.remove(s)
                    self._left[:0] = [following] if following is not None else []
                    following = healed
                    break
                self.note(s.step, s.id, f"marked in the index: {self.context.index.marks.why(s)}")
        if following is None and self._marked:
            following = self._marked.pop(0)
            log.warning("%s is marked as damaged, but no other snapshot is whole: it is tried again", following.ref)
        if following is None:
            raise self._none_left()
        self._current = following
        return Choice(following.key, self._skipped())

    def _skipped(self) -> list[SkippedSnapshot]:
        """Return those skipped, without the one that is tried."""
        return [one for one in self.skipped if self._current is None or one.id != self._current.id]

    def agreed(self) -> Choice:
        """Return the choice that the last one is restored."""
        return Choice("", self._skipped())

    def skip(self, why: str) -> Choice:
        """Skip the last one that was returned, mark it, and return the next one; raises as `next` does."""
        assert self._current is not None
        self.context.index.marks.add(self._current, why)
        if (healed := self._healed(self._current)) is not None:
            self._current = healed
            return Choice(healed.key, self._skipped())
        self.note(self._current.step, self._current.id, why)
        return self.next()

    def _healed(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the revision of a damaged snapshot whose bytes were brought back; None if none were."""
        if snapshot.id in self._brought:
            return None
        self._brought.add(snapshot.id)
        found = self.bring_back(snapshot.id)
        return found if found is not None and not self.context.index.marks.why(found) else None

    def _skip_unknown(self, following: Snapshot | None) -> Snapshot | None:
        """Skip the records that are not known, and may be newer than the one that follows.

        Returns:
            The first of these snapshots that was brought back, which is to be tried next; None: none was.
        """
        whys = self._view.unknown(self._run)
        for name, (step, key, known) in sorted(self._unknown.items(), key=lambda one: -one[1][0]):
            if following is not None and known is not None and (known.seq, name) < (following.seq, following.id):
                continue
            if following is not None and known is None and self.is_earlier(name, following):
                continue
            self._require_damage(key)
            del self._unknown[name]
            if (found := self.bring_back(name)) is not None and not self.context.index.marks.why(found):
                return found
            why = strip_hint(whys.get(key, "is gone")).removeprefix(f"{key}: ")
            self.note(step, name, f"its record {key}: {why}")
        return None

    def _require_damage(self, key: str) -> None:
        """Raise unless a record is damaged: a withheld one, or one of another release, may be whole."""
        store = self.context.store
        try:
            read_object_twice(store, lambda: read_small(store, Snapshot, key))
        except CapabilityError:
            raise
        except DAMAGE:
            return
        if key not in self._view.damaged:
            raise StorageError(f"{key}: could not be read, and now can: restore again")

    def note(self, step: int, name: str, why: str) -> None:
        """Note a snapshot as skipped, by its step and its id, and log it."""
        self.skipped = [one for one in self.skipped if one.id != name]
        self.skipped.append(SkippedSnapshot(step, name, why))
        log.warning("%s@%d (id:%s) is skipped: %s", self._run, step, name[:12], why)

    def _none_left(self) -> IntegrityError:
        tried = [f"{self._run}@{one.step} (id:{one.id[:12]})" for one in self.skipped]
        whys = f"; {tried[0]}: {strip_hint(self.skipped[0].why)[:200]}" if tried else ""
        return IntegrityError(
            f"run {self._run!r}: no snapshot is whole; tried: {some(tried, 12)}{whys}; run 'snapstore check --restore'"
        )


def _in_line(newest_first: Sequence[Snapshot]) -> list[Snapshot]:
    """Return snapshots with those last that the run has left: it went back to an older step, and saved others since."""
    in_line, left = list[Snapshot](), list[Snapshot]()
    for snapshot in newest_first:
        (in_line if not in_line or snapshot.step < in_line[-1].step else left).append(snapshot)
    return in_line + left


def candidates(context: Context, run: str, ref: str | None = None, step: int | None = None) -> RestoreCandidates:
    """Return the snapshots of a run to try: the one of a reference and older ones; None: from the newest.

    Args:
        step: that the reference names. If its record is damaged, the snapshots of lower steps are tried.

    Raises:
        NotFoundError: the run has no snapshot, and no record of it is unknown; or the reference names nothing.
        IntegrityError: the reference names no step, and the record that it may mean is damaged.
        StorageError: the listing failed.
    """
    listed = run if ref is None else run_of(ref)  # an id may be of any run
    view = context.index.refresh(listed)
    if view.unknown(run):
        view = context.index.refresh(listed, list_twice=True)  # one wrong answer proves nothing
    first = None
    if ref is not None:
        try:
            first = view.resolve(ref)
        except IntegrityError:
            first = next((s for s in view.snapshots(run)[::-1] if step is not None and s.step < step), None)
            if first is None:
                raise
    if first is None and not view.snapshots(run) and not view.unknown_ids(run):
        raise NotFoundError(f"run {run!r}: has no committed snapshot in {context.store.url} to restore")
    return RestoreCandidates(context, run, view, first, step)


class Agreement(Protocol):
    """How the ranks agree on the snapshot to restore."""

    def first(self) -> Choice:
        """Return the first one to try."""
        ...

    def settle(self, vote: Vote) -> Choice:
        """Give this rank's vote on the last choice; return the next choice, which is the same on all ranks.

        Raises:
            SnapstoreError: a rank has failed otherwise than by damage; or none is left.
        """
        ...


class Alone:
    """The agreement of one process with itself."""

    def __init__(self, found: RestoreCandidates) -> None:
        self._found = found

    def first(self) -> Choice:
        """Return the first one to try."""
        return self._found.next()

    def settle(self, vote: Vote) -> Choice:
        """Return the choice that follows from the vote."""
        return decided(self._found, [vote])


class Together:
    """The agreement of all ranks: each asks the same questions, and rank 0 answers once all have voted.

    Args:
        find: returns the candidates; called on rank 0 only.
        asked: the snapshot that the ranks restore, in questions.
    """

    def __init__(self, questions: Questions, asked: str, find: Callable[[], RestoreCandidates]) -> None:
        self._questions, self._find, self._asked, self._tries = questions, find, asked, 0
        self._found: RestoreCandidates | None = None

    def first(self) -> Choice:
        """Return rank 0's first choice."""

        def answer() -> str:
            self._found = self._find()
            return self._found.next().text()

        return Choice.of(self._questions.ask(f"{self._asked}, or an older whole one", answer))

    def settle(self, vote: Vote) -> Choice:
        """Return rank 0's choice once all ranks have voted."""
        self._tries += 1

        def answer(votes: Sequence[bytes]) -> str:
            assert self._found is not None
            return decided(self._found, [messages.decode(one, Vote) for one in votes]).text()

        question = f"{self._asked}: whether all ranks find choice {self._tries} whole"
        return Choice.of(self._questions.vote(question, messages.encode(vote), answer))


def decided(found: RestoreCandidates, votes: Sequence[Vote]) -> Choice:
    """Return the choice that follows from the votes of all ranks, by rank.

    Raises:
        SnapstoreError: the first error that is no damage.
    """
    for vote in votes:
        if vote.failed is not None:
            raise messages.raised(vote.failed, 0)
    whys = [(f"rank {rank}: " if len(votes) > 1 else "") + vote.why for rank, vote in enumerate(votes) if vote.why]
    return found.skip(some(whys, 2)) if whys else found.agreed()


def _why(lost: LostChunk) -> str:
    return f"{tensor_of(lost.m, lost.row)}: {lost.error}"


class _LostError(Exception):
    """The snapshot that is tried is damaged."""

    def __init__(self, why: str, chunk: LostChunk | None = None) -> None:
        super().__init__(why)
        self.why, self.chunk = why, chunk


class _PassedError(Exception):
    """The ranks have chosen another snapshot."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.key)
        self.choice = choice


class _EndedError(Exception):
    """The ranks have ended this restore with an error."""

    def __init__(self, error: SnapstoreError) -> None:
        super().__init__(str(error))
        self.error = error


def restore_newest_whole(
    context: Context, agreement: Agreement, fill: Fill, *, rank: int = 0, may_write: bool = True, verifies: bool = True
) -> tuple[Snapshot, list[SkippedSnapshot]]:
    """Fill a state from the first choice that every rank finds whole; return the snapshot, and those skipped.

    Args:
        may_write: put damaged packs in quarantine, as far as the store lets this process.
        verifies: whether `fill` calls its last argument. What appears only when it is whole need not be verified.

    Raises:
        InvalidInputError, CapabilityError: as `pipeline.read_into`; nothing was written, unless the error says so.
        StorageError: the store is away, or withholds what may be whole.
        IntegrityError: no snapshot is whole; or the chosen one became damaged while it was read.
        RanksError: a rank does not answer.
    """
    fallback = _Fallback(context, agreement, fill, rank)
    fallback.may_write, fallback.verifies = may_write, verifies
    return fallback.run()


class _Fallback:
    """One restore on one rank."""

    may_write = verifies = True

    def __init__(self, context: Context, agreement: Agreement, fill: Fill, rank: int) -> None:
        self._context, self._agreement, self._fill, self._rank = context, agreement, fill, rank
        self._snapshot: Snapshot | None = None  # that is tried
        self._agreed: Choice | None = None

    def run(self) -> tuple[Snapshot, list[SkippedSnapshot]]:
        choice = self._agreement.first()
        while True:
            try:
                snapshot = self._tried(choice.key)
            except _EndedError as ended:
                raise ended.error from None
            except _PassedError as passed:
                choice = passed.choice
            except _LostError as lost:
                self._mark(lost)
                choice = self._agreement.settle(Vote(why=strip_hint(lost.why)[:400]))
            except Exception as error:
                if self._agreed is None:
                    with suppress(SnapstoreError):  # it comes back from rank 0
                        self._agreement.settle(Vote(failed=Failed.of(error, self._rank)))
                raise
            else:  # what appears only when it is whole was not verified before
                agreed = self._agreed or self._agreement.settle(Vote())
                return snapshot, agreed.skipped

    def _mark(self, lost: _LostError) -> None:
        """Mark the snapshot that is tried, and its damaged packs."""
        if self._snapshot is not None:
            mark_damaged(self._context, self._snapshot, lost.why, lost.chunk, may_write=self.may_write)

    def _tried(self, key: str) -> Snapshot:
        with confirmed(self._context):  # an empty mount point, or another volume in its place, is no damage
            return self._tried_there(key)

    def _tried_there(self, key: str) -> Snapshot:
        """Fill the state from the snapshot of a record.

        Raises:
            _LostError: it is damaged.
            _PassedError, _EndedError: the ranks have decided so.
        """
        store, self._snapshot = self._context.store, None
        try:
            snapshot = self._snapshot = read_object_twice(store, lambda: self._context.index.pages.record(key))
        except CapabilityError:
            raise
        except DAMAGE as error:
            raise _LostError(f"its record: {error}") from None
        for is_last in (False, True):  # one wrong answer proves nothing
            try:
                return self._fill(self._context, snapshot, self._before_fill)
            except (CapabilityError, OutputError):
                raise
            except (*DAMAGE, StorageError) as error:
                if self._agreed is not None:
                    if is_last:
                        add_line(error, PARTLY_FILLED)
                        raise
                    continue  # it was whole a moment ago: fill it once more
                if isinstance(error, NotFoundError):
                    self._require_there(snapshot, error)
                require_damage(store, error)
                chunk = lost_chunk_in(self._context, snapshot, pages_only=self.verifies)
                if is_last or chunk is not None:
                    why = str(error).removeprefix(f"{snapshot.ref} (id:{snapshot.id[:12]}): ")
                    raise _LostError(_why(chunk) if chunk is not None else why, chunk) from None
        raise AssertionError("unreachable")

    def _require_there(self, snapshot: Snapshot, error: NotFoundError) -> None:
        """Raise the error unless it says that the snapshot was deleted meanwhile: a key that is named is not there."""
        now = self._context.index.refresh().get(snapshot.id)
        if now is not None and now.state == SWEPT:
            raise _LostError(str(deleted_meanwhile(snapshot))) from None
        raise error

    def _before_fill(self, overlaps: Mapping[Want, Sequence[Overlap]], buffers: RestoreBuffers) -> None:
        """Verify what this rank would read, and agree."""
        if self._agreed is not None:
            return  # the snapshot is read again: it was rewritten meanwhile
        lost = first_lost(self._context, overlaps, buffers)
        if lost is not None:
            raise _LostError(_why(lost), lost)
        try:
            choice = self._agreement.settle(Vote())
        except SnapstoreError as error:
            raise _EndedError(error) from error
        if choice.key:
            raise _PassedError(choice)
        self._agreed = choice
