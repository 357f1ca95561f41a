"""The result of a repair."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..check.report import CheckResult
from ..format.records import FORGOTTEN, Snapshot
from ..text import brief


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One change that a repair made, or would make.

    Attributes:
        kind: "config", "record", "session", "remove", "quarantine", "release", "heal", "prove", "drop", "purge" or
            "index".
        key: key of the object that changes.
        message: describes the change.
    """

    kind: str
    key: str
    message: str


@dataclass(slots=True)
class RepairResult:
    """The result of a repair, or of its dry run.

    Attributes:
        found: the problems before the repair.
        applied: whether the changes were made; False: a dry run.
        actions: the changes, in their order.
        healed: snapshots that are whole again.
        lost: (snapshot, what is lost) of every snapshot that stays damaged, dropped ones included. A snapshot whose
            record cannot be read has a stand-in of state "unreadable".
        dropped: the snapshots in `lost` that this repair forgot.
        helps: id -> how to bring a snapshot in `left` back.
        open: what could not be done now, and why.
    """

    found: CheckResult
    applied: bool
    actions: list[RepairAction] = field(default_factory=list)
    healed: list[Snapshot] = field(default_factory=list)
    lost: list[tuple[Snapshot, str]] = field(default_factory=list)
    dropped: list[Snapshot] = field(default_factory=list)
    helps: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    __repr__ = brief

    @property
    def left(self) -> list[Snapshot]:
        """Return the snapshots that stay damaged, without forgotten ones, which only wait for a gc."""
        dropped = {snapshot.id for snapshot in self.dropped}
        return [s for s, _ in self.lost if s.state != FORGOTTEN and s.id not in dropped]

    @property
    def ok(self) -> bool:
        """Return whether nothing stays damaged and nothing was left open."""
        return not self.left and not self.open
