"""The rules of manifests that several snapshots name, explored state by state.

A small explicit-state model of docs/design/protocol.md, "Shared manifests". A is committed and needs its manifest `m`
(which stands for its packs as well). B is committed, has stored nothing of its own, and names `m` too. A save S of the
same state names a manifest of a committed snapshot and stores nothing of its own either; or a rewriting run replaces
the manifest of A by `m1`, and then lets B name `m1` too. Users forget and bring back; a gc marks and sweeps. Any actor
may stall anywhere, also permanently, as if it had crashed. For the whole gc, the store may show it an old state of the
records of one snapshot, or none of them.

With children, as several ranks have them: `m` is a root that names the child `c`. A is being saved: `c` is put, then
`m`, then the record. So a gc may have marked `c` and not `m`. S shares `m`, and needs `c` with it.

Every object says for which revision of which snapshot it was put. The invariant: what a committed record needs is
there; and, if the store has not lied, a record or a session explains each object. With a rule dropped there must be a
counter-example, or the rule is not needed.

    python tests/models/shared_manifests.py        every rule, kept and dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import exploring

Names = frozenset[str]
NONE: Names = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "list": "a snapshot that names another's manifest puts a list of its manifests, which is its own",
    "list again": "a rewrite that lets a snapshot name another's new manifest puts a new list, for the new revision",
    "no mark": "a manifest that a mark names is not shared",
    "children": "a root is shared only if no mark names a child of it, and its children are there",
    "needed": "a manifest is shared only if, behind the marks, a committed snapshot names it and it is there",
    "explained": "a gc deletes nothing as long as no record or session explains some object that nothing needs",
    "wait": "the sweep waits for, or fences, every session listed behind the mark",
    "recompute": "what lives is computed again before anything is deleted",
}
#: For which revision of which snapshot each object is put, and by which session.
MADE_FOR = {
    "m": ("A", 0, "first"),
    "c": ("A", 0, "first"),
    "B.list": ("B", 0, ""),
    "S.list": ("S", 0, "save"),
    "m1": ("A", 1, "run0"),
    "m2": ("B", 1, "run1"),
    "B.list1": ("B", 1, "run1"),
}
MANIFESTS = frozenset(["m", "m1", "m2"])
#: The children of a root, in the part with children.
CHILDREN = {"m": frozenset("c")}
MOST_REVISIONS = 3


class Record(NamedTuple):
    """One revision of a snapshot."""

    state: str  # committed, forgotten, swept, aborted
    needs: Names


Records = tuple[tuple[str, tuple[Record, ...]], ...]


class Writer(NamedTuple):
    """The save, or the run at one of its two sessions."""

    at: str = "begin"
    turn: int = 0
    revision: int = 0  # that the session announces
    marked: Names = NONE
    known: Names = NONE  # manifests of committed snapshots, as listed
    needs: Names = NONE


class Gc(NamedTuple):
    at: str = "objects"
    again: bool = False  # sweeping
    blind: str = ""  # the snapshot whose records a lie hides ...
    shown: int = 0  # ... but for the first ones
    present: Names = NONE
    doomed: Names = NONE
    waits: tuple[tuple[str, str, int], ...] = ()


class State(NamedTuple):
    """Everything that is stored, and the step of every actor."""

    objects: Names
    records: Records
    sessions: tuple[tuple[str, str, int], ...] = ()  # (owner, the record that it announces)
    mark: Names = NONE
    lied: bool = False
    save: Writer = Writer()
    run: Writer = Writer()
    gc: Gc = Gc()
    has_children: bool = False

    @property
    def of(self) -> dict[str, tuple[Record, ...]]:
        return dict(self.records)

    def put_record(self, name: str, record: Record) -> State:
        after = self.of
        after[name] = (*after.get(name, ()), record)
        return self._replace(records=tuple(sorted(after.items())))

    def put(self, *names: str) -> State:
        return self._replace(objects=self.objects | set(names))

    def ended(self, whose: str) -> State:
        return self._replace(sessions=tuple(s for s in self.sessions if s[0] != whose))


Step = tuple[str, State]


def needs_of(records: dict[str, tuple[Record, ...]]) -> Names:
    """Return what committed records need."""
    ruling = (of[-1] for of in records.values() if of)
    return frozenset(chain.from_iterable(r.needs for r in ruling if r.state == "committed"))


def listed_by(state: State, dropped: Names) -> Names:
    """Return the manifests that a session may share, as it lists records now."""
    if "needed" in dropped:
        return frozenset(chain.from_iterable(r.needs for of in state.of.values() for r in of)) & MANIFESTS
    return needs_of(state.of) & MANIFESTS


def user_steps(state: State) -> Iterator[Step]:
    for name, of in state.records:
        if name == "S":
            continue
        if of[-1].state == "committed":
            yield f"forget {name}", state.put_record(name, of[-1]._replace(state="forgotten"))
        elif of[-1].state == "forgotten" and len(of) < MOST_REVISIONS:
            yield f"un-forget {name}", state.put_record(name, of[-1]._replace(state="committed"))


def shareable(state: State, writer: Writer, dropped: Names) -> Names:
    """Return the manifests that a session may let its record name."""
    usable = writer.known if "no mark" in dropped else writer.known - writer.marked
    if state.has_children and "children" not in dropped:
        safe = (state.objects if "needed" not in dropped else MANIFESTS | {"c"}) - writer.marked
        usable = frozenset(name for name in usable if CHILDREN.get(name, NONE) <= safe)
    return usable if "needed" in dropped else usable & state.objects


def first_steps(state: State, dropped: Names) -> Iterator[Step]:
    """The save of A by several ranks: session and child are there; then root, record, end; beside the save of S."""
    if "first" in {whose for whose, _, _ in state.sessions}:
        if "m" not in state.objects and "A" not in state.of:
            yield "first save puts m", state.put("m")
        if "m" in state.objects and "A" not in state.of:
            yield "first save commits", state.put_record("A", Record("committed", frozenset("mc")))
        if "A" in state.of:
            yield "first save ends", state.ended("first")
    yield from save_steps(state, dropped)


def save_steps(state: State, dropped: Names) -> Iterator[Step]:
    """A save of an unchanged state: session, marks, records, list, record, end."""
    save = state.save

    def to(**changes: object) -> State:
        return state._replace(save=save._replace(**changes))  # type: ignore[arg-type]

    if save.at == "begin":
        yield "save begins", to(at="marks")._replace(sessions=(*state.sessions, ("save", "S", 0)))
    elif save.at == "marks":
        yield "save lists marks", to(at="records", marked=state.mark)
    elif save.at == "records":
        yield "save lists records", to(at="shares", known=listed_by(state, dropped))
    elif save.at == "shares":
        for name in sorted(shareable(state, save, dropped)):
            own = NONE if "list" in dropped else frozenset(["S.list"])
            named = CHILDREN.get(name, NONE) if state.has_children else NONE
            yield f"save shares {name}", to(at="commit", needs=own | {name} | named).put(*own)
    elif save.at == "commit":
        if "S" in state.of:
            yield "save is fenced", to(at="end")
        else:
            yield "save commits", to(at="end").put_record("S", Record("committed", save.needs))
    elif save.at == "end":
        yield "save ends", to(at="over").ended("save")


def run_steps(state: State, dropped: Names) -> Iterator[Step]:
    """A rewriting run, first of A and then of B: session, marks, records, objects, revision, end."""
    run, name = state.run, "AB"[min(state.run.turn, 1)]
    whose, of = f"run{run.turn}", state.of[name]

    def to(**changes: object) -> State:
        return state._replace(run=run._replace(**changes))  # type: ignore[arg-type]

    if run.at == "over" or run.turn > 1:
        return
    if run.at == "begin":
        begun = state._replace(sessions=(*state.sessions, (whose, name, len(of))))
        yield f"run begins {name}", begun._replace(run=run._replace(at="marks", revision=len(of)))
    elif run.at == "marks":
        yield "run lists marks", to(at="records", marked=state.mark)
    elif run.at == "records":
        if of[-1].state == "committed" and len(of) == run.revision == 1:  # objects are made for revision 1
            yield "run lists records", to(at="write", known=listed_by(state, dropped))
        else:
            yield f"run leaves {name}", state.ended(whose)._replace(run=Writer(turn=run.turn + 1))
    elif run.at == "write":
        own = "m1" if name == "A" else "m2"
        yield f"run puts {own}", to(at="publish", needs=frozenset([own])).put(own)
        if name == "B" and "m1" in shareable(state, run, dropped):
            lists = NONE if "list again" in dropped or "list" in dropped else frozenset(["B.list1"])
            kept = of[-1].needs - MANIFESTS - ({"B.list"} if lists else NONE)
            yield "run shares m1", to(at="publish", needs=lists | kept | {"m1"}).put(*lists)
    elif run.at == "publish":
        if len(of) == run.revision:
            yield f"run publishes {name}", to(at="end").put_record(name, Record("committed", run.needs))
        else:
            yield f"run has lost {name}", to(at="end")
    elif run.at == "end":
        yield f"run ends {name}", state.ended(whose)._replace(run=Writer(turn=run.turn + 1))


def gc_steps(state: State, dropped: Names) -> Iterator[Step]:
    """A gc: objects, records, explained, mark, sessions, wait or fence; again; swept, delete."""
    gc = state.gc

    def to(**changes: object) -> State:
        return state._replace(gc=gc._replace(**changes))  # type: ignore[arg-type]

    if gc.at == "objects":
        yield "gc lists objects", to(at="records", present=state.objects)
        if not state.lied and not gc.again:
            for name, of in state.records:
                for shown in range(len(of)):
                    lie = f"gc begins: no listing will show it more than {shown} records of {name}"
                    yield lie, to(blind=name, shown=shown)._replace(lied=True)
    elif gc.at == "records":
        yield from gc_decides(state, dropped)
    elif gc.at == "mark":
        yield f"gc marks {sorted(gc.doomed)}", to(at="sessions")._replace(mark=gc.doomed)
    elif gc.at == "sessions":
        yield "gc lists sessions", to(at="wait", waits=() if "wait" in dropped else state.sessions)
    elif gc.at == "wait":
        left = [session for session in gc.waits if session in state.sessions]
        if not left:
            yield "gc has waited", to(at="objects", again=True)
        for whose, name, revision in left:
            fenced = state
            if len(state.of.get(name, ())) == revision:
                copy = state.of[name][-1] if revision else Record("aborted", NONE)
                fenced = state.put_record(name, copy)
            yield f"gc fences {whose}", fenced.ended(whose)
    elif gc.at == "delete":
        for name in sorted(gc.doomed):
            yield f"gc deletes {name}", to(doomed=gc.doomed - {name})._replace(objects=state.objects - {name})
        if not gc.doomed:
            yield "gc is done", to(at="over")._replace(mark=NONE)


def seen_by(state: State) -> dict[str, tuple[Record, ...]]:
    """Return the records that listings show the gc."""
    of = state.of
    if state.gc.blind:
        of[state.gc.blind] = of[state.gc.blind][: state.gc.shown]
    return of


def gc_decides(state: State, dropped: Names) -> Iterator[Step]:
    gc, seen = state.gc, seen_by(state)
    live, sessions = needs_of(seen), {whose for whose, _, _ in state.sessions}
    unneeded = gc.present - live

    def explained(name: str) -> bool:
        snapshot, revision, session = MADE_FOR[name]
        return len(seen.get(snapshot, ())) > revision or session in sessions

    if "explained" not in dropped and not all(map(explained, unneeded)):
        yield "gc stops: nothing explains an object", state._replace(gc=gc._replace(at="over"))
    elif gc.again:
        yield from gc_sweeps(state, seen, state.mark if "recompute" in dropped else state.mark & unneeded)
    else:
        yield "gc computes live", state._replace(gc=gc._replace(at="mark" if unneeded else "over", doomed=unneeded))


def gc_sweeps(state: State, seen: dict[str, tuple[Record, ...]], doomed: Names) -> Iterator[Step]:
    """Write `swept` for each snapshot that loses bytes: the revision after the one seen, unless it exists already."""
    after = state._replace(gc=state.gc._replace(at="delete", doomed=doomed))
    for name, of in seen.items():
        if of and of[-1].state == "forgotten" and of[-1].needs & doomed:
            if len(of) < len(state.of[name]):  # only a lie can cause this: a moment ago all revisions were seen
                yield f"gc stops: {name} is revised", state._replace(gc=state.gc._replace(at="over"))
                return
            after = after.put_record(name, of[-1]._replace(state="swept"))
    yield f"gc computes live again, writes swept: {sorted(doomed)}", after


def holds(state: State) -> bool:
    """Return whether the invariant of the module holds."""
    sessions, records = {whose for whose, _, _ in state.sessions}, state.of
    made_for = (MADE_FOR[name] for name in state.objects)
    explained = all(len(records.get(name, ())) > revision or of in sessions for name, revision, of in made_for)
    return needs_of(records) <= state.objects and (state.lied or explained)


def explore(dropped: Names = NONE) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""
    lists = NONE if "list" in dropped else frozenset(["B.list"])
    of = {"A": (Record("committed", frozenset("m")),), "B": (Record("committed", lists | {"m"}),)}
    alone = State(objects=lists | {"m"}, records=tuple(of.items()))
    several = State(objects=frozenset("c"), records=(), sessions=(("first", "A", 0),), has_children=True)
    states = 0
    for first, who in ((several, first_steps), (alone, save_steps), (alone, run_steps)):

        def steps(state: State, who=who) -> Iterator[Step]:  # type: ignore[no-untyped-def]
            yield from user_steps(state)
            yield from who(state, dropped)
            yield from gc_steps(state, dropped)

        broken, count = exploring.explore(first, steps, holds)
        states += count
        if broken:
            return broken, states
    return None, states


if __name__ == "__main__":
    exploring.report(RULES, explore)
