"""The result of a repair."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..check.report import CheckResult
from ..format.records import FORGOTTEN, Snapshot


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done, or of a dry run: that would be.

    Attributes:
        kind: "config", "record", "remove", "quarantine", "release", "heal", "drop", "purge" or "index".
        key: the object that it is about.
    """

    kind: str
    key: str
    message: str


@dataclass(slots=True)
class RepairResult:
    """What a repair did, or would do.

    Attributes:
        found: what was wrong before.
        applied: whether anything was done.
        actions: in their order.
        healed: snapshots that are whole again.
        lost: (snapshot, what is lost) of those that stay damaged, dropped ones included; where the record cannot be
            read, a stand-in of state "unreadable".
        dropped: those of them that were forgotten.
        helps: what brings a snapshot back that stays damaged, by its id; of none that is forgotten or dropped.
        open: what could not be done now, and why.
    """

    found: CheckResult
    applied: bool
    actions: list[Action] = field(default_factory=list)
    healed: list[Snapshot] = field(default_factory=list)
    lost: list[tuple[Snapshot, str]] = field(default_factory=list)
    dropped: list[Snapshot] = field(default_factory=list)
    helps: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[Snapshot]:
        """Snapshots that stay damaged; those that are forgotten only wait for a gc."""
        dropped = {snapshot.id for snapshot in self.dropped}
        return [s for s, _ in self.lost if s.state != FORGOTTEN and s.id not in dropped]

    @property
    def ok(self) -> bool:
        """Whether nothing stays damaged, and nothing was left open."""
        return not self.left and not self.open
