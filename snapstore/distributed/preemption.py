"""Preemption: a job that is told to end saves once more, all ranks at the same step.

In: a signal, on any rank. Out: the first step that no rank has begun, agreed on by all ranks. Their main threads may be
in a collective of the training, each waiting for the others; so threads in the background agree, and `reached` only
compares numbers. While they agree, `reached` waits: for about AGREE_S, or LATE_S where rank 0 is late. A rank whose
channel is broken, or does not answer, ends by itself.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInputError, RanksError
from ..text import log
from ..threads import LockSlot
from .base import ChannelError, Ranks, named, period_s, wait_for

#: Rank 0 waits so long for the steps of the other ranks; then it decides from the steps it knows [s].
AGREE_S = 10.0
#: The other ranks wait so long for rank 0's step; after that each rank acts by itself [s].
LATE_S = 20.0
#: `reached` waits so much longer for the thread that agrees, which may hang in a call of the channel [s].
GRACE_S = 1.0


class Preemption:
    """The end of a job, as one rank sees it.

    Args:
        ranks: None: one process, which agrees with itself.
        prefix: of all its keys.
    """

    def __init__(self, ranks: Ranks | None, prefix: str) -> None:
        self._ranks, self._prefix = ranks, prefix
        self.noticed = False
        self._last_step = -1
        self._agreed: int | None = None
        self._asked_at: float | None = None  # when the loop first asked after the signal [s, time.monotonic]
        self._lock = threading.Lock()  # held while the ranks agree: no step begins

    @property
    def is_told(self) -> bool:
        """Return whether the job is to end: this process was told, or the ranks have agreed."""
        return self.noticed or self._agreed is not None

    def notice(self, *_: object) -> None:
        """Note that the job must end. A signal handler may call this: it only sets a flag."""
        self.noticed = True

    def reached(self, step: int) -> bool:
        """Return whether the job must end, and this is the agreed step, or a later one.

        One process needs no agreement: after `notice` it returns True at any step.
        """
        if self._ranks is None:
            return self.noticed
        if self._agreed is None:
            slot = LockSlot(self._lock, LATE_S + GRACE_S)
            try:
                slot.acquire()
                if self._agreed is None and (not slot.is_held or self._is_overdue()):
                    log.warning("rank %d ends by itself: the channel does not answer", self._ranks.rank)
                    self._agreed = step
                self._last_step = step
            finally:
                slot.release()
        return self._agreed is not None and step >= self._agreed

    def _is_overdue(self) -> bool:
        """Return whether the thread in the background, though told, has not begun to agree: it hangs in a call."""
        if not self.noticed:
            return False
        now = time.monotonic()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return now > self._asked_at + LATE_S

    def poll(self) -> None:
        """Look whether any rank was told that the job must end; if so, agree on a step. Called in the background.

        Raises:
            RanksError: the channel is broken, and this rank was not told.
        """
        ranks = self._ranks
        if ranks is None or self._agreed is not None:
            return
        told = f"{self._prefix}preempt"
        if not self.noticed and ranks.look(told) is None:
            return
        with self._lock:
            agreed = self._agree(ranks, told)
            if self._agreed is not None:
                return  # `reached` has waited long enough
            self._agreed = agreed
        log.warning("the job is to end: rank %d of %d saves at step %d", ranks.rank, ranks.count, self._agreed)

    def _agree(self, ranks: Ranks, told: str) -> int:
        """Return the step after the last one that any rank has begun; if rank 0 tells none, that this one has."""
        deadline = time.monotonic() + LATE_S
        try:
            ranks.post(told, b"1")
            ranks.post(f"{told}/last/{ranks.rank}", str(self._last_step).encode())
            if ranks.rank == 0:
                ranks.post(f"{told}/step", str(self._decide(ranks, told)).encode())
            return int(wait_for(lambda: ranks.look(f"{told}/step"), _until(ranks, deadline)))
        except RanksError as error:
            log.warning("rank %d ends by itself: %s", ranks.rank, error)
            return self._last_step + 1

    def _decide(self, ranks: Ranks, told: str) -> int:
        """Return the step to save at, on rank 0. A late rank learns it once its background thread runs again."""
        keys = [f"{told}/last/{rank}" for rank in range(ranks.count)]
        found: list[bytes | None] = []
        try:
            found += wait_for(lambda: ranks.look_all(keys), _until(ranks, time.monotonic() + AGREE_S))
        except ChannelError:
            raise
        except RanksError:
            found += [ranks.look(key) for key in keys]
            late = [rank for rank, last in enumerate(found) if last is None]
            if late:
                log.warning("%s of %d: no step within %.6g s of SIGTERM", named(late), ranks.count, AGREE_S)
        return max([self._last_step, *(int(last) for last in found if last is not None)]) + 1


def _until(ranks: Ranks, deadline: float) -> Callable[[], None]:
    """Return a function that raises RanksError after a time [s, time.monotonic].

    It sends the heartbeats, since the thread that does so otherwise is the one that waits.
    """
    next_beat = 0.0

    def watch() -> None:
        nonlocal next_beat
        now = time.monotonic()
        if now > deadline:
            raise RanksError("the ranks have not agreed when to end")
        if now >= next_beat:
            next_beat = now + period_s(ranks)
            ranks.beat()

    return watch


class _Signal:
    """SIGTERM of this process: one handler for all managers that handle preemption, and the handler before it."""

    def __init__(self) -> None:
        self._told: list[Preemption] = []
        self._before: Any = signal.SIG_DFL
        self._pid = -1

    def add(self, preemption: Preemption) -> None:
        """Tell a Preemption from now on; raises ValueError outside the main thread."""
        before = signal.signal(signal.SIGTERM, self._handle)
        if before != self._handle:  # bound methods are equal, not identical
            self._before = before if before is not None else signal.SIG_DFL
        if self._pid != os.getpid():
            self._told, self._pid = [], os.getpid()
        self._told.append(preemption)

    def remove(self, preemption: Preemption) -> None:
        """Tell it no more. After the last one, restore the handler before, unless the program has set another one."""
        if preemption in self._told:
            self._told.remove(preemption)
        is_main = threading.current_thread() is threading.main_thread()
        if not self._told and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: Any) -> None:
        """Tell all; if there is nobody to tell, or this is a child process, do what happened before."""
        if self._told and self._pid == os.getpid():
            for preemption in tuple(self._told):
                preemption.notice()
        elif callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_signal = _Signal()


class SignalHandler:
    """Makes SIGTERM tell a manager's Preemption, until it is closed; made in the main thread.

    Attributes:
        ends: whether the save of the last step ends the process.

    Raises:
        InvalidInputError: this is not the main thread.
    """

    def __init__(self, preemption: Preemption, *, end: bool, timeout: float) -> None:
        self.ends, self._timeout, self._end_s = end, timeout, math.inf
        self._preemption = preemption
        try:
            _signal.add(preemption)
        except ValueError as error:
            raise InvalidInputError("handle_preemption sets a signal handler: call it in the main thread") from error

    def left_s(self) -> float:
        """Return the time that is left to end the process; it begins with the first call [s]."""
        self._end_s = min(self._end_s, time.monotonic() + self._timeout)
        return max(0.0, self._end_s - time.monotonic())

    def close(self) -> None:
        """Tell the Preemption no more; the last one restores the previous handler, if this is the main thread."""
        _signal.remove(self._preemption)
