"""Retrying: the further attempts of a save whose store is away (`on_error="warn"`), for one manager.

In: a function that makes one attempt. Out: what it returns, once an attempt succeeds. Between attempts this waits,
twice as long each time. A newer save ends the pending one; a caller that waits for it causes one more attempt at once.

An error says by itself whether the same save may succeed later (`SnapstoreError.retryable`); every other error ends the
save. The inputs stay staged meanwhile, so memory is that of one pending save.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..errors import RanksError, StorageError
from ..protocol.session import SaveSession
from ..storage import progress
from ..text import log
from ..threads import current_watch, watched
from .background import clear_frames
from .inputs import SaveRequest

T = TypeVar("T")
#: The shortest and the longest pause between attempts; and the longest one before the process is to end [s].
RETRY_S, RETRY_MAX_S, RETRY_END_S = 1.0, 60.0, 2.0
#: A newer save waits so long for the store to answer an attempt, before it replaces the save that attempts it [s].
ANSWER_S = 5.0
#: A request that a store has not answered for so long, though it was sent again, counts as a failed attempt [s].
SILENT_S = 10.0
#: A pause looks so often whether the interpreter exits [s].
LOOK_S = 0.2
#: Random parts of the text of an error: names of objects, sizes, times.
_RANDOM = re.compile(r"[0-9a-f]{6,}|[0-9]+")


class ReplacedError(Exception):
    """A newer save has replaced this one; its message is the run@step of the newer one."""


class Retrying:
    """The attempts of one manager's saves. One save runs at a time; any thread may call `hurry`, `replace`, `give_up`.

    A series of failures begins with the first failed attempt, and ends with a commit. Newer saves go on with it.

    Args:
        name: of the run, in the log.
        warns: False: each save has one attempt.
        leads: whether this rank decides on attempts for all; False: newer saves here wait until rank 0's has replaced
            the pending one.

    Attributes:
        failed: the sessions of failed attempts that the next attempt ends; see pipeline.py.
    """

    def __init__(self, name: str, *, warns: bool, leads: bool = True) -> None:
        self.warns, self._name, self._leads = warns, name, leads
        self.failed: list[SaveSession] = []
        self._changed = threading.Condition()
        self._durable = ""  # the last committed step, and when; "" if this manager has committed none
        self._began: float | None = None  # when the series of failures has begun [s, time.monotonic]
        self._pause_s, self._attempts, self._replaced = RETRY_S, 0, 0
        self._told: set[str] = set()  # the errors of the series that were logged
        self._told_at = 0.0  # the pause at which the series was logged last [s]
        self._longest_s, self._pid = RETRY_MAX_S, os.getpid()
        self._silence = ""  # why a newer save has replaced an attempt
        self._upkeep_watch = self._require_answer  # always the same object

    # -- the thread of the save

    def run(self, request: SaveRequest, attempt: Callable[[], T], look: Callable[[], object] = lambda: None) -> T:
        """Return what `attempt` returns; after an error that is `retryable`, call it again until it succeeds.

        Args:
            look: called during pauses; what it raises ends the save.

        Raises:
            ReplacedError: a newer save has replaced this one.
            Exception: that of the last attempt: it is not retryable, somebody waits for this save, or it is unwanted.
        """
        outer, request.warns = sys.exception(), self.warns
        while True:
            decided: list[bool] = []
            request.decide, request.is_suspect = partial(self._decide, request, decided), self._began is not None
            request.attempted = time.monotonic()
            request.is_last = not self.warns or request.is_awaited or not threading.main_thread().is_alive()
            try:
                with watched(request.watch):
                    done = attempt()
            except Exception as error:
                if not request.decide(error) or isinstance(error, RanksError):
                    if request.replaced_by:
                        with self._changed:
                            say = self._note_failure(request, StorageError(self._silence))
                        say()
                    self._require_current(request)
                    raise
                with self._changed:
                    say = self._note_failure(request, error)
                say()
                clear_frames(error, outer)
                request.on_retry(error)
                self._wait(request, error, look)
            else:
                self._note_durable(request)
                return done

    def follow(self, request: SaveRequest, attempt: Callable[[], T], wait: Callable[[Exception], bool]) -> T:
        """Return what `attempt` returns, on a rank that does not decide; call it again as long as rank 0 says so.

        Args:
            wait: waits until another attempt begins, and returns True; False: none does. It may raise as well.
        """
        outer, request.warns = sys.exception(), self.warns
        while True:
            try:
                with watched(request.watch):
                    done = attempt()
            except ReplacedError:
                self._began = self._began or time.monotonic()
                raise
            except Exception as error:
                clear_frames(error, outer)
                with self._changed:
                    self._began = self._began or time.monotonic()
                if not self.warns or not wait(error):
                    raise
            else:
                self._began = None
                return done

    def _decide(self, request: SaveRequest, decided: list[bool], error: BaseException) -> bool:
        """Return whether another attempt follows; the same for each call after one attempt."""
        with self._changed:
            if not decided:
                request.is_open = False
                is_over = request.is_last or request.unwanted or not isinstance(error, Exception)
                decided.append(not is_over and bool(getattr(error, "retryable", False)))
        return decided[0]

    def _require_current(self, request: SaveRequest) -> None:
        if request.replaced_by:
            self._replaced += 1
            raise ReplacedError(request.replaced_by) from None

    def _wait(self, request: SaveRequest, error: Exception, look: Callable[[], object]) -> None:
        """Wait until the next attempt; raise `error` if there is to be none."""
        began, pause_s = time.monotonic(), self._pause_s * random.SystemRandom().uniform(0.5, 1)
        self._pause_s, request.is_pausing = min(2 * self._pause_s, RETRY_MAX_S), True
        try:
            while True:
                look()
                with self._changed:
                    left_s = began + min(pause_s, self._longest_s) - time.monotonic()
                    if request.is_awaited or request.unwanted or request.replaced_by or left_s <= 0:
                        break
                    if not threading.main_thread().is_alive():
                        break
                    self._changed.wait(min(left_s, LOOK_S))
        finally:
            request.is_pausing = False
        self._require_current(request)
        if request.unwanted:
            raise error

    def _note_failure(self, request: SaveRequest, error: Exception) -> Callable[[], None]:
        """Count a failed attempt; return a function that logs the first one of a series, new errors, and longer pauses.

        The caller logs once it holds no lock: a handler of the log may block, if it writes to the same volume.
        """
        if self._began is None:
            self._began, self._pause_s, self._told_at = time.monotonic(), RETRY_S, 0.0
        self._attempts += 1
        text = str(error)
        kind = _RANDOM.sub("", text)
        if kind in self._told and self._pause_s <= self._told_at:
            return lambda: None
        self._told.add(kind)
        self._told_at = self._pause_s
        since = f"nothing is durable since {self._durable}" if self._durable else "no save has been durable yet"
        message = "run=%s step=%d is not durable yet: attempt %d has failed, and the save is tried again; %s: %s"
        return partial(log.warning, message, self._name, request.step, self._attempts, since, text)

    def _note_durable(self, request: SaveRequest) -> None:
        """Note a commit; it ends a series of failures."""
        with self._changed:
            began, attempts, replaced = self._began, self._attempts, self._replaced
            self._began, self._attempts, self._replaced = None, 0, 0
            self._told.clear()
            self._durable = f"step {request.step}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        if began is not None:
            message = (
                "run=%s step=%d is durable, after %.0f s, %d failed attempts, and %d saves that newer ones replaced"
            )
            log.warning(message, self._name, request.step, time.monotonic() - began, attempts, replaced)

    def upkeep(self, work: Callable[[], object]) -> None:
        """Do what follows a commit. If `warns`, it gets a StorageError once the store has not answered for `SILENT_S`.

        Else newer saves would wait for it, or be skipped.
        """
        with watched(self._upkeep_watch if self.warns else None):
            work()

    def _require_answer(self) -> None:
        silent = progress.retrying(self._upkeep_watch)
        if silent is not None and silent[1] > SILENT_S:
            raise StorageError(f"{silent[0]} has not answered for {silent[1]:.0f} s")

    # -- other threads

    def hurry(self, request: SaveRequest | None) -> None:
        """Let the save have one more attempt, at once: somebody waits for it and gets the error."""
        if request is not None and os.getpid() == self._pid:  # a fork may have left the lock locked
            with self._changed:
                request.is_awaited = True
                self._changed.notify_all()

    def give_up(self, request: SaveRequest, why: str) -> None:
        """End the save without a commit, with an error that says why."""
        with self._changed:
            request.unwanted = why
            self._changed.notify_all()

    def is_pending(self, request: SaveRequest | None) -> bool:
        """Return whether a newer save would replace this one: it has failed, and no store has answered it since.

        So it would if one request of the first attempt is sent again and again.
        """
        if not self.warns or request is None:
            return False
        if self._began is not None and not (request.is_open or request.look_open()):
            return True
        silent = progress.retrying(request.watch)
        return silent is not None and silent[1] > SILENT_S

    def replace(self, request: SaveRequest | None, ref: str) -> None:
        """End a save that is pending, in favour of the save `ref`.

        An attempt whose store has answered goes on, and one that has just begun: if a newer save could end it, saves
        that follow each other soon would never commit one.

        On another rank than rank 0 this only notes that a newer save waits: see `silence`.
        """
        if request is None:
            return
        request.is_followed = not self._leads
        if request.is_followed or not self._is_due(request):
            return
        is_pending = self.is_pending(request)  # without the lock: in a job it may ask the other ranks
        with self._changed:
            if is_pending and self._is_due(request):
                silent = progress.retrying(request.watch)
                self._silence = (
                    f"{silent[0]} has not answered for {silent[1]:.0f} s" if silent else "it has no answer yet"
                )
                request.replaced_by = ref
                request.unwanted = f"save {ref} has replaced it"
                self._changed.notify_all()

    def _is_due(self, request: SaveRequest) -> bool:
        return request.is_pausing or time.monotonic() - request.attempted > ANSWER_S

    def end_soon(self) -> None:
        """Pause only for short times from now on: the process is to end."""
        with self._changed:
            self._longest_s = RETRY_END_S
            self._changed.notify_all()


def silence(request: SaveRequest) -> str:
    """Return why an attempt fails here while a newer save waits: the store has not answered a request of this watch.

    Rank 0 does not see that the store of another rank is silent. "": it is not, or no newer save waits.
    """
    silent = progress.retrying(current_watch()) if request.is_followed else None
    if silent is None or silent[1] <= SILENT_S:
        return ""
    return f"save {request.ref}: {silent[0]} has not answered a request for {silent[1]:.0f} s"
