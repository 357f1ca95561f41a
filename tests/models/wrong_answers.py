"""The rules that keep one wrong answer of a store from costing a snapshot, explored state by state.

A small explicit-state model of docs/design/protocol.md, "One wrong answer", beside those of saves and gcs. B is
committed and needs pack `b`; users forget it and bring it back. X is committed and needs `x`; nobody touches it. A save
S builds on `b` and puts `s`. A gc marks and sweeps. Any actor may stall anywhere; the save may crash or fail anywhere;
the gc may fence it at any time. And the store lies once, to any actor at any time: it hides an object, leaves a key out
of a listing, or does not store what is put. Two lies last for the whole gc, as from a cache: a listing that never shows
X, and the header of another manifest in place of X's.

The invariant: what a committed record needs is there; a save that was told "committed" is committed; and, if the store
has not lied, a record or a session explains each pack, since otherwise no gc could ever delete it. With a rule dropped
there must be a counter-example, or the rule is not needed.

    python tests/models/wrong_answers.py        every rule, kept and dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import exploring

Names = frozenset[str]
NONE: Names = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "marks twice": "a save lists marks twice",
    "present": "a save looks whether the packs that it refers to are there, behind the marks",
    "session again": "a save looks whether its session is still there, right before its record",
    "record read back": "a save reads its record back",
    "who fails says so": "a save that has put something and commits nothing creates its record as aborted",
    "sessions twice": "a gc lists sessions twice behind its mark",
    "ended": "a session has ended if a listing lacks it as well, not by one 404",
    "fence read back": "a gc reads the fence back before it releases the session",
    "records twice": "a gc lists records twice before it deletes",
    "explained": "a gc deletes nothing as long as no record or session explains some object that nothing needs",
    "header proven": "a gc believes a manifest's header by the digest in the record",
    "swept read back": "a gc reads `swept` back before it deletes",
    "own mark": "a gc looks for its own mark before it deletes",
}


class Seen(NamedTuple):
    """The records that some listings have shown together: records never go away."""

    b: int = -1  # B's highest revision
    x: bool = False
    s: str = ""


class Save(NamedTuple):
    at: str = "begin"
    looks: int = 0  # listings of marks
    marked: Names = NONE
    uses: Names = NONE
    told: str = ""


class Gc(NamedTuple):
    at: str = "packs"
    looks: int = 0
    present: Names = NONE
    seen: Seen = Seen()
    again: bool = False  # sweeping
    mark: Names = NONE
    doomed: Names = NONE
    waits: bool = False
    blind: bool = False  # no listing of records shows it X
    misled: bool = False  # it takes X's header for one that needs nothing


class State(NamedTuple):
    """Everything that is stored, and the step of every actor. B's revisions: committed, forgotten, committed, ..."""

    packs: Names = frozenset("bx")
    b: int = 0
    swept: bool = False  # B's last revision
    s: str = ""  # S's record: committed, aborted
    session: bool = False
    mark: Names = NONE
    lied: bool = False
    save: Save = Save()
    gc: Gc = Gc()

    @property
    def b_needs(self) -> Names:
        return NONE if self.swept or self.b % 2 else frozenset("b")


Step = tuple[str, State]
MOST_REVISIONS = 3


def user_steps(state: State) -> Iterator[Step]:
    if not state.swept and state.b < MOST_REVISIONS:
        yield ("forget B", "un-forget B")[state.b % 2], state._replace(b=state.b + 1)


