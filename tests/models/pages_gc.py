"""A gc, in the model of pages: it marks, waits for sessions or fences them, and sweeps.

It lists loose records before it reads pages, of which it asks by a GET of the next number and by a LIST. After it has
put `swept` it looks for pages in both ways again. One wrong answer may last for the whole gc, as from a cache. Steps
that only the gc itself can notice are one with the step before. All packs of a sweep are deleted in one step: nobody
looks for two of them, and what harms at all harms most when all are gone.
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
    Page,
    Session,
    State,
    Step,
    covered,
    is_missing,
    is_own,
    ruling,
    shown,
)

#: For which revision of which snapshot each pack is put.
MADE_FOR = {"b": ("B", 0), "x": ("X", 0), "s": ("S", 0), "q": ("B", 1), "z1": ("Z", 1), "z2": ("Z", 1), "r": ("B", 3)}


class Gc(NamedTuple):
    """A collector.

    Attributes:
        looks: listings of records since the last beginning.
        known: how many pages it knows.
        blind: what a cache hides from it: X's loose record, or new pages from a GET or from a LIST.
        may_be_blind: whether this may happen.
        puts: the `swept` that it has put.
        todo: the snapshots for which it puts them.
    """

    who: str = "gc"
    may_be_blind: bool = True
    at: str = "packs"
    again: bool = False
    looks: int = 0
    present: Names = NONE
    listed: Facts = NO_FACTS
    known: int = 0
    version: int = 0
    blind: str = ""
    mark: Names = NONE
    doomed: Names = NONE
    waits: frozenset[Session] = frozenset()
    puts: Facts = NO_FACTS
    todo: tuple[Fact, ...] = ()

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "packs":
            first: dict[str, Any] = {"looks": 0, "present": state.packs, "listed": NO_FACTS, "known": 0}
            listed = state.to(place, at="records" if "loose first" not in dropped else "pages", **first)
            yield f"{self.who} lists packs {sorted(state.packs)}", listed
            if state.lies and not self.again and self.may_be_blind:
                for blind in ("X", "get", "list"):
                    hides = listed.to(place, lie=True, blind=blind)
                    yield f"{self.who} begins, and for all of it the store hides {blind}", hides
        elif self.at == "records":
            yield from self._lists(state, place, dropped)
        elif self.at == "pages":
            yield from self._reads(state, place, dropped)
        elif self.at == "mark":
            marks = state._replace(marks=state.marks | {self.mark})
            yield f"{self.who} marks {sorted(self.mark)}", marks.to(place, at="sessions")
        elif self.at == "sessions":
            waits = state.sessions
            after = {"at": "wait", "waits": waits} if waits else {"at": "packs", "again": True}
            yield f"{self.who} lists sessions {sorted(s.who for s in waits)}", state.to(place, **after)
        elif self.at in ("wait", "release"):
            yield from self._waits(state, place, dropped)
        elif self.at == "swept":
            yield from self._sweeps(state, place, dropped)
        elif self.at in ("get", "list"):
            yield from self._looks(state, place, dropped)
        elif self.at == "own":
            there = self.mark in state.marks
            yield f"{self.who} looks for its mark: {there}", state.to(place, at="delete" if there else "over")
        elif self.at == "delete":
            deleted = state._replace(packs=state.packs - self.doomed)
            yield f"{self.who} deletes {sorted(self.doomed)}", deleted.to(place, at="unmark", present=NONE)
        elif self.at == "unmark":
            yield f"{self.who} is done", state._replace(marks=state.marks - {self.mark}).to(place, **_over(self))

    def _lists(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        hidden = {fact for fact in state.loose if self.blind == fact.name}
        last = self.looks > 0 or not self.again or "gc twice" in dropped
        at = "pages" if last and "loose first" not in dropped else "records"
        for lie in (None, *(sorted(state.loose) if state.lies else ())):
            listed = self.listed | (state.loose - hidden - {lie})
            after = state.to(place, lie=lie is not None, at=at, looks=self.looks + 1, listed=listed)
            if last and "loose first" in dropped:
                after = self._decided(after, place, dropped, shown(state.pages[: self.known], state.volumes, dropped))
            text = f"{self.who} lists loose records"
            yield f"{text}: a lie, no {lie.name}.{lie.revision}" if lie is not None else text, after

    def _reads(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        pages = shown(state.pages, state.volumes, dropped)
        if pages is None or is_missing(state, self.listed, pages):
            yield f"{self.who} stops: a record or a page is not there", state.to(place, **_over(self))
            return
        count = len(pages)
        ways = [count if self.blind != way else min(count, self.known) for way in ("get", "list")]
        known = max(ways) if "two answers" not in dropped else ways[0]
        counts = [(known, False)]
        if state.lies and "two answers" in dropped and known > self.known:
            counts.append((known - 1, True))
        for known, lie in counts:
            after = state.to(place, lie=lie, known=known, version=state.again)
            if "loose first" in dropped:
                after = after.to(place, at="records")
            else:
                after = self._decided(after, place, dropped, pages[:known])
            yield f"{self.who} reads {known} pages{', a lie' if lie else ''}", after

    def _decided(self, state: State, place: int, dropped: Names, pages: tuple[Page, ...] | None) -> State:
        """Return the state after the gc has computed what lives."""
        gc: Gc = state.actors[place]
        loose_wins = "page wins" in dropped
        names = {fact.name for page in pages or () for fact in page.facts} | {fact.name for fact in gc.listed}
        seen = {name: fact for name in names if (fact := ruling(gc.listed, pages or (), name, loose_wins))}
        live = {pack for fact in seen.values() if fact.state == "committed" for pack in fact.needs}
        unneeded = gc.present - live
        if "explained" not in dropped and not all(_explained(state, seen, pack) for pack in unneeded):
            truth = {name: fact for name in "BSXZ" if (fact := state.truth(name, dropped))}
            is_new = all(_explained(state, truth, pack) for pack in unneeded)  # it looks once more before it stops
            return state.to(place, **_again(gc) if is_new and not gc.blind else _over(gc))
        if not gc.again:
            mark = {"at": "mark", "mark": unneeded, "present": NONE, "listed": NO_FACTS}
            return state.to(place, **mark if unneeded else _over(gc))
        doomed = gc.mark & unneeded
        todo = tuple(sorted(fact for fact in seen.values() if fact.state == "forgotten" and fact.needs & doomed))
        at = "swept" if todo else "own" if doomed else "unmark"
        return state.to(place, at=at, doomed=doomed, todo=todo, present=NONE, listed=NO_FACTS, puts=NO_FACTS)

    def _waits(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        waits = sorted(self.waits & state.sessions)
        if self.at == "release" and waits:
            rest = self.waits - {waits[0]}
            at = {"at": "wait", "waits": rest} if rest else {"at": "packs", "again": True, "waits": rest}
            yield (
                f"{self.who} releases {waits[0].who}",
                state._replace(sessions=state.sessions - {waits[0]}).to(place, **at),
            )
        elif not waits:
            yield f"{self.who} has waited", state.to(place, at="packs", again=True, waits=frozenset())
        else:
            fenced = (
                state if state.taken(waits[0].name, waits[0].revision) else state.put(fence(state, waits[0], dropped))
            )
            yield f"{self.who} fences {waits[0].who}", fenced.to(place, at="release")

    def _sweeps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        fact = self.todo[0].next("swept")
        if state.taken(*fact.key):
            yield f"{self.who} finds {fact.name} revised, looks again", state.to(place, **_again(self))
            return
        rest = self.todo[1:]
        at = "swept" if rest else "get" if "gc looks again" not in dropped else "own"
        after = state.put(fact).to(place, at=at, todo=rest, puts=self.puts | {fact})
        yield f"{self.who} puts {fact.name}.{fact.revision} swept", after

    def _looks(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        read = shown(state.pages, state.volumes, dropped)
        if read is None:
            yield f"{self.who} stops: a page cannot be read", state.to(place, **_over(self))
            return
        new = read[self.known :] if self.blind != self.at else ()
        is_against = any(covered(new, *fact.key) and not is_own(new, fact, dropped) for fact in self.puts)
        is_same = self.at == "get" or self.version == state.again or "same pages" in dropped
        is_against = is_against or not is_same
        after = {"at": "own" if self.at == "list" or "two answers" in dropped else "list"}
        text = f"{self.who} looks for pages against its `swept` ({self.at}): {is_against}"
        yield text, state.to(place, **_again(self) if is_against else after)
        if state.lies and is_against:
            yield f"{self.who} looks for pages ({self.at}): a lie, none", state.to(place, lie=True, **after)


def fence(state: State, session: Session, dropped: Names) -> Fact | None:
    """Return what a gc creates in place of a session: a copy of the revision before, or an aborted record."""
    if session.revision == 0:
        return Fact(session.name, 0, "aborted")
    before = session.revision - 1
    if "fence copies what rules" in dropped:
        for loose in state.loose:
            if loose.key == (session.name, before):
                return loose.next()
    fact = state.truth(session.name, dropped)
    return fact.next() if fact is not None and fact.revision == before else None


def _explained(state: State, seen: dict[str, Fact], pack: str) -> bool:
    """Return whether a record or a session explains a pack."""
    name, revision = MADE_FOR[pack]
    if any((session.name, session.revision) == (name, revision) for session in state.sessions):
        return True
    return name in seen and seen[name].revision >= revision


def _over(gc: Gc) -> dict[str, Any]:
    """Return the changes of a gc that has ended."""
    kept = {"who": gc.who, "may_be_blind": gc.may_be_blind, "at": "over"}
    return Gc(**kept)._asdict()  # type: ignore[arg-type]


def _again(gc: Gc) -> dict[str, Any]:
    """Return the changes of a gc that begins to look again."""
    return {"at": "packs", "puts": NO_FACTS, "todo": ()}
