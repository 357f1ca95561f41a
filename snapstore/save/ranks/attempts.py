"""Attempts: the messages by which the ranks of a job make further attempts of a save, or end it.

In: an error of an attempt, on any rank. Out: on every rank the same decision of rank 0: another attempt begins, or the
save has ended. docs/design/ranks.md ("Further attempts") says what each rule prevents.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress

import msgspec

from ...distributed import messages
from ...distributed.base import POLL_S, POLL_SHARE, Ranks, Watch
from ...distributed.messages import (
    COMMITTED,
    FAILED,
    REPLACED,
    UNCLEAR,
    Failed,
    Outcome,
    RelayedError,
    decode,
    encode,
)
from ...errors import RanksError, SnapstoreError
from ...protocol.session import SaveSession
from ...text import log
from ..inputs import SaveRequest
from ..retrying import ReplacedError
from .outcomes import ended, unknown
from .writer import RankWriter

#: A rank that writes or waits looks so often whether the save was given up [s].
LOOK_S = 0.5


class RankAttempts:
    """The part of `RankSaves` that knows attempts; see there for the attributes."""

    ranks: Ranks
    prefix: str
    old_keys: dict[str, tuple[int, float]]
    attempt: tuple[int, int]
    open_in: tuple[int, int]
    next_open_look: float
    unclear: tuple[SaveSession | None, str, RankWriter] | None

    def give_up(self, number: int, error: BaseException, *, not_begun: bool = False) -> None:
        """Tell the other ranks that this one cannot take part in a save, before it has begun here.

        It raises no error of the channel, which would replace `error`.
        """
        self.note_keys(number)
        if isinstance(error, ReplacedError) and self.ranks.rank:
            return  # rank 0 has told all
        failed = self.tell_failed(number, error, not_begun=not_begun)
        with suppress(SnapstoreError):
            if isinstance(error, ReplacedError):
                self.ranks.post(self.key(number, "outcome"), encode(Outcome(REPLACED, Failed("", str(error), 0))))
            elif self.ranks.rank == 0:
                self.ranks.post(self.key(number, "outcome"), encode(Outcome(FAILED, failed)))
            else:
                self.ranks.post(self.key(number, "left"), encode(failed))

    def tell_failed(self, number: int, error: BaseException, *, not_begun: bool = False) -> Failed:
        """Tell rank 0 that an attempt has failed on this rank, and return the message."""
        failed = Failed.of(error, self.ranks.rank)
        failed = msgspec.structs.replace(failed, not_begun=not_begun or failed.not_begun)
        if self.ranks.rank:
            with suppress(SnapstoreError):
                self.ranks.post(self.key(number, "failed"), encode(failed))
        return failed

    def begin_attempt(self, number: int) -> None:
        """Tell the other ranks, on rank 0, that an attempt begins, unless it is the first one of its save."""
        if self.attempt_of(number):
            self.ranks.post(self.key(number, "go"), b"1")

    def attempt_of(self, number: int) -> int:
        """Return the number of the attempt of a save, from 0."""
        return self.attempt[1] if self.attempt[0] == number else 0

    def fail_attempt(self, number: int, request: SaveRequest, error: BaseException, *, unclear: bool = False) -> None:
        """Tell the other ranks, on rank 0, that an attempt has failed, and whether another one follows.

        Raises:
            RanksError: another one was to follow, and the others cannot be told: no rank goes on alone.
        """
        again = request.decide(messages.raised(error.failed, 0) if isinstance(error, RelayedError) else error)
        unclear = unclear or self.unclear is not None
        outcome = Outcome(UNCLEAR if unclear else FAILED, Failed.of(self.told(request, error), 0), again=again)
        if not again and request.replaced_by:
            outcome = Outcome(REPLACED, Failed("", request.replaced_by, 0))
        try:
            self.ranks.post(self.key(number, "outcome"), encode(outcome))
        except SnapstoreError as lost:  # also if the channel is closed: it says nothing about this save
            log.warning("run=%s the other ranks learn the outcome from the record: %s", request.run, lost)
            if again:
                raise RanksError(f"save {request.ref}: the ranks cannot be told to try again: {lost}") from error
        if again:
            self.attempt = number, self.attempt_of(number) + 1

    def told(self, request: SaveRequest, error: BaseException) -> BaseException:
        """Return an error as it is told: if an attempt may have been committed, it says so; see `unknown`."""
        if self.unclear is None or not isinstance(error, Exception) or isinstance(error, ReplacedError | RelayedError):
            return error
        return unknown(request.ref, error)

    def require_all(self, number: int) -> None:
        """Raise the error of a rank that takes part in no further attempt of a save."""
        if (data := self.ranks.look(self.key(number, "left"))) is not None:
            raise messages.raised(decode(data, Failed), self.ranks.rank)

    def look_open(self, number: int) -> bool:
        """Return whether the stores of all other ranks have answered the attempt that runs, on rank 0.

        It looks twice a second. Any thread may call it: the thread of the save may wait for one long put.
        """
        now = number, self.attempt_of(number)
        if self.open_in != now and time.monotonic() >= self.next_open_look:
            self.next_open_look = time.monotonic() + LOOK_S
            keys = [self.key(number, f"open/{rank}") for rank in range(1, self.ranks.count)]
            with suppress(RanksError):  # the thread of the save gets it as well
                if keys and self.ranks.look_all(keys) is not None:
                    self.open_in = now
        return self.open_in == now

    def look_for_hurry(self, number: int, request: SaveRequest) -> None:
        """Note, on rank 0, that somebody waits for a save on another rank; raise if a rank takes part no more."""
        request.is_awaited = request.is_awaited or self.ranks.look(self.key(number, "hurry")) is not None
        self.require_all(number)

    def wait_for_attempt(self, number: int, request: SaveRequest, error: Exception) -> bool:
        """Wait, on another rank than rank 0, until rank 0 begins another attempt; return False if none follows.

        Args:
            error: why the last attempt has failed on this rank.

        Raises:
            ReplacedError: a newer save replaces this one.
            SnapstoreError: rank 0 has ended the save meanwhile.
        """
        if isinstance(error, RanksError) or request.unwanted:
            return False
        self.tell_failed(number, error)
        try:
            outcome, is_first = self._decided(number, request), True
            while outcome is not None and outcome.again:
                self.attempt, is_first = (number, self.attempt_of(number) + 1), False
                request.on_retry(error)
                outcome = self._decided(number, request, also="go")
        except RanksError:
            raise error from None  # rank 0 is gone, or this rank gives the save up
        if outcome is None or (outcome.state == COMMITTED and not is_first):
            return True
        if outcome.state == COMMITTED and isinstance(error, SnapstoreError):
            error.not_begun = True  # this rank cannot read the record: the next save begins all the same
            return False
        raise ended(outcome, self.ranks.rank)

    def _decided(self, number: int, request: SaveRequest, also: str = "") -> Outcome | None:
        """Return rank 0's outcome of an attempt, once it is there; None: there is the message `also`.

        Raises:
            RanksError: rank 0 does not answer, or the save is unwanted here.
        """
        ranks, began, has_said = self.ranks, time.monotonic(), False
        what = f"rank 0 to end the save of step {request.step}, or to try it again"
        watch = Watch(ranks, what, lambda: [0], ranks.total_s + ranks.silent_s, self.prefix)
        while True:
            if also and ranks.look(self.key(number, also)) is not None:
                return None
            if (data := ranks.look(self.key(number, "outcome"))) is not None:
                return decode(data, Outcome)
            if request.unwanted:
                raise RanksError(request.unwanted)
            if not has_said and (request.is_awaited or not threading.main_thread().is_alive()):
                has_said = True
                ranks.post(self.key(number, "hurry"), b"1")
            watch()
            time.sleep(min(LOOK_S, max(POLL_S, POLL_SHARE * (time.monotonic() - began))))

    def note_keys(self, number: int) -> None:
        """Note the keys that this rank may post in an attempt, to remove them later."""
        names = messages.POSTED_BY_0 if self.ranks.rank == 0 else messages.POSTED_BY_OTHERS
        for name in names:
            attempt = math.inf if is_of_all_attempts(name) else self.attempt_of(number)
            self.old_keys[self.key(number, name.format(rank=self.ranks.rank))] = number, attempt

    def key(self, number: int, name: str) -> str:
        """Return the key of a message of a save, or of the attempt that runs."""
        attempt = 0 if is_of_all_attempts(name) else self.attempt_of(number)
        return f"{self.prefix}{number}.{attempt}/{name}" if attempt else f"{self.prefix}{number}/{name}"


def is_of_all_attempts(name: str) -> bool:
    """Return whether a message holds for all attempts of a save."""
    return name.partition("/")[0] in messages.OF_ALL_ATTEMPTS
