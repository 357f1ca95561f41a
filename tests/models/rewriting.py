"""The rules of rewriting (compact, recode) beside a save, forgets, un-forgets and gcs, explored state by state.

A small explicit-state model of docs/design/protocol.md, "Rewriting", after the three of saves and gcs. Two committed
snapshots, A and B, need pack `p`. A rewriting run gives other packs to A, then to B; for B it may use the packs that
it made for A. It may crash anywhere; every actor may stall anywhere, which is one more interleaving. The invariant:
every pack is there that the newest revision of a record needs, if that is committed. With a rule dropped there must be
a counter-example, or the rule is not needed.

    python tests/models/rewriting.py        every rule, kept and dropped

Closures stand for manifests: the set of packs that a record needs. One key `X.n` is one revision, created once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import exploring

Packs = frozenset[str]
NONE: Packs = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "session first": "the session is announced before marks and records are listed",
    "marks first": "marks are listed before records",
    "no mark": "a pack that a mark names is not shared",
    "needed": "a pack is shared only if a committed snapshot needs it, by the records listed behind the session",
    "each session": "what an earlier session of the run made is looked at again by the next one",
    "fence": "a gc that gives the session up creates the revision, as a copy of the one before",
    "create-only": "a revision is created only if nobody has created it",
    "session's name": "new packs carry the session's id in their names",
    "wait": "the sweep waits for, or fences, every session listed behind the mark",
    "recompute": "what lives is computed again before anything is deleted",
}


class Record(NamedTuple):
    """The newest revision of a snapshot."""

    revision: int
    state: str  # committed, forgotten, swept
    needs: Packs


class Run(NamedTuple):
    """The rewriting run, at some step of one of its sessions."""

    at: str = "begin"
    turn: int = 0  # whose turn it is: the index into TURNS
    revision: int = 0  # that its session announces
    marked: Packs = NONE
    needed: Packs = NONE  # by committed snapshots, as listed
    lists: tuple[str, ...] = ("marks", "records")  # what is still to be listed, in this order
    made: Packs = NONE  # for snapshots before this one
    target: Packs = NONE  # of this one


class Gc(NamedTuple):
    """A collector, at some step of one of its rounds."""

    at: str = "begin"
    rounds: int = 0
    present: Packs = NONE
    candidates: Packs = NONE
    waits: Packs = NONE  # sessions
    doomed: Packs = NONE


class Save(NamedTuple):
    """A saver that builds on whatever a committed snapshot needs and no mark names."""

    at: str = "begin"
    marked: Packs = NONE
    needs: Packs = NONE


class State(NamedTuple):
    """Everything that is stored, and the step of every actor."""

    packs: Packs = frozenset("p")
    records: tuple[tuple[str, Record], ...] = tuple((x, Record(0, "committed", frozenset("p"))) for x in "AB")
    sessions: tuple[tuple[str, str], ...] = ()  # (owner, the key that it announces)
    mark: Packs = NONE
    run: Run = Run()
    gc: Gc = Gc()
    save: Save = Save()

    @property
    def by_name(self) -> dict[str, Record]:
        return dict(self.records)

    @property
    def live(self) -> Packs:
        return frozenset(chain.from_iterable(r.needs for _, r in self.records if r.state == "committed"))

    def put(self, name: str, record: Record) -> State:
        return self._replace(records=tuple(sorted((self.by_name | {name: record}).items())))

    def revised(self, name: str, state: str) -> State:
        was = self.by_name[name]
        return self.put(name, was._replace(revision=was.revision + 1, state=state))

    def without_session(self, whose: str) -> State:
        return self._replace(sessions=tuple(s for s in self.sessions if s[0] != whose))


TURNS = "AB"
Step = tuple[str, State]


def steps(state: State, dropped: Packs, rounds: int, saver: bool) -> Iterator[Step]:
    """Yield all steps that may come next."""
    for name, record in state.records:
        if record.state == "committed":
            yield f"forget {name}", state.revised(name, "forgotten")
        elif record.state == "forgotten" and record.revision < 3 and not saver:
            yield f"un-forget {name}", state.revised(name, "committed")
    yield from run_steps(state, dropped)
    yield from gc_steps(state, dropped, rounds)
    if saver:
        yield from save_steps(state)


def run_steps(state: State, dropped: Packs) -> Iterator[Step]:
    """The rewriting run: begin, list, write, publish, end; for A, then for B."""
    run = state.run
    if run.at == "done" or run.turn == len(TURNS):
        return
    name = TURNS[run.turn]
    record = state.by_name[name]

    def to(**changes: object) -> State:
        return state._replace(run=run._replace(**changes))  # type: ignore[arg-type]

    over = Run(turn=run.turn + 1, made=run.made, lists=order(dropped))
    if run.at != "begin":
        yield "run crashes", to(at="done")
    if run.lists and (run.at == "listing" or (run.at == "begin" and "session first" in dropped)):
        seen = {"marked": state.mark} if run.lists[0] == "marks" else {"needed": state.live}
        yield f"run lists {run.lists[0]}", to(lists=run.lists[1:], **seen)
    elif run.at == "begin":
        announced = state._replace(sessions=(*state.sessions, (f"run{run.turn}", f"{name}.{record.revision + 1}")))
        yield f"run begins {name}", announced._replace(run=run._replace(at="listing", revision=record.revision + 1))
    elif run.at == "listing":
        if record.state != "committed" or record.revision + 1 != run.revision:
            yield f"run leaves {name}", state.without_session(f"run{run.turn}")._replace(run=over)
            return
        known = run.made
        if run.turn == 0 or "each session" not in dropped:
            known = known if "needed" in dropped else known & run.needed
            known = known if "no mark" in dropped else known - run.marked
        if known:
            yield f"run shares {sorted(known)}", to(at="written", target=known)
        own = frozenset(["q" if "session's name" in dropped else f"q{name}"])
        uploaded = state._replace(packs=state.packs | own)
        yield f"run uploads {sorted(own)}", uploaded._replace(run=run._replace(at="written", target=own))
    elif run.at == "written":
        free = "create-only" in dropped or (record.revision + 1 == run.revision and record.state == "committed")
        if free:
            after = state.put(name, Record(run.revision, "committed", run.target))
            yield f"run publishes {name}", after._replace(run=run._replace(at="published", made=run.made | run.target))
        else:
            yield f"run has lost {name}", to(at="published")
    elif run.at == "published":
        yield f"run ends {name}", state.without_session(f"run{run.turn}")._replace(run=over)


def order(dropped: Packs) -> tuple[str, ...]:
    """Return the order in which a session of the run lists."""
    return ("records", "marks") if "marks first" in dropped else ("marks", "records")


def save_steps(state: State) -> Iterator[Step]:
    """A save: session, marks, parent, upload, commit, end."""
    save = state.save

    def to(**changes: object) -> State:
        return state._replace(save=save._replace(**changes))  # type: ignore[arg-type]

    if save.at == "begin":
        yield "save begins", to(at="session")._replace(sessions=(*state.sessions, ("save", "S.0")))
    elif save.at == "session":
        yield "save lists marks", to(at="marks", marked=state.mark)
    elif save.at == "marks":
        parents = {r.needs for _, r in state.records if r.state == "committed" and not r.needs & save.marked}
        for needs in {NONE, *parents}:
            yield f"save builds on {sorted(needs)}", to(at="parent", needs=needs)
    elif save.at == "parent":
        yield "save uploads", to(at="written", needs=save.needs | {"s"})._replace(packs=state.packs | {"s"})
    elif save.at == "written":
        if "S" in state.by_name:
            yield "save is fenced", to(at="end")
        else:
            yield "save commits", to(at="end").put("S", Record(0, "committed", save.needs))
    elif save.at == "end":
        yield "save ends", to(at="over").without_session("save")


def gc_steps(state: State, dropped: Packs, rounds: int) -> Iterator[Step]:
    """A gc: list packs, live, mark, sessions, fence, live again, swept, its own mark, delete."""
    gc = state.gc

    def to(**changes: object) -> State:
        return state._replace(gc=gc._replace(**changes))  # type: ignore[arg-type]

    if gc.at == "begin" and gc.rounds < rounds:
        yield "gc lists packs", to(at="listed", present=state.packs)
    elif gc.at == "listed":
        yield "gc computes live", to(at="live", candidates=gc.present - state.live)
    elif gc.at == "live":
        if gc.candidates:
            yield f"gc marks {sorted(gc.candidates)}", to(at="marked")._replace(mark=gc.candidates)
        else:
            yield "gc has nothing", state._replace(gc=Gc(rounds=gc.rounds + 1))
    elif gc.at == "marked":
        waits = NONE if "wait" in dropped else frozenset(f"{who} {key}" for who, key in state.sessions)
        yield "gc lists sessions", to(at="waiting", waits=waits)
    elif gc.at == "waiting":
        there = {f"{who} {key}" for who, key in state.sessions}
        if not gc.waits & there:
            yield "gc has waited", to(at="sweeping")
        for waited in sorted(gc.waits & there):
            yield f"gc fences {waited}", fenced(state, waited, dropped)
    elif gc.at == "sweeping":
        doomed = gc.candidates if "recompute" in dropped else gc.candidates - state.live
        swept = state
        for name, record in state.records:  # before anything is deleted, so that no un-forget can follow
            if record.state == "forgotten" and record.needs & doomed:
                swept = swept.revised(name, "swept")
        yield "gc computes live again", swept._replace(gc=gc._replace(at="deleting", doomed=doomed))
    elif gc.at == "deleting" and gc.doomed:
        for pack in sorted(gc.doomed):
            yield f"gc deletes {pack}", to(doomed=gc.doomed - {pack})._replace(packs=state.packs - {pack})
    elif gc.at == "deleting":
        yield "gc is done", state._replace(gc=Gc(rounds=gc.rounds + 1), mark=NONE)


def fenced(state: State, waited: str, dropped: Packs) -> State:
    """Fence a session: take the key that it announces, and delete its object."""
    whose, key = waited.split()
    name, revision = key.split(".")
    after = state
    if name == "S":
        if "S" not in state.by_name:
            after = state.put("S", Record(0, "aborted", NONE))
    elif "fence" not in dropped and state.by_name[name].revision + 1 == int(revision):
        was = state.by_name[name]
        after = state.put(name, was._replace(revision=was.revision + 1))
    return after.without_session(whose)._replace(gc=state.gc._replace(waits=state.gc.waits - {waited}))


def explore(
    dropped: Packs = NONE, *, rounds: int = 2, saver: bool = False, limit: int = 5_000_000
) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""
    first = State(run=Run(lists=order(dropped)))
    return exploring.explore(
        first, lambda state: steps(state, dropped, rounds, saver), lambda state: state.live <= state.packs, limit
    )


if __name__ == "__main__":
    exploring.report(RULES, explore)
