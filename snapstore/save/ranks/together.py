"""Together: one save by all ranks of a job. Rank 0 leads it and commits; the others follow; no call is a collective.

    rank 0 (`lead`)                                  rank r (`follow`)
    1 session, marks, records, bases
    2 post begin                                     wait for begin, compare the step
    3 write its packs and child manifests            write its packs and child manifests: all durable
    4 wait for every report                          post its report, or failed
    5 compare them; ask for trees that it lacks      answer, while it waits for the outcome
    6 root manifests, then the create-only record
    7 post the outcome, end the session              if rank 0 does not answer, the record decides

Rank 0 commits only with every report, so nothing is committed that is not durable on all ranks. A rank that has
reported and hears no outcome creates the record as aborted, as a gc does. Either this or the commit wins, so each rank
returns the outcome that the record has (docs/design/ranks.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ...context import Context
from ...distributed import messages
from ...distributed.base import Ranks, Watch, ended_error, ended_processes, ranks_by, wait_for
from ...distributed.messages import (
    COMMITTED,
    FAILED,
    REPLACED,
    UNCLEAR,
    Ask,
    Begin,
    Failed,
    Outcome,
    Ref,
    RelayedError,
    Report,
    decode,
    encode,
)
from ...distributed.questions import Questions
from ...errors import DAMAGE, InvalidInputError, RanksError, SnapstoreError, StorageError
from ...format import records
from ...format.keys import quarantined_names
from ...format.records import Snapshot
from ...protocol.session import SaveSession, SharedSession
from ...text import log
from ...threads import watched
from ..inputs import SaveRequest
from ..retrying import ReplacedError, silence
from .agreement import compare, compare_replicas
from .attempts import LOOK_S, RankAttempts
from .outcomes import ended, in_save, read_committed, read_or_abort, read_record
from .writer import RankWriter

#: After rank 0 has looked for the reports one by one, it pauses for so many times as long.
PASS_PAUSE = 20


@dataclass(slots=True)
class RankSaves(RankAttempts):
    """The saves of one run by the ranks of a job, on one of them.

    Attributes:
        questions: of the same ranks.
        prefix: of all keys of these saves.
        answer: called with a save's number while rank 0 waits for reports: answers ranks that cannot report before it.
        known_trees: the trees of the last save's ranks by digest, so that rank 0 asks for each once (only on rank 0).
        old_keys: posted by this rank, with the numbers of their saves and attempts: no rank looks them up again once
            all take part in a later one.
        warned: the buffers that were warned of: see `compare_replicas` (only on rank 0).
        is_stale: whether the ranks exchange holders in the next save, as rank 0 says; see `HolderExchange`.
        attempt: the number of the save that runs, and of its attempt, from 0.
        open_in: the numbers of the save and of the last attempt whose stores have all answered (only on rank 0).
        next_open_look: when to look for that again [s, time.monotonic].
        unclear: of the last attempt, if it may have been committed: its session (only on rank 0), id and writer.
    """

    context: Context
    ranks: Ranks
    questions: Questions
    prefix: str = ""
    answer: Callable[[int], object] = lambda _: None
    known_trees: dict[bytes, bytes] = field(default_factory=dict)
    old_keys: dict[str, tuple[int, float]] = field(default_factory=dict)
    warned: set[frozenset[str]] = field(default_factory=set)
    is_stale: bool = False
    attempt: tuple[int, int] = (-1, 0)
    unclear: tuple[SaveSession | None, str, RankWriter] | None = None
    open_in: tuple[int, int] = (-1, 0)
    next_open_look: float = 0.0
    _next_look: float = 0.0

    def save(self, number: int, request: SaveRequest, data: RankWriter) -> Snapshot:
        """Make one attempt to save; every rank calls it with the same number, and gets the same snapshot or an error.

        Raises:
            SnapstoreError: this rank's error; or the first error of another rank, which it names. Nothing was
                committed, unless the error says that this is not known.
        """
        one = _Save(self, number, request, data)
        self.note_keys(number)
        return one.lead() if self.ranks.rank == 0 else one.follow()

    def require_begun(self, number: int, request: SaveRequest) -> None:
        """Raise InvalidInputError if rank 0 waits for a question instead of the save; it looks twice a second."""
        if self.ranks.rank and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            data = self.ranks.look(self.key(number, "asks"))
            if data is not None and (question := self.questions.asked_unheard(data)):
                raise InvalidInputError(
                    f"save {request.ref}: rank {self.ranks.rank} is in save, but rank 0 waits in {question}: call it "
                    "on all ranks, or use a snapstore.Repository on one; nothing was committed"
                )


class _Save:
    """One save on one rank."""

    def __init__(self, job: RankSaves, number: int, request: SaveRequest, data: RankWriter) -> None:
        self._job, self._context, self._ranks = job, job.context, job.ranks
        self._number, self._request, self._data = number, request, data
        self._next_look = 0.0

    def _key(self, name: str) -> str:
        return self._job.key(self._number, name)

    # -- rank 0

    def lead(self) -> Snapshot:
        """Lead the attempt, and commit."""
        job, request, session = self._job, self._request, None
        is_committed = False
        try:
            snapshot = self._settled()
            if snapshot is None:
                job.begin_attempt(self._number)
                session = request.session(self._context)
                with session:
                    snapshot = self._lead(session)
                    is_committed = True
                    self._tell_committed(snapshot)
            return snapshot
        except BaseException as error:
            if is_committed:
                raise
            unclear = session is not None and (session.is_unclear or not isinstance(error, Exception))
            unclear, told = unclear or job.unclear is not None, error
            if isinstance(error, RanksError) and not unclear:
                told = in_save(request.ref, error, "nothing was committed")
            job.fail_attempt(self._number, request, told, unclear=unclear)
            if unclear and session is not None and request.decide(told):
                job.unclear = session, session.id, self._data
            if told is not error:
                raise told from error
            if isinstance(error, RelayedError):
                raise messages.raised(error.failed, 0) from None
            raise

    def _tell_committed(self, snapshot: Snapshot) -> None:
        data = records.encode(snapshot)
        try:
            if len(data) > messages.MAX_RECORD_BYTES:
                if self._request.warns:
                    self._ranks.post(self._key("record"), data)
                data = b""
            self._ranks.post(self._key("outcome"), encode(Outcome(COMMITTED, record=data, is_stale=self._job.is_stale)))
        except SnapstoreError as error:
            log.warning("run=%s the other ranks learn the outcome from the record: %s", self._request.run, error)

    def _settled(self) -> Snapshot | None:
        """Return the snapshot of the last attempt if it was committed after all; else make sure that it never is.

        Raises:
            StorageError: the store failed; no further attempt begins before this is known.
        """
        unclear = self._job.unclear
        if unclear is None or unclear[0] is None:
            return None
        found = unclear[0].settle()
        self._job.unclear = None
        if found.state != records.COMMITTED:
            return None
        self._data.adopt(unclear[2])
        self._tell_committed(found)
        return found

    def _lead(self, session: SaveSession) -> Snapshot:
        """Begin, write, collect and commit, within the session."""
        request, ranks = self._request, self._ranks
        session.watch = self._watch_failures
        session.watch()
        session.shared, request.is_open = ranks.count > 1, not request.is_suspect or ranks.count == 1
        request.look_open = partial(self._job.look_open, self._number)
        bases = [snapshot.key for snapshot in session.usable_bases]
        quarantine, others = bool(session.quarantined), len(session.others)
        begin = Begin(session.id, request.step, bases, request.full, quarantine, request.is_suspect, others)
        ranks.post(self._key("begin"), encode(begin))
        reports = {0: self._data.write(session, begin)} | self._collect(session)
        request.is_open = True
        compare(reports, request)
        self._data.merge(self._trees(reports, session))
        compare_replicas(reports, request, partial(self._digests, session), self._job.warned)
        session.watch = None  # no other rank can fail any more
        roots = self._data.write_roots(session, reports)
        used = sorted({number for report in reports.values() for number in report.bases})
        built_on = [session.usable_bases[number] for number in used if number < len(bases)]
        return self._data.commit(session, roots, built_on)

    def _collect(self, session: SaveSession) -> dict[int, Report]:
        """Return the reports of all other ranks, by rank; give each to the RankWriter when it comes.

        Raises:
            RelayedError: a rank has failed.
            RanksError: a rank does not answer, or is too late.
        """
        ranks, reports = self._ranks, dict[int, Report]()
        keys = {rank: self._key(f"report/{rank}") for rank in range(1, ranks.count)}
        next_pass = time.monotonic() + LOOK_S

        def take(rank: int, data: bytes | None) -> None:
            if data is None:
                return
            report = decode(data, Report)
            if report.manifests is None:
                if (apart := ranks.look(self._key(f"manifests/{rank}"))) is None:
                    return
                report = msgspec.structs.replace(report, manifests=decode(apart, list[Ref]))
            reports[rank] = report
            self._data.take_report(rank, report.manifests or ())

        def look() -> dict[int, Report] | None:
            nonlocal next_pass
            self._job.answer(self._number)
            left = [rank for rank in keys if rank not in reports]
            found = ranks.look_all([keys[rank] for rank in left])
            began = time.monotonic()
            if found is not None:
                for rank, data in zip(left, found, strict=True):
                    take(rank, data)
            elif began >= next_pass:  # the last reports are late: take the others meanwhile
                missing()
                next_pass = time.monotonic() + max(LOOK_S, PASS_PAUSE * (time.monotonic() - began))
            return reports if len(reports) == len(keys) else None

        def missing() -> list[int]:
            for rank, key in keys.items():
                if rank not in reports:
                    take(rank, ranks.look(key))
            return [rank for rank in keys if rank not in reports]

        wait_for(look, self._watch_ranks(session, "reports", missing))
        self._remove_old_keys()
        self._job.questions.forget(min((report.asked for report in reports.values()), default=0))
        return dict(sorted(reports.items()))

    def _digests(self, session: SaveSession, asked: Sequence[int], group: str) -> dict[int, dict[str, bytes]]:
        """Return the digests of the tensors of a group, by path, for each of some ranks.

        Raises: see `_collect`.
        """
        ranks, others = self._ranks, [rank for rank in asked if rank]
        answers: list[bytes] = []
        if others:
            ranks.post(self._key("ask-replicas"), encode(Ask(others, group)))
            watch = self._watch_ranks(session, "digests", lambda: others)
            answers = wait_for(lambda: ranks.look_all([self._key(f"replicas/{rank}") for rank in others]), watch)
        own = {0: dict(self._data.replicas(group))} if 0 in asked else {}
        return own | {
            rank: dict(decode(data, list[tuple[str, bytes]])) for rank, data in zip(others, answers, strict=True)
        }

    def _trees(self, reports: Mapping[int, Report], session: SaveSession) -> list[tuple[list[int], bytes]]:
        """Return the trees of all ranks, equal ones once; ask for trees that rank 0 does not know.

        Raises: see `_collect`.
        """
        ranks, alike = self._ranks, ranks_by((rank, report.trees) for rank, report in reports.items())
        known = {digest: trees for digest, trees in self._job.known_trees.items() if digest in alike}
        known[reports[0].trees] = self._data.trees()
        unknown = {digest: of[0] for digest, of in alike.items() if digest not in known}
        if unknown:
            asked = sorted(unknown.values())
            ranks.post(self._key("ask"), encode(Ask(asked)))
            keys = [self._key(f"tree/{rank}") for rank in unknown.values()]
            watch = self._watch_ranks(session, "trees", lambda: asked)
            known |= zip(unknown, wait_for(lambda: ranks.look_all(keys), watch), strict=True)
        self._job.known_trees = known
        return [(of, known[digest]) for digest, of in alike.items()]

    def _watch_ranks(self, session: SaveSession, what: str, who: Callable[[], Sequence[int]]) -> Callable[[], None]:
        """Return a function that raises once one of `who` does not answer or is too late, or a rank has failed."""

        def look() -> None:
            session.heartbeat()
            self._watch_failures(now=True)

        ranks, what = self._ranks, f"{what} of step {self._request.step}"
        return Watch(ranks, what, who, ranks.total_s, self._job.prefix, look)

    def _watch_failures(self, *, now: bool = False) -> None:
        """Raise RelayedError once another rank has failed; it looks twice a second, or `now`.

        Raises:
            RanksError: the process of a rank that has not reported has ended.
        """
        self._request.require_wanted()
        if now or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if (data := self._ranks.look(self._key("failed"))) is not None:
                raise RelayedError(decode(data, Failed))
            self._job.require_all(self._number)
            ended = sorted(ended_processes(self._ranks))
            if ended := [rank for rank in ended if self._ranks.look(self._key(f"report/{rank}")) is None]:
                raise ended_error(self._ranks, ended, f"reports of step {self._request.step}")

    # -- the other ranks

    def follow(self) -> Snapshot:
        """Write this rank's share, and wait until rank 0 has committed."""
        ranks, rank = self._ranks, self._ranks.rank
        if (landed := self._landed()) is not None:
            return landed
        try:
            begin = self._wait_for_begin()
            watch = partial(self._watch_outcome, writes=True)
            with watched(watch), shared_session(self._context, self._request.run, begin, watch) as session:
                if begin.is_suspect:
                    ranks.post(self._key(f"open/{rank}"), b"1")
                report = self._data.write(session, begin)
            report = msgspec.structs.replace(report, asked=self._job.questions.asked())
            if report.manifests is not None and len(report.manifests) > messages.MAX_REPORTED_MANIFESTS:
                ranks.post(self._key(f"manifests/{rank}"), encode(report.manifests))
                report = msgspec.structs.replace(report, manifests=None)
            self._request.require_wanted()
        except RelayedError as error:
            raise messages.raised(error.failed, rank) from None
        except ReplacedError:
            raise
        except RanksError as error:
            lost = in_save(self._request.ref, error, "nothing was committed")  # this rank has not reported
            self._job.tell_failed(self._number, lost)
            raise lost from error
        except BaseException as error:
            self._job.tell_failed(self._number, error)
            raise
        return self._end(begin, report)

    def _landed(self) -> Snapshot | None:
        """Return the snapshot of the last attempt if rank 0 has found that it was committed after all."""
        unclear, self._job.unclear = self._job.unclear, None
        if unclear is None or (data := self._ranks.look(self._key("outcome"))) is None:
            return None
        outcome = decode(data, Outcome)
        if outcome.state != COMMITTED:
            return None
        self._data.adopt(unclear[2])
        self._job.is_stale = outcome.is_stale
        return self._read_committed(unclear[1], outcome.record)

    def _wait_for_begin(self) -> Begin:
        """Return rank 0's message that the save has begun.

        Raises:
            RelayedError: rank 0, or another rank, has given this save up.
            RanksError: rank 0 does not answer, or has not called `save`: nothing was begun or can be committed.
            InvalidInputError: rank 0 saves another step.
        """
        ranks, request = self._ranks, self._request
        what = f"rank 0 to begin the save of step {request.step}"

        def also() -> None:
            self._watch_outcome(now=True)
            self._job.require_begun(self._number, request)

        watch = Watch(ranks, what, lambda: [0], ranks.total_s, self._job.prefix, also)
        begin = decode(wait_for(lambda: ranks.look(self._key("begin")), watch), Begin)
        if begin.step != request.step:
            raise InvalidInputError(
                f"run {request.run!r}: this rank saves step {request.step}, rank 0 step {begin.step}; pass the "
                "same step on all ranks; nothing was committed"
            )
        self._remove_old_keys()
        return begin

    def _watch_outcome(self, *, now: bool = False, writes: bool = False) -> None:
        """Raise RelayedError once rank 0 has given the save up; it looks twice a second, or `now`.

        It does so as well if this rank `writes`, a newer save waits, and the store does not answer.
        """
        self._request.require_wanted()
        if now or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if (data := self._ranks.look(self._key("outcome"))) is not None:
                outcome = decode(data, Outcome)
                if outcome.state == REPLACED or outcome.failed is None:
                    raise ended(outcome, self._ranks.rank)
                raise RelayedError(outcome.failed)
        if writes and (why := silence(self._request)):  # as a relayed error: for a StorageError a base is left out
            raise RelayedError(Failed.of(StorageError(why), self._ranks.rank))

    def _end(self, begin: Begin, report: Report) -> Snapshot:
        """Report, answer rank 0's question, wait for the outcome, and return the snapshot.

        Raises:
            SnapstoreError: nothing was committed; or, if the error says so, that is not known.
        """
        ranks, rank, request = self._ranks, self._ranks.rank, self._request
        answers: dict[str, tuple[str, Callable[[str], bytes]]] = {
            "ask": ("tree", lambda _: self._data.trees()),
            "ask-replicas": ("replicas", lambda group: encode(self._data.replicas(group))),
        }
        # Rank 0 gives up after total_s; its outcome must come soon after that.
        watch = Watch(ranks, "the outcome", lambda: [0], ranks.total_s + ranks.silent_s, self._job.prefix)

        def watch_all() -> None:
            for question, (name, answer) in list(answers.items()):
                if (data := ranks.look(self._key(question))) is not None:
                    del answers[question]
                    if rank in (asked := decode(data, Ask)).ranks:
                        try:
                            ranks.post(self._key(f"{name}/{rank}"), answer(asked.group))
                        except Exception as error:
                            self._job.tell_failed(self._number, error)  # rank 0 waits for the answer
                            raise
            if request.unwanted:
                raise RanksError(request.unwanted)
            watch()

        self._job.is_stale = True  # unless rank 0 says otherwise
        try:
            ranks.post(self._key(f"report/{rank}"), encode(report))
            outcome = decode(wait_for(lambda: ranks.look(self._key("outcome")), watch_all), Outcome)
        except RanksError as lost:
            lost = RanksError(request.unwanted) if request.unwanted else lost  # closed since: the first reason counts
            return read_or_abort(self._context, request, begin.id, rank, lost)
        if outcome.state in (FAILED, REPLACED) or outcome.again:
            if outcome.state == UNCLEAR:
                self._job.unclear = None, begin.id, self._data
            raise ended(outcome, rank)
        if outcome.state != COMMITTED:
            why = outcome.failed.text if outcome.failed else "rank 0 does not know"
            return read_or_abort(self._context, request, begin.id, rank, RanksError(why, ranks=[0]))
        self._job.is_stale = outcome.is_stale
        return self._read_committed(begin.id, outcome.record)

    def _read_committed(self, save_id: str, record: bytes) -> Snapshot:
        """Return the committed record: from rank 0's outcome, from its message of its own, or from the store."""
        record = record or self._ranks.look(self._key("record")) or b""
        return read_committed(self._context, self._request, save_id, record)

    # -- all ranks

    def _remove_old_keys(self) -> None:
        now = self._number, self._job.attempt_of(self._number)
        old = [key for key, when in self._job.old_keys.copy().items() if when < now]
        self._ranks.remove(old)  # not of the next save: the caller's thread may have given it up already
        for key in old:
            self._job.old_keys.pop(key, None)


def shared_session(context: Context, run: str, begin: Begin, watch: Callable[[], object]) -> SharedSession:
    """Return the session of a rank other than 0, which shares that of rank 0.

    A base whose record this rank cannot read is left out; the rank then stores more.

    Args:
        watch: raises once the save was given up.
    """
    bases, others = [], set()
    for number, key in enumerate(begin.bases):
        try:
            bases.append(read_record(context, key))
            if number >= len(begin.bases) - begin.others:
                others.add(bases[-1].id)
        except (*DAMAGE, StorageError) as error:
            log.warning("run=%s base %s cannot be used: %s", run, key, error)
    session = SharedSession(context, run, begin.step, begin.id, bases, others, watch)
    session.quarantined = context.index.marks.packs()
    if begin.quarantine:
        session.quarantined |= quarantined_names([info.key for info in context.store.list("gc/")])
    return session
