"""Background: the thread of a manager's save, and the slot that lets one save run at a time.

In: a function to run in the background. Out: its error, at the caller's next call. The slot survives Ctrl-C
between any two steps of Python code (handle.py, `Slot`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engine.registry import Engines
from ..errors import InvalidInputError
from ..threads import no_threads
from .handle import Slot

#: The thread of a save first sleeps so long, so that its caller goes on at once; else Python lets it wait for 5 ms [s].
YIELD_S = 0.001


class Background:
    """The saves of one manager that run, or have failed, in the background.

    Attributes:
        saving: locked while a save runs; see `Slot`.
        errors: the errors of saves that the caller has not seen yet.
    """

    def __init__(self, name: str, engines: Engines) -> None:
        self._name, self._engines = name, engines
        self.saving = threading.Lock()
        self.errors: list[BaseException] = []
        self._inside: set[int] = set()  # threads that are inside save
        self._pid = os.getpid()

    def raise_errors(self) -> None:
        """Raise the first error of the saves that failed since the last call; drop the others."""
        if self.errors:
            error, self.errors = self.errors[0], []
            raise error

    @contextmanager
    def holding_slot(self) -> Iterator[Slot]:
        """Wait for the running save, and hold the slot until a thread in the background takes it over.

        Raises:
            The error of an earlier save; see `raise_errors`.
        """
        thread, slot = threading.get_ident(), Slot(self.saving)
        try:
            self._inside.add(thread)
            slot.acquire()
            self.raise_errors()
            yield slot
        finally:
            try:
                if not slot.handed_over:
                    slot.release()
            finally:
                self._inside.discard(thread)

    def start(self, function: Callable[[], object], slot: Slot) -> None:
        """Run a function in a thread of its own, which holds the slot.

        Raises:
            CapabilityError: no thread can be started.
        """

        def run() -> None:
            time.sleep(YIELD_S)
            lock = slot.hand_over()
            if lock is not None:
                try:
                    with self._engines.in_background():
                        function()
                finally:
                    lock.release()

        # Not a daemon: the interpreter's exit waits for it, and the snapshot is whole.
        try:
            threading.Thread(target=run, name=f"snapstore-{self._name}").start()
            slot.handed_over = True
        except RuntimeError as error:
            raise no_threads() from error

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no save runs, for at most `timeout` seconds; return whether none does."""
        if os.getpid() != self._pid:  # a forked child has no such thread
            return True
        self.check_inside()
        if timeout is None:
            with self.saving:
                return True
        if self.saving.acquire(timeout=max(0.0, timeout)):
            self.saving.release()
            return True
        return False

    def check_inside(self) -> None:
        """Raise InvalidInputError if this thread is inside `save`: the call would wait for itself."""
        if threading.get_ident() in self._inside:
            raise InvalidInputError(
                "SnapshotManager was called while this thread is inside save (from a signal handler?); "
                "set a flag in the handler, and save or close from the training loop"
            )
