"""What a look over a repository finds: problems, whom they hurt, and the commands that help."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.keys import parse_record_key
from ..format.records import Snapshot

REPAIR = "snapstore repair"
#: Looks as closely as the level that found it: `snapstore repair` alone would find nothing.
REPAIR_CHUNKS = f"{REPAIR} --level restore"
#: What no repair can mend; without --apply it only says what it would forget.
DROP = f"{REPAIR} --drop"
GC = "snapstore gc"
COPY = "a copy of the object from elsewhere, put back under its key,"
REBUILD = "snapstore index rebuild"
#: Gives up what only the index knows.
ACCEPT = f"{REBUILD} --forget-missing"
#: State of the stand-in for a snapshot whose record cannot be read: its key names it.
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        kind: "config", "record", "index", "manifest", "pack", "chunk", "policy", "session" or "gc".
        key: the object it lies in.
        message: what is wrong.
        snapshots: ids of the snapshots that cannot be restored because of it.
        command: what to run; empty where there is nothing to be done.
        help: what the command does that is not to be undone, and what may be done instead; mostly empty.
    """

    kind: str
    key: str
    message: str
    snapshots: tuple[str, ...] = ()
    command: str = ""
    help: str = ""


@dataclass(slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        problems: everything wrong.
        notes: what is damaged and known, and harms nobody: revisions that later ones replace, packs in quarantine.
        restorable: committed and forgotten snapshots without a finding against them that can be read here, in order.
        damaged: those with one; of one whose record cannot be read a stand-in of state "unreadable".
        unknown: neither: this release, or this machine, cannot read all of them. Of one whose record it cannot read a
            stand-in as well.
        packs, packs_read: how many there are, and how many of them the level and the share have read whole.
        decoded_bytes: how much level "restore" has decoded: all chunks and what they build on, each about once.
        unneeded_bytes: packs and manifests that no committed snapshot needs; gc frees them. 0 while gc would refuse, or
            wait: what is needed cannot be told then.
    """

    level: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    restorable: list[Snapshot] = field(default_factory=list)
    damaged: list[Snapshot] = field(default_factory=list)
    unknown: list[Snapshot] = field(default_factory=list)
    packs: int = 0
    packs_read: int = 0
    decoded_bytes: int = 0
    unneeded_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def stand_in(key: str) -> Snapshot:
    """What the key of a record that cannot be read says of its snapshot."""
    parsed = parse_record_key(key)
    assert parsed is not None
    run, step, name, revision = parsed
    return Snapshot(id=name, run=run, step=step, seq=0, state=UNREADABLE, write_id="", revision=revision)
