"""Mirror retention: delete in a mirror what its policies do not keep, and what copies that failed have left there.

In: the mirror, after a copy or when it is full. Out: forgotten snapshots, and runs of gc. Damage there only costs
space: it must not stop the copies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .. import retention
from ..context import Context
from ..errors import DAMAGE, ConflictError, InvalidInputError, StorageError, StorageFullError
from ..protocol import gc
from ..protocol.forget import forget
from ..protocol.same_repository import confirmed
from ..text import log

#: A full mirror gets at most one gc in this time [s].
ROOM_PAUSE_S = 3600.0


class Retention:
    """Deletes in the mirror of one run.

    Args:
        keep: the policies of the mirror; none: it keeps everything.

    Attributes:
        has_left: whether the last gc has failed, so that objects may be left.
    """

    def __init__(self, run: str, keep: Sequence[retention.Policy]) -> None:
        self._run, self._keep, self.has_left = run, keep, False
        self._room_made_s: float | None = None

    def apply(self, target: Context) -> None:
        """Apply the policies."""
        try:
            with confirmed(target):
                if self._keep and (forget(target, self._keep, run=self._run).forgotten or self.has_left):
                    self._collect(target)
        except InvalidInputError as error:  # the policies would keep nothing
            log.warning("run=%s nothing is deleted in %s: %s", self._run, target.store.url, error)
        except DAMAGE as error:
            log.warning("run=%s nothing is deleted in %s until it is repaired: %s", self._run, target.store.url, error)

    def _collect(self, target: Context) -> None:
        """Run gc. If it cannot read an object, the next copy tries again: this only costs space."""
        try:
            gc.collect(target)
            self.has_left = False
        except StorageFullError:
            raise
        except StorageError as error:
            self.has_left = True
            log.warning("run=%s gc fails in %s, the next copy tries again: %s", self._run, target.store.url, error)

    def make_room(self, target: Context) -> None:
        """Run gc in a full mirror, unless it has run lately: a process that was killed may have left a copy there."""
        if self._room_made_s is not None and time.monotonic() < self._room_made_s + ROOM_PAUSE_S:
            return
        self._room_made_s = time.monotonic()
        try:
            with confirmed(target):
                freed = gc.collect(target).deleted_bytes
            log.info("run=%s %s is full: gc deleted %d bytes there", self._run, target.store.url, freed)
        except (StorageError, ConflictError, *DAMAGE) as error:
            log.warning("run=%s %s is full, and gc fails there: %s", self._run, target.store.url, error)