def save_steps(state: State, dropped: Names) -> Iterator[Step]:
    """The save: session, marks, records, packs of the base, its own, session, record, record, end."""
    save = state.save

    def to(lie: bool = False, **changes: object) -> State:
        return state._replace(lied=state.lied or lie, save=save._replace(**changes))  # type: ignore[arg-type]

    def lies() -> bool:
        return not state.lied

    if save.at in ("begin", "over", "dead"):
        if save.at == "begin":
            yield "save puts its session", to(at="marks")._replace(session=True)
            if lies():
                yield "save puts its session: a lie, it is not stored", to(lie=True, at="marks")
        return
    yield "save crashes", to(at="dead")
    if save.at == "marks":
        after = "records" if save.looks or "marks twice" in dropped else "marks"
        yield f"save lists marks {sorted(state.mark)}", to(at=after, looks=1, marked=save.marked | state.mark)
        if lies() and state.mark:
            yield "save lists marks: a lie, none", to(lie=True, at=after, looks=1)
    elif save.at == "records":
        usable = state.b_needs - save.marked
        yield f"save lists records, builds on {sorted(usable)}", to(at="present", uses=usable)
        if lies() and not state.b_needs:
            yield (
                "save lists records: a lie, B as it was",
                to(lie=True, at="present", uses=frozenset("b") - save.marked),
            )
    elif save.at == "present":
        there = save.uses if "present" in dropped else save.uses & state.packs
        yield f"save finds {sorted(there)} there", to(at="write", uses=there)
    elif save.at == "write":
        yield "save puts its pack", to(at="session")._replace(packs=state.packs | {"s"})
    elif save.at == "session":
        if state.session or "session again" in dropped:
            yield "save finds its session", to(at="commit")
        else:
            yield "save finds its session gone", to(at="failed")
        yield "save fails", to(at="failed")
    elif save.at == "commit":
        if state.s:
            yield f"save finds its record {state.s}", to(at="end" if state.s == "committed" else "failed")
        else:
            read = "read" if "record read back" not in dropped else "told"
            yield "save commits", to(at=read)._replace(s="committed")
            if lies():
                yield "save commits: a lie, it is not stored", to(lie=True, at=read)
    elif save.at == "read":
        yield f"save reads its record: {state.s}", to(at="told" if state.s == "committed" else "commit")
    elif save.at == "told":
        yield "save is told: committed", to(at="end", told="committed")
    elif save.at == "failed":
        says = state.s or ("aborted" if "who fails says so" not in dropped else "")
        yield "save has failed", to(at="end")._replace(s=says)
    elif save.at == "end":
        yield "save ends", to(at="over")._replace(session=False)


def gc_steps(state: State, dropped: Names) -> Iterator[Step]:
    """A gc: packs, records, explained, mark, sessions, wait or fence; again; swept, its own mark, delete."""
    gc = state.gc

    def to(lie: bool = False, **changes: object) -> State:
        return state._replace(lied=state.lied or lie, gc=gc._replace(**changes))  # type: ignore[arg-type]

    def lies() -> bool:
        return not state.lied

    if gc.at == "packs":
        yield f"gc lists packs {sorted(state.packs)}", to(at="records", looks=0, present=state.packs, seen=Seen())
        if lies() and not gc.again:
            yield "gc begins: no listing will show it X", to(lie=True, blind=True)
            yield "gc begins: it will read another header for X's", to(lie=True, misled="header proven" in dropped)
    elif gc.at == "records":
        after = "live" if gc.looks or not gc.again or "records twice" in dropped else "records"
        now = Seen(state.b + state.swept, not gc.blind, state.s)
        both = Seen(max(now.b, gc.seen.b), now.x or gc.seen.x, now.s or gc.seen.s)
        yield "gc lists records", to(at=after, looks=1, seen=both)
        if lies():
            for less in (both._replace(b=gc.seen.b), both._replace(x=gc.seen.x), both._replace(s=gc.seen.s)):
                yield "gc lists records: a lie, one lacks", to(lie=True, at=after, looks=1, seen=less)
    elif gc.at == "live":
        yield from gc_decides(state, dropped)
    elif gc.at == "mark":
        yield f"gc marks {sorted(gc.doomed)}", to(at="sessions", looks=0, mark=gc.doomed)._replace(mark=gc.doomed)
        if lies():
            yield "gc marks: a lie, it is not stored", to(lie=True, at="sessions", looks=0, mark=gc.doomed)
    elif gc.at == "sessions":
        after = "wait" if gc.looks or "sessions twice" in dropped else "sessions"
        yield f"gc lists sessions: {state.session}", to(at=after, looks=1, waits=gc.waits or state.session)
        if lies():
            yield "gc lists sessions: a lie, none", to(lie=True, at=after, looks=1)
    elif gc.at == "wait":
        if not gc.waits or not state.session:
            yield "gc has waited", to(at="packs", again=True)
            return
        yield "gc fences the save", to(at="fenced")._replace(s=state.s or "aborted")
        if lies():
            yield "gc fences the save: a lie, nothing is stored", to(lie=True, at="fenced")
            ends = {"at": "packs", "again": True} if "ended" in dropped else {}
            yield "gc looks for the session: a lie, 404", to(lie=True, **ends)
    elif gc.at == "fenced":
        if state.s or "fence read back" in dropped:
            yield "gc releases the session", to(at="packs", again=True)._replace(session=False)
        else:
            yield "gc stops: its fence is not there", to(at="over")
    elif gc.at == "swept":
        yield from gc_sweeps(state, dropped)
    elif gc.at == "own mark":
        if state.mark or "own mark" in dropped:
            yield "gc finds its mark", to(at="delete")
        else:
            yield "gc stops: its mark is gone", to(at="over")
    elif gc.at == "delete":
        for pack in sorted(gc.doomed):
            yield f"gc deletes {pack}", to(doomed=gc.doomed - {pack})._replace(packs=state.packs - {pack})
        if not gc.doomed:
            yield "gc is done", to(at="over")._replace(mark=NONE)


