"""Operations that stall and then succeed, and what other processes do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.faults import FaultStore
from kit.schedules import collecting, forgetting
from snapstore.errors import IntegrityError
from snapstore.storage.base import ObjectStore


class Stalling(FaultStore):
    """Its k-th operation takes long: others run before it has its effect, or before its caller has the answer."""

    def __init__(self, inner: ObjectStore, meanwhile: Callable[[], object], where: str) -> None:
        super().__init__(inner)
        self.meanwhile, self.where, self.stalls_at = meanwhile, where, -1

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        stalls = len(self.log) == self.stalls_at
        if stalls and self.where == "before":
            self.meanwhile()
        result = super()._act(name, key, effect)
        if stalls and self.where == "behind":
            self.meanwhile()
        return result


class Foreign(FaultStore):
    """A store that shows sessions as if they were of another host: a gc fences them by their age alone."""

    def is_locked(self, key: str) -> None:
        return None


def others_meanwhile(inner: ObjectStore, ref: str) -> dict[str, Callable[[], object]]:
    """Return actions of another process; some of them forget the snapshot of a reference."""

    def gc(store: ObjectStore = inner, fence_after_s: float = 3600.0) -> None:
        try:
            collecting(fence_after_s)(store)
        except IntegrityError as error:  # a gc cannot tell what a damaged snapshot needs
            if "nothing was deleted" not in str(error):
                raise

    return {
        "gc": gc,
        "forget and gc": lambda: (forgetting(ref)(inner), gc()),
        "forget and fence": lambda: (forgetting(ref)(inner), gc(Foreign(inner), 0.0), gc()),
    }
