"""Rank job: the part of one rank's SnapshotManager in the saves of all ranks.

In: the ranks of a job. Out: saves by all ranks, in one order; rank 0's answers to questions that all ranks ask; and an
agreement on when the job ends. Two managers of one process use one channel at the same time, with different keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar
from weakref import WeakKeyDictionary

from ...distributed.base import CLOSE_S, LINGER_S, Heart, Ranks, say_ended, wait_for_ends
from ...distributed.preemption import Preemption
from ...distributed.questions import Questions
from ...errors import InvalidInputError, RanksError, out_of_memory
from ...format.records import Snapshot
from ...protocol.same_repository import Opened
from ..inputs import Lineage, PartInput, SaveRequest, plain_names, turns_of
from ..pipeline import finish
from ..retrying import ReplacedError, Retrying
from ..shares import Name, RankShares, Replicas
from ..staging import Learn, Staging
from .holders import HolderExchange, Holders, Turns, require_kept
from .merged_trees import trees_of
from .outcomes import in_save
from .together import RankSaves
from .writer import RankWriter

_ADVICE = "free memory, then save again; 'snapstore log' shows whether this save was committed"
R = TypeVar("R", bound=Opened)
_users: WeakKeyDictionary[Ranks, count[int]] = WeakKeyDictionary()
_users_lock = threading.Lock()


class RankJob:
    """One manager's saves with the other ranks. All ranks make their RankJobs, and call them, in the same order.

    Call sequence: `open`, then everything else; `close`, also if `open` has failed.

    Args:
        replicas: see `RankShares`.

    Attributes:
        ranks: the channel.
        questions: the questions that rank 0 answers.
    """

    def __init__(self, ranks: Ranks, replicas: Replicas) -> None:
        self.ranks, self._replicas = ranks, replicas
        with _users_lock:
            self._prefix = f"{next(_users.setdefault(ranks, count()))}/"  # of all keys of this manager
        self._next = 0  # the number of the next save
        self._sure = 0  # the same, without the last saves if this rank gave them up before they began
        self.questions = Questions(ranks, self._prefix, lambda: (self._sure, self._next), self._agree)
        self.heart = Heart(ranks)
        self._holders: Holders | None = None  # as of the last exchange
        self._holders_are_sure = False  # whether no save has failed here since
        self._own: frozenset[Name] = frozenset()  # the plain tensors of this rank at that time
        self._turns: Turns = {}  # as rank 0 has told them last
        self._learnt_in = self._answered_in = self._exchanged_in = -1  # the numbers of saves
        self._exchange: HolderExchange | None = None  # of the save that runs
        self._has_failed = False  # whether the last save has failed

    @contextmanager
    def numbered(self) -> Iterator[int]:
        """Yield the number of a save that is due; an error inside ends the save on all ranks before it begins here.

        So ranks that raise an older error at different calls save with the same numbers again. The error that the
        others get says `not_begun`: their next save does not raise it. If it did, that save would not begin on these
        ranks, nor would any later one.
        """
        number, before = self._next, self._sure
        self._next = self._sure = number + 1
        try:
            yield number
        except BaseException as error:
            self._sure = before
            self.give_up(number, error, not_begun=True)
            raise

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not begin a save, because of an argument."""
        with suppress(type(error)), self.numbered():
            raise error

    def _agree(self, number: int) -> None:
        """Go on with rank 0's number of saves: only saves that one of the two gave up may not be counted alike."""
        self._next = self._sure = number

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0, which keeps the index, applies policies and deletes."""
        return self.ranks.rank == 0

    def open(self, question: str, opened: Callable[[], R]) -> R:
        """Open the repository on rank 0, and once it is open there, on the other ranks.

        Args:
            question: a text with the arguments that must be equal on all ranks.
            opened: opens the repository.

        Raises:
            InvalidInputError: it is not the same repository on all ranks, or the arguments are not equal.
            SnapstoreError: `opened` failed, here or on rank 0.
        """
        first: list[R] = []

        def answer() -> str:
            first.append(opened())
            return first[0].context.config.uuid

        expected = self.questions.ask(question, answer)
        repository = first[0] if first else opened()
        if (uuid := repository.context.config.uuid) != expected:
            raise InvalidInputError(
                f"rank {self.ranks.rank}: the repository at {repository.context.store.url} is not the one of rank 0 "
                f"(uuid: expected {expected}, got {uuid}); pass one repository on all ranks, in a place that all share"
            )
        self._job = RankSaves(repository.context, self.ranks, self.questions, self._prefix, self._answer)
        return repository

    def shares(self) -> RankShares:
        """Return the shares of this rank, for the time before it knows the holders of plain tensors."""
        chunk_bytes = self._job.context.config.chunk_bytes
        job_ranks = self.ranks.job_ranks
        return RankShares(self.ranks.rank, self.ranks.count, chunk_bytes, None, self._replicas, job_ranks=job_ranks)

    def preemption(self) -> Preemption:
        """Return the Preemption of the job; from now on the ranks agree on its end in the background."""
        made = Preemption(self.ranks, self._prefix)
        self.heart.add(made.poll)
        return made

    def decide_skip(self, ref: str, is_busy: Callable[[], bool]) -> bool:
        """Return whether rank 0 skips this save, because its last one still runs.

        Args:
            ref: run@step, in errors.

        Raises:
            RanksError: rank 0 does not answer, or does not call save.
            InvalidInputError: rank 0 makes another call.
        """
        try:
            return self.questions.ask(f"save {ref}, or to skip it", is_busy)
        except RanksError as error:
            raise in_save(ref, error, "this save was not begun") from error

    def learner(self, request: SaveRequest, staging: Staging) -> Learn:
        """Return the function that learns the holders of plain tensors which this rank does not know.

        Call this before the copy.
        """
        if not self._holders_are_sure:
            staging.use_shares(self.shares())
        return partial(self._learn, request, staging)

    def _learn(self, request: SaveRequest, staging: Staging, inputs: Sequence[PartInput]) -> Sequence[PartInput]:
        """Return inputs as the shares of this rank; the ranks exchange holders if they do not know them.

        Raises:
            SnapstoreError: see `HolderExchange` and `require_kept`.
        """
        if self._learnt_in == request.number:
            return inputs  # learnt before the copy

        def check() -> None:
            request.require_wanted()
            self._job.require_begun(request.number, request)
            if self._job.attempt_of(request.number):
                self._job.require_all(request.number)

        exchange = HolderExchange(self.ranks, partial(self._job.key, request.number), check, self._prefix)
        own, found, turns, self._exchange = plain_names(inputs), self._holders, self._turns, exchange
        try:
            if exchange.is_wanted(here=not self._holders_are_sure or own != self._own):
                known, self._exchanged_in = self._holders if self._holders_are_sure else None, request.number
                found, turns = exchange.holders(trees_of(inputs), own, partial(self._choose, inputs), known)
            elif own != self._own:
                self._exchanged_in = request.number
                found, turns = exchange.ask(own)
        except RanksError as error:
            raise in_save(request.ref, error, "nothing was committed") from error
        if found is None:
            raise RanksError("the ranks have not told each other which tensors they hold; save again")
        if self._holders_are_sure and self._holders is not None:
            require_kept(own & self._own, self._holders, found)
        if not self._holders_are_sure or found is not self._holders:
            inputs = staging.use_holders(inputs, replace(self.shares(), holders=found, known=own, turns=turns))
        self._holders, self._own, self._turns, self._learnt_in = found, own, turns, request.number
        self._holders_are_sure, self._job.is_stale = True, exchange.is_stale
        return inputs

    def _choose(self, inputs: Sequence[PartInput], holders: Holders) -> Turns:
        """Return the turns of the plain tensors that all ranks hold, on rank 0; the told ones stay."""
        self._turns = turns_of(inputs, replace(self.shares(), holders=holders, turns=self._turns))
        return self._turns

    def _answer(self, number: int) -> None:
        """Answer ranks whose plain tensors have changed, on rank 0; raise RanksError if this save cannot store them."""
        if self._exchange is not None and self._holders is not None and self._answered_in != number:
            found = self._exchange.answer(self._holders, self._own, self._turns)
            if found is not None:
                self._holders, self._answered_in, self._job.is_stale = found, number, self._exchange.is_stale
                self._exchanged_in = number

    def give_up(self, number: int, error: BaseException, *, not_begun: bool = False) -> None:
        """Tell the other ranks that this one does not take part in a save.

        Args:
            not_begun: see `numbered`.
        """
        # After a save that was replaced the holders are those of before, unless the ranks have exchanged them in it.
        is_kept = isinstance(error, ReplacedError) and self._exchanged_in != number
        self._holders_are_sure, self._has_failed = self._holders_are_sure and is_kept, True
        self._job.give_up(number, error, not_begun=not_begun)

    def save(
        self,
        lineage: Lineage,
        request: SaveRequest,
        inputs: Sequence[PartInput],
        staging: Staging,
        retrying: Retrying,
    ) -> Snapshot:
        """Store this rank's share, and return the snapshot of all ranks once it is committed.

        Args:
            retrying: on rank 0 it decides whether another attempt follows one that has failed, for all ranks.

        Raises:
            ReplacedError: a newer save has replaced this one, on all ranks.
            SnapstoreError: see `RankSaves.save`.
        """
        job, number = self._job, request.number
        job.unclear = None

        def attempt() -> Snapshot:
            nonlocal inputs
            with job.context.store.pinned(), out_of_memory("save", _ADVICE):
                inputs = self._learnt(request, staging, inputs)
                return self._attempt(lineage, request, inputs, staging)

        with staging.saving(inputs):
            try:
                if self.leads:
                    return retrying.run(request, attempt, partial(job.look_for_hurry, number, request))
                return retrying.follow(request, attempt, partial(job.wait_for_attempt, number, request))
            except Exception as error:
                if (told := job.told(request, error)) is error:
                    raise
                raise told from error

    def _learnt(self, request: SaveRequest, staging: Staging, inputs: Sequence[PartInput]) -> Sequence[PartInput]:
        """Return `_learn` of an attempt, which begins here on rank 0."""
        if not self.leads:
            return self._learn(request, staging, inputs)
        if self._job.unclear is None:
            self._job.begin_attempt(request.number)
        try:
            return self._learn(request, staging, inputs)
        except Exception as error:
            self._job.fail_attempt(request.number, request, error)
            raise

    def _attempt(
        self, lineage: Lineage, request: SaveRequest, inputs: Sequence[PartInput], staging: Staging
    ) -> Snapshot:
        context = self._job.context
        try:
            before = context.index.refresh(request.run) if request.tags and self.leads else None
        except Exception as error:
            self._job.fail_attempt(request.number, request, error)
            raise
        with closing(RankWriter(context, lineage, self.ranks, request, inputs, staging)) as data:
            snapshot = self._job.save(request.number, request, data)
        staging.keep_as_base(inputs, snapshot.id, list(data.manifests.values()))
        self._has_failed, self._holders_are_sure = False, not self._job.is_stale
        lineage.note_saved(snapshot, data.manifests)
        return finish(context, request, snapshot, data.headers, before) if self.leads else snapshot

    def close(self, error: BaseException | None = None, *, ends_channel: bool, limit_s: float | None = None) -> None:
        """Tell the other ranks that this one has ended, and stop its heartbeats for this manager.

        The rank that keeps the messages waits for the others, so that each can read them: until all have closed or send
        no heartbeats, but at most a minute, or 5 s after an error.

        Args:
            error: why this rank ends; None: it closes.
            ends_channel: close the channel as well: the manager has made it.
            limit_s: the longest wait [s]; None: see above.
        """
        began = time.monotonic()
        say_ended(self.ranks, self._prefix, error, limit_s)
        longest_s = min(self.ranks.silent_s, LINGER_S if error or self._has_failed else CLOSE_S)
        end = time.monotonic() + longest_s
        if limit_s is not None:
            end = min(end, began + limit_s)
        if self.ranks.is_hosted:
            wait_for_ends(self.ranks, self._prefix, end - time.monotonic())
        self.heart.close()
        if ends_channel:
            with suppress(RanksError):
                self.ranks.close(min(LINGER_S, max(0.0, end - time.monotonic())))
