"""The result of a check: problems, the snapshots that they damage, and the commands that fix them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..checks import check_choice
from ..format.keys import parse_record_key
from ..format.records import Snapshot
from ..text import brief, strip_hint

LEVELS = ("metadata", "data", "restore")
REPAIR = "snapstore repair"
#: For problems that only level "restore" finds: `snapstore repair` alone would not find them.
REPAIR_CHUNKS = f"{REPAIR} --level restore"
#: For snapshots that no repair can heal. Without --apply it only says which ones it would forget.
DROP = f"{REPAIR} --drop"
GC = "snapstore gc"
COPY = "put a copy of the object back under its key"
REBUILD = "snapstore index rebuild"
#: Abandons the records that only the index knows.
ACCEPT = f"{REBUILD} --forget-missing"
#: State of the stand-in for a snapshot whose record cannot be read.
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem or a note.

    Attributes:
        kind: "config", "record", "index", "manifest", "pack", "chunk", "policy", "session", "gc" or "unexplained".
        key: key of the object that has the problem.
        message: describes the problem.
        snapshots: ids of the snapshots that cannot be restored because of it.
        command: the command to run next; empty: there is nothing to do.
        help: the cost of that command, and any other remedy; mostly empty.
    """

    kind: str
    key: str
    message: str
    snapshots: tuple[str, ...] = ()
    command: str = ""
    help: str = ""

    __repr__ = brief


@dataclass(slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        problems: every problem.
        notes: damage that is known and harms no snapshot: revisions that later ones replace, packs in quarantine.
        restorable: committed and forgotten snapshots that have no problem and can be read here, by run and seq.
        damaged: snapshots that have a problem. A snapshot whose record cannot be read has a stand-in of state
            "unreadable".
        unknown: snapshots that this release, or this machine, cannot read in full. A snapshot whose record is of
            another version has a stand-in too.
        packs: number of packs.
        packs_read: number of packs that the check read whole.
        decoded_bytes: bytes that level "restore" decoded: each chunk, and each base, about once.
        unneeded_bytes: size of the packs and manifests that no committed snapshot needs; gc frees them. 0 if gc would
            refuse or wait: nothing can tell then which ones are needed.
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

    __repr__ = brief

    @property
    def ok(self) -> bool:
        """Return whether no problem was found."""
        return not self.problems


class Findings:
    """Collects problems and notes while a scan runs."""

    def __init__(self, problems: Iterable[Problem] = (), notes: Iterable[Problem] = ()) -> None:
        self.problems, self.notes = list(problems), list(notes)

    def problem(
        self,
        kind: str,
        key: str,
        message: object,
        snapshots: Iterable[str] = (),
        *,
        command: str = REPAIR,
        instead: str = "",
    ) -> None:
        """Add a problem; see `Problem`."""
        self.problems.append(Problem(kind, key, strip_hint(message), tuple(snapshots), command, instead))

    def note(self, kind: str, key: str, message: object, command: str = "") -> None:
        """Add damage that harms no snapshot."""
        self.notes.append(Problem(kind, key, strip_hint(message), (), command))

    def stray(self, kind: str, key: str) -> None:
        """Add an object whose key is not one of a repository."""
        self.problem(
            kind, key, f"{key}: not the key of a snapstore object; if nothing else needs it, remove it", command=""
        )


def require_level(level: str) -> None:
    """Raise InvalidInputError unless a level of a check has this name."""
    check_choice("check level", level, LEVELS)


def stand_in(key: str) -> Snapshot:
    """Return a stand-in for the snapshot of a record that cannot be read, from the record's key alone."""
    parsed = parse_record_key(key)
    assert parsed is not None
    run, step, name, revision = parsed
    return Snapshot(id=name, run=run, step=step, seq=0, state=UNREADABLE, write_id="", revision=revision)
