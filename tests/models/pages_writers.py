"""Saves, users, un-forgets and readers, in the model of pages.

A process that puts a revision looks for pages afterwards, by a GET of the next number and by a LIST of the folder. A
save has its session in place of the second way: a joiner leaves alone what a session announces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pages_store import (
    NO_FACTS,
    NONE,
    Fact,
    Facts,
    Names,
    Pages,
    Session,
    State,
    Step,
    covered,
    is_missing,
    is_own,
    ruling,
    shown,
)


def against(pages: Pages | None, since: int, fact: Fact, dropped: Names) -> bool:
    """Return whether the pages since a number make void a revision that was put, or cannot be read."""
    if pages is None:
        return True
    new = pages[since:]
    return covered(new, *fact.key) and not is_own(new, fact, dropped)


def look_steps(state: State, place: int, way: str, fact: Fact, dropped: Names) -> Iterator[tuple[str, bool, bool]]:
    """Yield (the step, whether it is a lie, whether there is a page against the fact) for one look at pages."""
    actor = state.actors[place]
    who, since = actor.who, actor.since
    pages = shown(state.pages, state.volumes, dropped)
    is_against = against(pages, since, fact, dropped)
    if way == "list" and "same pages" not in dropped:
        is_against = is_against or actor.version != state.again
    yield (
        f"{who} finds {'a' if is_against else 'no'} page against {fact.name}.{fact.revision} ({way})",
        False,
        is_against,
    )
    if state.lies and is_against:
        yield f"{who} looks for pages ({way}): a lie, there is none", True, False


class Users(NamedTuple):
    """Users who forget a snapshot and bring it back, in one step each; they see what is true.

    Attributes:
        left: how often they do.
        sweeps: they put `swept` in place of an un-forget, as a gc does that has nothing to delete.
    """

    name: str = "B"
    left: int = 1
    sweeps: bool = False

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        fact = state.truth(self.name, dropped)
        if not self.left or fact is None or fact.state not in ("committed", "forgotten"):
            return
        pages = shown(state.pages, state.volumes, dropped)
        if pages is None or is_missing(state, state.loose, pages) or state.taken(self.name, fact.revision + 1):
            return
        back = "swept" if self.sweeps else "committed"
        after = fact.next("forgotten" if fact.state == "committed" else back)
        yield f"users make {self.name}.{after.revision} {after.state}", state.put(after).to(place, left=self.left - 1)


class Revise(NamedTuple):
    """One revision by a process that may stall anywhere: an un-forget, a forget, an untag.

    Attributes:
        untagged: it leaves a snapshot alone that has the tag, as a policy does.
        untags: it takes the tag off.
        since: how many pages it has read.
        told: what its user has been told, at the end.
    """

    who: str = "U"
    name: str = "B"
    was: str = "forgotten"
    becomes: str = "committed"
    untagged: bool = False
    untags: bool = False
    at: str = "see"
    since: int = 0
    version: int = 0
    fact: Fact | None = None
    told: Fact | None = None

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "see":
            yield from self._sees(state, place, dropped)
        elif self.at == "put" and self.fact is not None:
            if state.taken(*self.fact.key):
                yield f"{self.who} finds its key taken", state.to(place, at="over", fact=None)
            else:
                text = f"{self.who} puts {self.fact.name}.{self.fact.revision} {self.fact.state}"
                is_told = "user looks again" in dropped
                told: dict[str, Any] = {"at": "over", "told": self.fact, "fact": None} if is_told else {"at": "get"}
                yield text, state.put(self.fact).to(place, **told)
        elif self.at in ("get", "list") and self.fact is not None:
            for text, lie, is_against in look_steps(state, place, self.at, self.fact, dropped):
                after: dict[str, Any] = {"at": "over", "told": self.fact, "fact": None}
                if is_against:
                    after = {"at": "over", "fact": None}
                elif self.at == "get" and "two answers" not in dropped:
                    after = {"at": "list"}
                yield text, state.to(place, lie=lie, **after)

    def _sees(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        pages = shown(state.pages, state.volumes, dropped)
        if pages is None or is_missing(state, state.loose, pages):
            return
        fact = ruling(state.loose, pages, self.name, "page wins" in dropped)
        if fact is not None and fact.state == self.was and not (self.untagged and fact.tag):
            becomes = fact.next(self.becomes, tag=fact.tag and not self.untags)
            after: dict[str, Any] = {"at": "put", "fact": becomes, "since": len(pages), "version": state.again}
            yield f"{self.who} sees {self.name}.{fact.revision} {fact.state}", state.to(place, **after)


class Save(NamedTuple):
    """A save of S, which builds on B: session, marks, records, pack, session, record, and the looks behind it.

    Attributes:
        since: how many pages there were when its session began.
        uses: what it builds on.
        late: whether the PUT of its record may fail and be stored later.
    """

    who: str = "save"
    late: bool = False
    at: str = "begin"
    since: int = 0
    uses: Names = NONE
    marked: Names = NONE
    told: Fact | None = None
    failed: bool = False

    def fact(self, state: str = "committed") -> Fact:
        return Fact("S", 0, state, self.uses | {"s"} if state == "committed" else NONE)

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at in ("begin", "records", "present", "write"):
            yield from self._builds(state, place, dropped)
        elif self.at in ("session", "commit", "read", "again", "probe", "settle"):
            yield from self._commits(state, place, dropped)
        elif self.at == "fails":
            yield from self._fails(state, place, dropped)
        elif self.at == "end":
            yield "save ends", state.ended("save").to(place, at="over", marked=NONE, since=0)

    def _builds(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "begin":
            marked = frozenset(pack for mark in state.marks for pack in mark)
            begun = state._replace(sessions=state.sessions | {_session()})
            yield (
                "save puts its session, lists marks",
                begun.to(place, at="records", marked=marked, since=len(state.pages)),
            )
        elif self.at == "records":
            pages = shown(state.pages, state.volumes, dropped)
            fact = ruling(state.loose, pages, "B", "page wins" in dropped) if pages is not None else None
            since = len(state.pages) if "since its session" in dropped else self.since
            usable = fact.needs if fact is not None and fact.state == "committed" else NONE
            yield "save lists records", state.to(place, at="present", uses=usable - self.marked, since=since)
            if state.lies and fact is not None and fact.state != "committed":
                lied = state.to(place, lie=True, at="present", uses=frozenset("b") - self.marked)
                yield "save lists records: a lie, B committed", lied
        elif self.at == "present":
            yield "save looks for the packs of its base", state.to(place, at="write", uses=self.uses & state.packs)
        elif self.at == "write":
            yield "save puts its pack", state._replace(packs=state.packs | {"s"}).to(place, at="session")

    def _commits(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        own, there = self.fact(), _session() in state.sessions
        told: dict[str, Any] = {"at": "end", "told": own}
        if self.at == "session":
            yield f"save looks for its session: {there}", state.to(place, at="commit" if there else "fails")
            if there:
                yield "save fails", state.to(place, at="fails")
        elif self.at == "commit":
            if state.taken("S", 0):
                yield "save finds its key taken", state.to(place, at="again" if own in state.loose else "settle")
            else:
                after = state._replace(late=own).to(place, at="fails", late=False)
                yield "save puts its record", state.put(own).to(place, at="read")
                yield "save puts its record, gets no answer", state.put(own).to(place, at="fails")
                if self.late:
                    yield "save puts its record: it fails, and may be stored later", after
                if state.lies:
                    yield "save puts its record: a lie, it is not stored", state.to(place, lie=True, at="read")
        elif self.at == "read":
            if own in state.loose:
                is_told = "save looks again" in dropped
                yield "save reads its record back", state.to(place, **told if is_told else {"at": "again"})
            else:
                at = "settle" if state.taken("S", 0) else "commit"
                yield "save does not read its record back", state.to(place, at=at)
        elif self.at == "again":
            yield f"save looks for its session again: {there}", state.to(place, at="probe" if there else "settle")
            if state.lies and not there:
                yield "save looks for its session again: a lie, it is there", state.to(place, lie=True, at="probe")
        elif self.at == "probe":
            pages = shown(state.pages, state.volumes, dropped)
            is_covered = pages is not None and covered(pages[self.since :], "S", 0)
            yield "save looks for pages", state.to(place, **{"at": "settle"} if is_covered else told)
            if state.lies and is_covered:
                yield "save looks for pages: a lie, none", state.to(place, lie=True, **told)
        elif self.at == "settle":  # its session is gone, or a page has its id, or it has failed: what do the pages say?
            pages = shown(state.pages, state.volumes, dropped)
            fact = ruling(state.loose, pages, "S") if pages is not None else None
            if fact is not None and fact.state == "committed":
                yield "save finds that it is committed", state.to(place, **told)
            else:
                yield f"save finds {fact and fact.state}", state.to(place, at="end", failed=pages is not None)

    def _fails(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        """Create the record as aborted, so that no PUT can be stored late; whose is it then?"""
        if self.fact() in state.loose:
            yield "save finds its record", state.to(place, at="settle")
            return
        aborted = None if state.taken("S", 0) else self.fact("aborted")
        is_told = "failure looks again" in dropped
        after = {"at": "end", "failed": True} if is_told else {"at": "settle"}
        yield "save says aborted", state.put(aborted).to(place, **after)


def _session() -> Session:
    return Session("save", "S", 0)


class Read(NamedTuple):
    """A reader whose listing takes time: it surely gets only what is there from its begin to its end.

    Attributes:
        facts: what ruled when it began.
    """

    names: tuple[str, ...] = ("B", "X")
    at: str = "begin"
    facts: tuple[Fact | None, ...] = ()
    listed: Facts = NO_FACTS
    known: int = -1

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        order = ["listing", "listed", "pages"] if "loose first" not in dropped else ["pages", "listing", "listed"]
        after = dict(zip(["begin", *order], [*order, "view"], strict=True))
        if self.at == "begin":
            facts = tuple(state.truth(name, dropped) for name in self.names)
            yield "reader begins", state.to(place, at=after[self.at], facts=facts)
        elif self.at == "listing":
            yield "reader begins to list loose records", state.to(place, at=after[self.at], listed=state.loose)
        elif self.at == "listed":
            listed = self.listed & state.loose
            yield "reader has listed loose records", self._done(state, place, after[self.at], listed, self.known)
        elif self.at == "pages" and "pages stay" in dropped:
            yield "reader begins to list pages", state.to(place, at="more pages", known=len(state.pages))
        elif self.at in ("pages", "more pages"):
            count = len(state.pages) if self.at == "pages" else self.known
            at = "view" if self.at == "more pages" else after[self.at]
            yield f"reader reads {count} pages", self._done(state, place, at, self.listed, count)

    def _done(self, state: State, place: int, at: str, listed: Facts, count: int) -> State:
        if at != "view":
            return state.to(place, at=at, listed=listed, known=count)
        view = [ruling(listed, state.pages[:count], name) for name in self.names]
        missed = any(
            was and (now is None or now.revision < was.revision) for was, now in zip(self.facts, view, strict=True)
        )
        over = state.to(place, at="over", facts=(), listed=NO_FACTS, known=-1)
        return over._replace(wrong="the reader missed a record that ruled when it began" if missed else "")
