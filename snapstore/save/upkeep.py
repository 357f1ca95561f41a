"""Upkeep: what follows a commit: forget by the policies, then gc, then join records. One look serves the first two.

A save forgets and sweeps at most AT_ONCE snapshots, so that the first policy on a long run does not hold up the saves
that follow; the next save goes on, and `close` does what is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from functools import partial

from .. import retention
from ..context import Context
from ..errors import CapabilityError, IntegrityError, SnapstoreError
from ..format.records import Snapshot
from ..protocol import joining
from ..protocol.forget import HELD_AT_MOST, Bounds, forget, may_forget
from ..protocol.gc import Look, collect
from ..protocol.same_repository import confirmed
from ..text import log
from .background import Background
from .retrying import Retrying

#: A save forgets at most so many snapshots, and sweeps as many.
AT_ONCE = 256


class Upkeep:
    """The upkeep of one run.

    Args:
        stops: whether to delete no more.
        held: returns the ids of the snapshots that are not mirrored yet.

    Attributes:
        error: damage that the last upkeep has met, which the caller must learn of; None: it met none.
        is_left: whether the last one has left something to the next.
    """

    def __init__(
        self, context: Context, run: str, stops: Callable[[], bool], held: Callable[[], Container[str]]
    ) -> None:
        self._context, self._run, self._stops, self._held = context, run, stops, held
        self.error: BaseException | None = None
        self.is_left, self._pid = False, os.getpid()
        self._join_at = joining.AT_LEAST
        self._staying = set[str]()  # the keys of records that the last look has left, because they are damaged or gone

    def follows(self, keep: Sequence[retention.Policy]) -> bool:
        """Return whether there is something to do after each commit."""
        return bool(keep) or self._context.index.pages.exist

    def retain(self, keep: Sequence[retention.Policy], *, bounded: bool = True) -> None:
        """Forget by the policies, run gc, join records. A failure costs only space: the next save tries again.

        Args:
            bounded: forget and sweep at most AT_ONCE snapshots.
        """
        self.error = None
        try:
            if keep:
                self._forget_and_collect(keep, AT_ONCE if bounded else None)
            self._join()
        except Exception as error:  # noqa: BLE001  raised at the caller's next call, but not by `save`
            self.is_left = False
            if isinstance(error, SnapstoreError) and not isinstance(error, IntegrityError):
                log.warning("run=%s retention ended early, the next save tries again: %s", self._run, error)
                return
            log.error("run=%s nothing is forgotten or deleted until this is repaired: %s", self._run, error)
            self.error = error

    def begin_rest(self, keep: Sequence[retention.Policy], background: Background, retrying: Retrying) -> None:
        """Begin to forget and sweep what the saves have left, in the background; none of them runs."""
        with background.holding_slot(None) as slot:
            if slot.is_held and self.is_left and not self._stops() and os.getpid() == self._pid:
                log.info("run=%s forgets what the saves have left", self._run)
                background.prepares = False
                work = partial(self.retain, keep, bounded=False)
                try:
                    background.start(partial(retrying.upkeep, work), slot)
                except CapabilityError as error:  # it costs only space, and the next manager's saves go on
                    log.warning("run=%s what the saves have left to forget stays: %s", self._run, error)

    def _forget_and_collect(self, keep: Sequence[retention.Policy], most: int | None) -> None:
        context, held = self._context, self._held()
        with confirmed(context), context.index.one_write():
            going = may_forget(context, keep, self._run)
            if not (self.is_left or going is None or self._is_likely(going, held)):
                return
            # None: on most saves nothing goes, and no gc follows, so do not list objects first
            look = Look.at(context) if going is not None else None
            view = look.view if look is not None else None
            done = forget(context, keep, run=self._run, view=view, bounds=Bounds(held, most, self._stops))
            left = done.left
            if done.forgotten or self.is_left:
                look = look.with_revisions(done.forgotten) if look is not None else None
                left += collect(context, stops=self._stops, look=look, most=most).left
            self.is_left = left > 0
            gone = {snapshot.id for snapshot in done.forgotten}
            self._staying = {s.key for s in going or () if not done.left and s.id not in gone and s.id not in held}

    def _join(self) -> None:
        """Join loose records, if there are enough; if they cannot be joined, wait until there are twice as many."""
        loose = self._context.index.loose(self._run)
        if loose <= self._join_at or self._stops():
            return
        self._join_at = 2 * loose
        try:
            with confirmed(self._context):
                joining.join(self._context, self._run, stops=self._stops)
            self._join_at = joining.AT_LEAST + self._context.index.loose(self._run)
        except SnapstoreError as error:
            log.warning("run=%s %s: %s", self._run, joining.STAY_LOOSE, error)

    def _is_likely(self, going: Sequence[Snapshot], held: Container[str]) -> bool:
        """Return whether something of `going` is likely to be forgotten."""
        new = [s.id in held for s in going if s.key not in self._staying]
        return sum(new) > HELD_AT_MOST or not all(new)