def gc_decides(state: State, dropped: Names) -> Iterator[Step]:
    """Choose the packs that no seen record needs; stop if one of them is not explained."""
    gc, seen = state.gc, state.gc.seen
    live = frozenset("b") if seen.b >= 0 and seen.b % 2 == 0 and not (state.swept and seen.b > state.b) else NONE
    live |= frozenset("x") if seen.x and not gc.misled else NONE
    live |= state.save.uses | {"s"} if seen.s == "committed" else NONE
    unneeded = gc.present - live
    # A session that has ended since then has left a record: the code looks at both again before it stops.
    explained = {"b": seen.b >= 0, "x": seen.x, "s": bool(seen.s or state.session or state.s)}
    if "explained" not in dropped and not all(explained[pack] for pack in unneeded):
        yield "gc stops: nothing explains a pack", state._replace(gc=gc._replace(at="over"))
        return
    if gc.again:
        yield "gc computes live again", state._replace(gc=gc._replace(at="swept", doomed=gc.mark & unneeded))
    elif unneeded:
        yield "gc computes live", state._replace(gc=gc._replace(at="mark", doomed=unneeded))
    else:
        yield "gc has nothing to do", state._replace(gc=gc._replace(at="over"))


def gc_sweeps(state: State, dropped: Names) -> Iterator[Step]:
    """Write `swept` if B loses bytes: the revision after the one seen, unless it exists already."""
    gc = state.gc
    if "b" not in gc.doomed or state.swept:
        yield "gc need not write swept", state._replace(gc=gc._replace(at="own mark"))
    elif gc.seen.b != state.b or state.b % 2 == 0:
        yield "gc finds B revised, and looks again", state._replace(gc=gc._replace(at="packs"))
    else:
        yield "gc writes swept", state._replace(swept=True, gc=gc._replace(at="own mark"))
        if not state.lied:
            at = "own mark" if "swept read back" in dropped else "over"
            yield "gc writes swept: a lie, it is not stored", state._replace(lied=True, gc=gc._replace(at=at))


def holds(state: State) -> bool:
    """Return whether the invariant of the module holds."""
    needed = state.b_needs | {"x"}
    if state.s == "committed":
        needed |= state.save.uses | {"s"}
    explained = state.lied or "s" not in state.packs or bool(state.s) or state.session
    return needed <= state.packs and (not state.save.told or state.s == "committed") and explained


def explore(dropped: Names = NONE) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""

    def steps(state: State) -> Iterator[Step]:
        yield from user_steps(state)
        yield from save_steps(state, dropped)
        yield from gc_steps(state, dropped)

    return exploring.explore(State(), steps, holds)


if __name__ == "__main__":
    exploring.report(RULES, explore)
