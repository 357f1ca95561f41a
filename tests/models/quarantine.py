"""The rules of quarantine beside rewriting (compact, recode), explored state by state.

A small explicit-state model of docs/design/protocol.md, "Repair", after that of rewriting.py. Pack `p` holds a wrong
blob that snapshots A and B need. A rewriting run copies it, first for A into `qA`, then for B into `qB`; it may crash
anywhere. A repair surveys the records, puts a note for every bad pack that it has seen, lists the sessions, which its
report names, and checks A, then B. The invariant: once the repair is over, wrong bytes that a committed snapshot needs
are in packs that have notes, or the report has named the snapshot, or the session that published it.
With a rule dropped there must be a counter-example, or the rule is not needed.

    python tests/models/quarantine.py        every rule, kept and dropped

That a run looks for notes once more before it publishes is no rule here. It makes wrong copies rare; these rules make
sure that the report names those which remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import exploring

Names = frozenset[str]
NONE: Names = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "session first": "a rewriting session is announced before it looks for notes",
    "each session": "every session of a run looks for notes, not the first alone",
    "stays": "what lies in a pack that has a note is not rewritten",
    "notes first": "the repair puts its notes before it lists sessions",
    "sessions": "the report tells of the sessions that run",
    "what is new": "when a snapshot's turn comes, manifests that are new since the survey are read",
    "all notes": "a note is put of every bad pack that the survey has seen, copies too",
}
TURNS = "AB"


class Run(NamedTuple):
    """The rewriting run, at some step of one of its sessions."""

    at: str = "begin"
    turn: int = 0
    noted: Names | None = None  # as it has looked


class Repair(NamedTuple):
    """The repair, at some step."""

    at: str = "survey"
    turn: int = 0
    seen: tuple[str, ...] = ()  # the pack that each snapshot needed
    told: Names = NONE  # sessions and snapshots that the report names


class State(NamedTuple):
    """Everything that is stored, and the step of every actor."""

    needs: tuple[str, ...] = ("p", "p")  # by A and B; every pack here is bad
    by: tuple[str, ...] = ("", "")  # the session that published it
    notes: Names = NONE
    sessions: Names = NONE
    run: Run = Run()
    repair: Repair = Repair()


Step = tuple[str, State]


def run_steps(state: State, dropped: Names) -> Iterator[Step]:
    """The rewriting run: announce, look, copy, publish, end; for A, then for B."""
    run = state.run
    if run.at == "over" or run.turn == len(TURNS):
        return
    name, session = TURNS[run.turn], f"run{run.turn}"

    def to(**changes: object) -> State:
        return state._replace(run=run._replace(**changes))  # type: ignore[arg-type]

    first, then = ("look", "announce") if "session first" in dropped else ("announce", "look")
    after = {"begin": first, first: then, then: "copy"}
    if run.at != "begin":
        yield "run crashes", to(at="over")  # its session stays, as of a dead process
    if run.at == "begin":
        yield f"run begins {name}", to(at=first)
    elif run.at == "announce":
        yield f"run announces {name}", to(at=after[run.at])._replace(sessions=state.sessions | {session})
    elif run.at == "look":
        again = run.noted is None or "each session" not in dropped
        yield "run looks for notes", to(at=after[run.at], noted=state.notes if again else run.noted)
    elif run.at == "copy":
        if state.needs[run.turn] in (run.noted or NONE) and "stays" not in dropped:
            yield f"run leaves {name}", to(at="end")
        else:
            yield f"run copies {name}", to(at="publish")
    elif run.at == "publish":
        needs, by = list(state.needs), list(state.by)
        needs[run.turn], by[run.turn] = f"q{name}", session
        yield f"run publishes {name}", to(at="end")._replace(needs=tuple(needs), by=tuple(by))
    elif run.at == "end":
        over = Run(turn=run.turn + 1, noted=run.noted)
        yield f"run ends {name}", state._replace(run=over, sessions=state.sessions - {session})


def repair_steps(state: State, dropped: Names) -> Iterator[Step]:
    """A repair: survey, notes, sessions, then snapshot by snapshot."""
    repair = state.repair

    def to(**changes: object) -> State:
        return state._replace(repair=repair._replace(**changes))  # type: ignore[arg-type]

    first, then = ("sessions", "notes") if "notes first" in dropped else ("notes", "sessions")
    after = {"survey": first, first: then, then: "turns"}
    if repair.at == "survey":
        yield "repair surveys", to(at=after[repair.at], seen=state.needs)
    elif repair.at == "notes":
        bad = frozenset(repair.seen) & {"p"} if "all notes" in dropped else frozenset(repair.seen)
        yield f"repair notes {sorted(bad)}", to(at=after[repair.at])._replace(notes=state.notes | bad)
    elif repair.at == "sessions":
        told = NONE if "sessions" in dropped else state.sessions
        yield f"repair lists {sorted(told)}", to(at=after[repair.at], told=repair.told | told)
    elif repair.at == "turns":
        name, pack = TURNS[repair.turn], state.needs[repair.turn]
        new = pack != repair.seen[repair.turn] and "what is new" not in dropped
        more = frozenset([name]) if new else NONE
        last = repair.turn + 1 == len(TURNS)
        yield (
            f"repair looks at {name}",
            to(at="over" if last else "turns", turn=repair.turn + 1, told=repair.told | more),
        )


def holds(state: State) -> bool:
    """Return whether the repair has noted or reported all wrong bytes that a snapshot needs."""
    if state.repair.at != "over":
        return True
    named = zip(TURNS, state.needs, state.by, strict=True)
    return all(pack in state.notes or {name, by} & state.repair.told for name, pack, by in named)


def explore(dropped: Names = NONE) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""

    def steps(state: State) -> Iterator[Step]:
        yield from run_steps(state, dropped)
        yield from repair_steps(state, dropped)

    return exploring.explore(State(), steps, holds)


if __name__ == "__main__":
    exploring.report(RULES, explore)
