"""Bring back: what a restore with fallback gets from the mirror, before it goes on to an older snapshot.

In: a snapshot that is damaged in the first store, or that only the mirror has. Out: its copy in the first store; or the
finding that the mirror does not have it whole either. If the mirror has it whole, or may have it, and no copy can be
made, that is an error: an older snapshot would lose training.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..catalog.history import View, is_dropped
from ..catalog.needed_keys import all_manifests
from ..catalog.read_twice import read_object_twice
from ..check.verify_wanted import first_lost_of
from ..context import Context
from ..errors import DAMAGE, CapabilityError, IntegrityError, StorageError, UnreadObjectError, add_line
from ..format.manifests import manifest
from ..format.records import COMMITTED, FORGOTTEN, Snapshot
from ..protocol.notes import has_bytes
from ..text import log, strip_hint
from .mirror import Mirror
from .mirror_order import forgotten_last, is_later_there

_AWAY = (
    "the mirror may have a newer whole snapshot; restore again when it answers, or, to go on from an older one now, "
    "make the manager without mirror="
)


class LostThere(NamedTuple):
    """A snapshot that only the mirror has, and that is damaged there."""

    step: int
    id: str
    why: str


class BringBack:
    """The mirror, for one restore with fallback.

    Args:
        source: the first store.
    """

    def __init__(self, mirror: Mirror, source: Context) -> None:
        self._mirror, self._source = mirror, source

    def snapshot(self, name: str) -> Snapshot | None:
        """Copy back the snapshot of an id, which is damaged in the first store.

        Returns:
            It, as the first store then has it; None: the mirror does not have it whole.

        Raises:
            IntegrityError: the mirror has it whole, and it cannot be copied over what is in the first store.
            StorageError: the mirror is away, or withholds what may be whole; or the first store refuses the copy.
            CapabilityError: this machine cannot rebuild what the mirror has.
            ConflictError: other processes keep revising it.
        """
        there = self._there()
        if there is None or not _is_known(there, name, self._mirror.run):
            return None
        known = there.get(name)
        if known is None or known.state not in (COMMITTED, FORGOTTEN):
            return None
        if why := self._why_lost(known):
            log.warning(
                "run=%s step=%d cannot be copied back from %s: %s", known.run, known.step, self._mirror.url, why
            )
            return None
        return self._source.index.refresh(self._mirror.run).get(name)

    def is_earlier(self, name: str, snapshot: Snapshot) -> bool:
        """Return whether the mirror has the snapshot of an id, and it is earlier than one of the first store.

        Raises:
            StorageError: the mirror is away.
        """
        there = self._there()
        known = there.get(name) if there is not None else None
        return there is not None and known is not None and not is_later_there(there, known, snapshot)

    def newest(self) -> list[LostThere]:
        """Copy back the newest whole snapshot that only the mirror has, if it is later than those of the first store.

        Returns:
            Those that are later than it, and are damaged in the mirror. Raises as `snapshot` does.
        """
        run = self._mirror.run
        here, there, lost = self._source.index.refresh(run), self._there(), list[LostThere]()
        if there is None:
            return lost
        ours, besides = here.newest(run), forgotten_last(here, run)
        whys, steps = there.unknown(run), there.unknown_steps(run)
        for name, (key, known) in there.unknown_ids(run).items():
            is_old = known is not None and ours is not None and not is_later_there(there, known, ours)
            if (
                not is_old
                and here.get(name) is None
                and not here.is_unknown(name, run)
                and not _is_known(there, name, self._mirror.run)
            ):
                why = strip_hint(whys.get(key, "is gone")).removeprefix(f"{key}: ")
                lost.append(LostThere(steps[name], name, f"{self._only}: its record {key}: {why}"))
        for theirs in reversed(there.snapshots(run)):
            held = here.get(theirs.id)
            is_here = here.is_unknown(theirs.id, run) or (
                held is not None and held.state in (COMMITTED, FORGOTTEN) and not is_dropped(held)
            )
            if is_here or theirs.id in besides or (ours is not None and not is_later_there(there, theirs, ours)):
                continue
            if not (why := self._why_lost(theirs)):
                break
            lost.append(LostThere(theirs.step, theirs.id, f"{self._only}: {why}"))
        return lost

    @property
    def _only(self) -> str:
        return f"only {self._mirror.url} has it"

    def _there(self) -> View | None:
        """Return what the mirror has; None: there is no repository, so it has nothing."""
        try:
            target = self._mirror.target()
            return target.index.refresh(self._mirror.run) if target is not None else None
        except StorageError as error:
            add_line(error, _AWAY)
            raise

    def _why_lost(self, known: Snapshot) -> str:
        """Copy a snapshot of the mirror back; return "", or its damage there."""
        here, why = self._source.index.refresh(known.run), ""
        if self._mirror.read_only:
            why = "a read-only manager copies nothing back"
        elif here.is_unknown(known.id, known.run) or any(s.id == known.id for s in here.missing):
            why = f"its record in {self._source.store.url} is damaged or gone"
        else:
            try:
                self._mirror.copy_back(known)
                return ""
            except CapabilityError:
                raise
            except UnreadObjectError as error:
                add_line(error, _AWAY)
                raise
            except DAMAGE as error:
                why = strip_hint(str(error))
                if not here.unknown_ids(known.run):
                    return why
        log.warning("run=%s step=%d is verified in %s: %s", known.run, known.step, self._mirror.url, why)
        if damage := self._damage_there(known):
            return damage
        raise IntegrityError(
            f"{known.ref} (id:{known.id[:12]}): {self._mirror.url} has it whole, and it is not copied back: {why}; an "
            f"older snapshot would lose training{self._mirror.copy_advice(known)}"
        )

    def _damage_there(self, known: Snapshot) -> str:
        """Rebuild all chunks of a snapshot in the mirror; return its damage, or "" if it is whole."""
        target = self._mirror.target()
        assert target is not None
        store, seed = target.store, target.engines.digest_seed
        try:
            if not has_bytes(target, known):
                return f"{self._mirror.url} lacks bytes of it"
            manifests = all_manifests(
                known, lambda ref: read_object_twice(store, lambda: manifest.read(store, ref, seed))
            )
            for _, m in manifests:
                if (lost := first_lost_of(target, m, np.arange(len(m.table)))) is not None:
                    return strip_hint(str(lost.error))
        except CapabilityError:
            raise
        except DAMAGE as error:
            return strip_hint(str(error))
        return ""


def _is_known(there: View, name: str, run: str) -> bool:
    """Return whether the record of an id in the mirror is not damaged; raise UnreadRecordError if it is withheld."""
    try:
        there.require_record(name, run)
    except IntegrityError:
        return False
    return True
