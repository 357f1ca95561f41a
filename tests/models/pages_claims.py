"""Rewrites, copies, taggers and policies, in the model of pages.

A rewrite and a copy claim the next revision of a record under a session that has an id of its own. The session names
the record, so a joiner leaves it alone, and a gc can fence them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pages_gc import fence
from pages_store import Fact, Names, Pages, Session, State, Step, ruling, shown
from pages_writers import look_steps


def views(state: State, dropped: Names) -> Iterator[tuple[Pages, bool]]:
    """Yield (the pages that a process reads, whether that is a lie): all, or all but the last."""
    pages = shown(state.pages, state.volumes, dropped)
    if pages is not None:
        yield pages, False
        if state.lies and pages:
            yield pages[:-1], True


class Claim(NamedTuple):
    """A rewrite or a copy of one snapshot.

    Attributes:
        pack: the pack that it puts.
        made: the only revision that it claims, as its pack is named for it; -1: any.
        is_copy: the snapshot may be unknown, aborted or swept; then revision 0 announces it.
    """

    who: str = "run"
    name: str = "B"
    pack: str = "q"
    made: int = 1
    is_copy: bool = False
    at: str = "begin"
    since: int = 0
    version: int = 0
    was: Fact | None = None
    told: Fact | None = None

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "begin":
            yield from self._begins(state, place, dropped)
        elif self.at == "announced":
            yield from self._announces(state, place)
        elif self.at == "records":
            yield from self._lists(state, place, dropped)
        elif self.at == "write":
            after = state._replace(packs=state.packs | {self.pack})
            yield f"{self.who} puts its pack", after.to(place, at="commit")
        elif self.at == "commit":
            yield from self._commits(state, place, dropped)
        elif self.at in ("get", "list"):
            yield from self._looks(state, place, dropped)
        elif self.at == "end":
            over = state.ended(self.who).to(place, at="over", since=0, was=None)
            yield f"{self.who} ends", over

    def _begins(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        for pages, lie in views(state, dropped):
            fact = ruling(state.loose, pages, self.name, "page wins" in dropped)
            text = f"{self.who} sees {_text(fact)}{', a lie' if lie else ''}"
            if self.is_copy and fact is None and not state.taken(self.name, 0):
                begun = Fact(self.name, 0, "aborted", number=7)
                yield f"{text}, announces it", state.put(begun).to(place, lie=lie, at="announced", was=begun)
            elif fact is not None and self._may(fact):
                yield text, state.to(place, lie=lie, at="announced", was=fact)

    def _may(self, fact: Fact) -> bool:
        states = ("aborted", "swept") if self.is_copy else ("committed",)
        return fact.state in states and self.made in (-1, fact.revision + 1)

    def _announces(self, state: State, place: int) -> Iterator[Step]:
        if self.was is not None:
            session = Session(self.who, self.name, self.was.revision + 1)
            begun = state._replace(sessions=state.sessions | {session})
            yield f"{self.who} puts its session", begun.to(place, at="records")

    def _lists(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        for pages, lie in views(state, dropped):
            fact = ruling(state.loose, pages, self.name, "page wins" in dropped)
            is_same = fact is not None and self.was is not None and fact[:3] == self.was[:3]
            after = (
                {"at": "write", "since": len(pages), "version": state.again, "was": fact} if is_same else {"at": "end"}
            )
            yield f"{self.who} lists records{', a lie' if lie else ''}", state.to(place, lie=lie, **after)

    def _fact(self) -> Fact:
        was = self.was or Fact(self.name, 0, "aborted")
        number = 7 if was.state == "swept" else was.number  # of a swept one it is chosen again
        return was.next("committed", needs=frozenset([self.pack]), number=number)

    def _commits(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        fact = self._fact()
        if state.taken(*fact.key):
            yield f"{self.who} finds its key taken", state.to(place, at="end")
            return
        is_told = "user looks again" in dropped
        after = {"at": "end", "told": fact} if is_told else {"at": "get"}
        yield f"{self.who} puts {fact.name}.{fact.revision}", state.put(fact).to(place, **after)
        copy = fence(state, Session(self.who, *fact.key), dropped)
        yield f"{self.who} fails, puts a copy", state.put(copy).to(place, at="end")

    def _looks(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        for text, lie, is_against in look_steps(state, place, self.at, self._fact(), dropped):
            if is_against:
                after: dict[str, Any] = {"at": "end"}
            elif self.at == "get" and "two answers" not in dropped:
                after = {"at": "list"}
            else:
                after = {"at": "end", "told": self._fact()}
            yield text, state.to(place, lie=lie, **after)


class Tag(NamedTuple):
    """A process that takes the tag for one snapshot from another: list, revise the keeper, revise the loser.

    Attributes:
        left: how many more times it begins again.
        had: the loser as listed.
    """

    who: str = "T1"
    taker: str = "C"
    loser: str = "A"
    left: int = 2
    at: str = "list"
    since: int = 0
    version: int = 0
    fact: Fact | None = None
    had: Fact | None = None

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "list" and self.left:
            yield from self._lists(state, place, dropped)
        elif self.at == "put" and self.fact is not None:
            if state.taken(*self.fact.key):
                yield f"{self.who} finds the keeper revised", self._begun_again(state, place)
            else:
                at = "get" if "user looks again" not in dropped else "take"
                at = "take" if "looks before it takes" in dropped else at
                after = state.put(self.fact).to(place, at=at)
                yield f"{self.who} puts {self.fact.name}.{self.fact.revision}, tagged", after
        elif self.at in ("get", "list looks") and self.fact is not None:
            for text, lie, is_against in look_steps(state, place, self.at[:4].strip(), self.fact, dropped):
                more = "list looks" if self.at == "get" and "two answers" not in dropped else "take"
                after = self._begun_again(state, place) if is_against else state.to(place, lie=lie, at=more)
                yield text, after
        elif self.at == "take" and self.had is not None:
            less = self.had.next(tag=False, by=self.who)
            if state.taken(*less.key):
                yield f"{self.who} finds the loser revised", self._begun_again(state, place)
            else:
                over = state.put(less).to(place, at="over", left=0, since=0, fact=None, had=None)
                yield f"{self.who} puts {less.name}.{less.revision} without the tag", over

    def _begun_again(self, state: State, place: int) -> State:
        return state.to(place, at="list", left=self.left - 1, since=0, fact=None, had=None)

    def _lists(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        for pages, lie in views(state, dropped):
            keeper, loser = (
                ruling(state.loose, pages, name, "page wins" in dropped) for name in (self.taker, self.loser)
            )
            if keeper is None or loser is None or keeper.state != "committed" or not loser.tag:
                continue
            lie_text = ", a lie" if lie else ""
            after = {
                "at": "put",
                "since": len(pages),
                "version": state.again,
                "fact": keeper.next(tag=True, by=f"{self.who}.{self.left}"),
                "had": loser,
            }
            yield f"{self.who} sees {_text(keeper)} and {_text(loser)}{lie_text}", state.to(place, lie=lie, **after)


def _text(fact: Fact | None) -> str:
    return f"{fact.name}.{fact.revision} {fact.state}{' tagged' if fact.tag else ''}" if fact else "nothing"
