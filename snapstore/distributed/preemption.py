"""Preemption: a job that is told to end saves once more, all ranks at the same step.

In: a signal or a notice, on any ranks. Out: the first step that no rank has begun, and the signal that came first, both
agreed on by all ranks. Their main threads may be in a collective of the training, each waiting for the others; so
threads in the background agree, and `reached` only compares numbers. While they agree, `reached` waits: for about
AGREE_S, or LATE_S where rank 0 is late. A rank whose channel is broken, or does not answer, ends by itself.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..errors import InvalidInputError, RanksError
from ..text import log, quoted
from ..threads import LockSlot
from .base import ChannelError, Ranks, named, period_s, wait_for
from .notices import Notice, NoticePoller

#: Rank 0 waits so long for the steps of the other ranks; then it decides from the steps it knows [s].
AGREE_S = 10.0
#: The other ranks wait so long for rank 0's step; after that each rank acts by itself [s].
LATE_S = 20.0
#: `reached` waits so much longer for the thread that agrees, which may hang in a call of the channel [s].
GRACE_S = 1.0
#: The signals that may tell a job to end: they end a process that does not expect them. Ctrl-C must work at any time.
MAY_TELL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
#: In place of a signal: the job was told by a notice.
NOTICE = 0


class Preemption:
    """The end of a job, as one rank sees it.

    Args:
        ranks: None: one process, which agrees with itself.
        prefix: of all its keys.

    Attributes:
        number: what told this process first: a signal, or NOTICE.
    """

    def __init__(self, ranks: Ranks | None, prefix: str) -> None:
        self._ranks, self._prefix = ranks, prefix
        self.noticed, self.number = False, int(signal.SIGTERM)
        self._agreed_number: int | None = None  # what told the job first; the ranks agree on it with the step
        self._last_step = -1
        self._agreed: int | None = None
        self._asked_at: float | None = None  # when the loop first asked after the signal [s, time.monotonic]
        self._lock = threading.Lock()  # held while the ranks agree: no step begins

    @property
    def is_told(self) -> bool:
        """Return whether the job is to end: this process was told, or the ranks have agreed."""
        return self.noticed or self._agreed is not None

    @property
    def status(self) -> int:
        """Return the exit status of the process: 128 + the signal; after a notice that of SIGTERM."""
        return 128 + (self._first or signal.SIGTERM)

    @property
    def teller(self) -> str:
        """Return what told the job, in words."""
        return signal.Signals(self._first).name if self._first else "a notice"

    @property
    def _first(self) -> int:
        return self.number if self._agreed_number is None else self._agreed_number

    def notice(self, number: int = signal.SIGTERM) -> None:
        """Note that the job must end. A signal handler may call this: it only sets flags."""
        if not self.noticed:
            self.number = number
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
        log.warning(
            "the job is to end, told by %s: rank %d of %d saves at step %d",
            self.teller,
            ranks.rank,
            ranks.count,
            self._agreed,
        )

    def _agree(self, ranks: Ranks, told: str) -> int:
        """Return the step after the last one that any rank has begun; if rank 0 tells none, that this one has."""
        deadline = time.monotonic() + LATE_S
        try:
            ranks.post(told, str(self.number).encode())
            ranks.post(f"{told}/last/{ranks.rank}", str(self._last_step).encode())
            if ranks.rank == 0:
                number = int(ranks.look(told) or self.number)  # of the first rank that has posted it
                ranks.post(f"{told}/step", f"{self._decide(ranks, told)} {number}".encode())
            found = wait_for(lambda: ranks.look(f"{told}/step"), _until(ranks, deadline))
            step, self._agreed_number = map(int, found.split())
            return step
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
                log.warning("%s of %d: no step within %.6g s of the signal", named(late), ranks.count, AGREE_S)
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


class _Signals:
    """The signals of this process: one handler for all managers that handle preemption, and the handlers before it."""

    def __init__(self) -> None:
        self._told: list[SignalHandler] = []
        self._before: dict[int, Any] = {}
        self._pid = -1

    def add(self, one: SignalHandler) -> None:
        """Tell it from now on; raises ValueError outside the main thread."""
        if self._pid != os.getpid():
            self._told, self._pid = [], os.getpid()
        self._told = [other for other in self._told if not other.stays]  # their process did not end after all
        self._told.append(one)
        try:
            for number in one.signals:
                before = signal.signal(number, self._handle)
                if before != self._handle:  # bound methods are equal, not identical
                    self._before[number] = before if before is not None else signal.SIG_DFL
        except ValueError:
            self._told.remove(one)
            raise

    def remove(self, one: SignalHandler) -> None:
        """Tell it no more. After the last one, restore the handlers before, unless the program has set others."""
        if one.stays:
            atexit.register(self._ignore, one.signals)
            return
        if one in self._told:
            self._told.remove(one)
        is_main = threading.current_thread() is threading.main_thread()
        for number in one.signals:
            is_last = not any(number in other.signals for other in self._told)
            if is_last and is_main and signal.getsignal(number) == self._handle:
                signal.signal(number, self._before[number])

    def _ignore(self, numbers: Collection[int]) -> None:
        """Ignore signals from now on: Python restores the default for handlers of its own while it still ends."""
        for number in numbers:
            if self._pid == os.getpid() and signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: Any) -> None:
        """Tell all; if there is nobody to tell, or this is a child process, do what happened before.

        Schedulers signal all processes of a job. A signal that was named would end the forked workers of a DataLoader,
        and so the loop, before its last save: they ignore it. SIGTERM ends them, since their parent uses it.
        """
        told = [one for one in tuple(self._told) if number in one.signals]
        before = self._before.get(number, signal.SIG_DFL)
        if told and self._pid == os.getpid():
            for one in told:
                one.preemption.notice(number)
        elif callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and (not told or number == signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_signals = _Signals()


class SignalHandler:
    """Lets signals and a notice tell a manager's Preemption, until it is closed; made in the main thread.

    Args:
        signals: these tell it, and SIGTERM.
        notice: this tells it too; None: only signals.

    Attributes:
        ends: whether the save of the last step ends the process.
        stays: whether `close` leaves the handlers.

    Raises:
        InvalidInputError: this is not the main thread; or `signals` or `notice` is wrong.
        CapabilityError: no thread can be started for the notice.
    """

    def __init__(
        self,
        preemption: Preemption,
        *,
        end: bool,
        timeout: float,
        signals: Collection[int] = (),
        notice: Notice | None = None,
    ) -> None:
        self.ends, self._timeout, self._end_s = end, timeout, math.inf
        self.preemption, self.signals, self.stays = preemption, _checked(signals), False
        self._poller: NoticePoller | None = None
        try:
            _signals.add(self)
        except ValueError as error:
            raise InvalidInputError("handle_preemption sets a signal handler: call it in the main thread") from error
        try:
            if notice is not None:
                self._poller = NoticePoller(notice, partial(preemption.notice, NOTICE))
        except BaseException:
            self.close()
            raise

    def left_s(self) -> float:
        """Return the time that is left to end the process; it begins with the first call [s]."""
        self._end_s = min(self._end_s, time.monotonic() + self._timeout)
        return max(0.0, self._end_s - time.monotonic())

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Let `close` leave the handlers: the process ends, and more signals must not change its status.

        An error inside restores the previous ones.
        """
        self.stays = True
        try:
            yield
        except BaseException:
            self.stays = False
            self.close()
            raise

    def close(self) -> None:
        """Tell the Preemption no more; the last one restores the previous handlers, if this is the main thread."""
        if self._poller is not None:
            self._poller.close()
        _signals.remove(self)


def _checked(signals: Any) -> tuple[int, ...]:
    """Return the numbers of some signals and of SIGTERM, once each."""
    try:
        found = [MAY_TELL[MAY_TELL.index(one)] for one in signals]
    except (TypeError, ValueError) as error:
        names = ", ".join(f"signal.{one.name}" for one in MAY_TELL)
        raise InvalidInputError(f"signals {quoted(signals)}: expected a list with some of {names}") from error
    return tuple(dict.fromkeys([int(signal.SIGTERM), *map(int, found)]))
