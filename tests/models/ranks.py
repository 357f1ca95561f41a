"""The rules of a save by several ranks beside a gc, explored state by state.

A small explicit-state model of docs/design/ranks.md, "The commit": rank 0 and two other ranks save one snapshot that
may build on a base; a gc collects, again and again; a user forgets the base and brings it back. Any actor may stop at
any point and never continue, and the gc may fence the session at any time: nothing relies on a clock. The invariant:
everything that a committed record needs is there; a rank that reports the result of the save agrees with the record;
and the session or the record explains everything that a rank has put. With a rule dropped there must be a
counter-example, or the rule is not needed.

    python tests/models/ranks.py        every rule, kept and dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import exploring

Names = frozenset[str]
NONE: Names = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "session first": "rank 0 announces its session before it reads anything",
    "marks": "no base is used that a mark names",
    "all reports": "rank 0 commits with the report of every rank",
    "durable before report": "a rank reports when its packs and manifests are durable",
    "the record decides": "a rank that hears no outcome creates the record as aborted",
    "unclear": "rank 0 posts no outcome of its own if it does not know whether its record has landed",
    "explained": "rank 0 creates the record as aborted before it ends a session that ranks have written for",
    "gc fences": "a gc that gives a session up creates its record first",
    "live again": "a gc computes the live set again before it deletes",
}
RANKS = ("1", "2")


class Rank(NamedTuple):
    """One of the other ranks: its step, whether its pack is there, and the result that it reports: C or F (failed)."""

    at: str = "wait"
    pack: str = ""  # "", "there", "deleted"
    word: str = ""


class Gc(NamedTuple):
    at: str = "idle"
    candidates: Names = NONE
    waits: bool = False


class State(NamedTuple):
    """Everything that is stored or posted, and the step of every actor."""

    base: str = "C"  # C committed, F forgotten, S swept
    base_pack: bool = True
    marked: Names = NONE
    session: str = ""  # "", "there", "ended"
    record: str = ""  # "", C, A
    flies: bool = False  # a PUT of the record had no answer, and may still take effect
    lead: str = "start"
    uses: bool = False
    begun: bool = False
    outcome: str = ""  # C, F, U
    own_pack: str = ""
    ranks: tuple[Rank, ...] = (Rank(), Rank())
    gc: Gc = Gc()


Step = tuple[str, State]


def live(s: State) -> set[str]:
    needed = {"base"} if s.base == "C" or (s.record == "C" and s.uses) else set()
    return needed | ({"0", *RANKS} if s.record == "C" else set())


def present(s: State) -> Names:
    there = {name for name, rank in zip(RANKS, s.ranks, strict=True) if rank.pack == "there"}
    return frozenset(there | ({"0"} if s.own_pack == "there" else set()) | ({"base"} if s.base_pack else set()))


def lead_steps(s: State, dropped: Names) -> Iterator[Step]:
    """Rank 0: session, base, begin, write, collect, commit or give up, end."""
    if s.lead == "start" and "session first" in dropped:
        yield "0: reads marks and records", s._replace(lead="late", uses=s.base == "C" and "base" not in s.marked)
    elif s.lead == "start":
        yield "0: puts its session", s._replace(lead="read", session="there")
    elif s.lead == "late":
        yield "0: puts its session", s._replace(lead="begin", session="there")
    elif s.lead == "read":
        uses = s.base == "C" and ("base" not in s.marked or "marks" in dropped)
        yield "0: reads marks, then records", s._replace(lead="begin", uses=uses)
    elif s.lead == "begin":
        yield "0: posts begin", s._replace(lead="write", begun=True)
    elif s.lead == "write":
        yield "0: its pack is durable", s._replace(lead="collect", own_pack="there")
    elif s.lead == "collect" and ("all reports" in dropped or all(rank.at in ("told", "over") for rank in s.ranks)):
        if s.record:
            yield "0: its key is taken", s._replace(lead="end", outcome="F")
        else:
            yield "0: commits", s._replace(lead="end", record="C", outcome="C")
            unknown = s._replace(lead="stays", outcome="F" if "unclear" in dropped else "U")
            yield "0: commits, and the answer is lost", unknown._replace(record="C")
            yield "0: its PUT is on its way for long", unknown._replace(flies=True)
    if s.lead in ("begin", "write", "collect"):
        record = s.record if "explained" in dropped else s.record or "A"
        yield "0: gives up", s._replace(lead="over", record=record, session="ended", outcome="F")
    elif s.lead == "end":
        yield "0: ends the session", s._replace(lead="over", session="ended")
    if s.flies:
        yield "the PUT lands", s._replace(flies=False, record=s.record or "C")


def rank_steps(s: State, number: int, dropped: Names) -> Iterator[Step]:
    """Another rank: hear of begin, write, report, and hear of the outcome or decide it by the record."""
    rank, name = s.ranks[number], RANKS[number]

    def to(**changes: str) -> State:
        return s._replace(ranks=(*s.ranks[:number], rank._replace(**changes), *s.ranks[number + 1 :]))

    if rank.at == "wait" and s.begun:
        yield f"{name}: hears of begin", to(at="write")
    elif rank.at == "write":
        if "durable before report" in dropped:
            yield f"{name}: reports too early", to(at="told")
        yield f"{name}: its pack is durable", to(at="written", pack="there")
    elif rank.at == "written":
        yield f"{name}: reports", to(at="told")
    elif rank.at == "told":
        if s.outcome in ("C", "F"):
            yield f"{name}: hears {s.outcome}", to(at="over", word=s.outcome)
        if s.record:
            yield f"{name}: reads the record", to(at="over", word="C" if s.record == "C" else "F")
        elif "the record decides" in dropped:
            yield f"{name}: hears nothing, says failed", to(at="over", word="F")
        else:
            yield f"{name}: creates the record as aborted", to(at="over", word="F")._replace(record="A")


def gc_steps(s: State, dropped: Names) -> Iterator[Step]:
    """A gc: list, mark, wait or fence, live again, delete; again and again."""
    gc = s.gc
    if gc.at == "idle":
        yield "gc: lists objects", s._replace(gc=Gc("listed", present(s)))
    elif gc.at == "listed":
        found = gc.candidates - live(s)
        yield "gc: lists records", s._replace(gc=Gc("chosen", found) if found else Gc())
    elif gc.at == "chosen":
        yield "gc: puts its mark", s._replace(marked=gc.candidates, gc=gc._replace(at="marked"))
    elif gc.at == "marked":
        yield "gc: lists sessions", s._replace(gc=gc._replace(at="waiting", waits=s.session == "there"))
    elif gc.at == "waiting" and (not gc.waits or s.session == "ended"):
        yield "gc: waits for nobody", s._replace(gc=gc._replace(at="sweep"))
    elif gc.at == "waiting":
        record = s.record if "gc fences" in dropped else s.record or "A"
        yield "gc: gives the session up", s._replace(record=record, gc=gc._replace(at="sweep"))
    elif gc.at == "sweep":
        doomed = gc.candidates - (NONE if "live again" in dropped else live(s))
        base = "S" if "base" in doomed and s.base == "F" else s.base
        yield "gc: computes the live set again", s._replace(base=base, gc=Gc("delete", frozenset(doomed)))
    elif gc.at == "delete":
        kept = tuple(
            rank._replace(pack="deleted") if name in gc.candidates else rank
            for name, rank in zip(RANKS, s.ranks, strict=True)
        )
        own = "deleted" if "0" in gc.candidates else s.own_pack
        there = s.base_pack and "base" not in gc.candidates
        yield "gc: deletes", s._replace(ranks=kept, own_pack=own, base_pack=there, marked=NONE, gc=Gc())


def steps(s: State, dropped: Names) -> Iterator[Step]:
    yield from lead_steps(s, dropped)
    for number in range(len(RANKS)):
        yield from rank_steps(s, number, dropped)
    if s.base in ("C", "F"):
        yield "user: forgets or brings back the base", s._replace(base="F" if s.base == "C" else "C")
    yield from gc_steps(s, dropped)


def holds(s: State) -> bool:
    """Return whether nothing is lost, no rank reports a wrong result, and everything is explained."""
    packs = [s.own_pack, *(rank.pack for rank in s.ranks)]
    if s.record == "C" and (packs != ["there"] * len(packs) or (s.uses and not s.base_pack)):
        return False
    if s.base == "C" and not s.base_pack:
        return False
    if any(rank.word and (rank.word == "C") != (s.record == "C") for rank in s.ranks):
        return False
    return bool(s.record) or s.session == "there" or "there" not in packs


def explore(dropped: Names = NONE) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""
    return exploring.explore(State(), lambda s: steps(s, dropped), holds)


if __name__ == "__main__":
    exploring.report(RULES, explore)
