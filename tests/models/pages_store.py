"""The store of the model of pages, and the truth that it holds: facts, pages, volumes, sessions, marks, packs.

A fact is one revision of a record. It is loose, an object of its own, or in a page, or both. The truth of a snapshot
is its highest revision, loose or in a page; of two facts of one revision the one in the page counts, and of two pages
the lower one. A page is never replaced. A store may damage one: it cannot be read, or it is gone. The facts of a
damaged page are still the truth here, since a model must know what was true; `shown` is what a process can see.

pages.py has the rules and the scenes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

Names = frozenset[str]
NONE: Names = frozenset()
FINAL = ("swept", "aborted")


class Fact(NamedTuple):
    """One revision of a record.

    Attributes:
        needs: the packs that it needs.
        tag: whether it has the tag.
        number: its sequence number; -1: lost.
        by: the write id, where a scene needs it.
    """

    name: str
    revision: int
    state: str  # committed, forgotten, swept, aborted
    needs: Names = NONE
    tag: bool = False
    number: int = 0
    by: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.revision

    def next(self, state: str = "", **changes: Any) -> Fact:
        return self._replace(revision=self.revision + 1, state=state or self.state, **changes)


Facts = frozenset[Fact]
NO_FACTS: Facts = frozenset()


class Page(NamedTuple):
    """A page. `damage`: "": none, "bad": its bytes cannot be read, "gone": there is no such object."""

    facts: Facts
    damage: str = ""
    mends: int = -1  # the number of a damaged page


Pages = tuple[Page, ...]


class Session(NamedTuple):
    """A session: its owner, and the key of the record that it announces."""

    who: str
    name: str
    revision: int


class State(NamedTuple):
    """Everything that is stored, and the step of every actor.

    Attributes:
        volumes: the numbers of the pages that a volume holds as well.
        vanished: a loose record that the store has lost, and that indexes still know.
        again: how many page numbers have been given a second time.
        late: a page or a record whose PUT has failed, and which may still be stored.
        has_tags: whether one of the snapshots must have the tag.
        lies: how many wrong answers the store still gives.
        wrong: what has gone wrong, if a step itself was wrong.
    """

    loose: Facts
    packs: Names
    actors: tuple[Any, ...]
    pages: Pages = ()
    volumes: frozenset[int] = frozenset()
    sessions: frozenset[Session] = frozenset()
    marks: frozenset[Names] = frozenset()
    late: tuple[int, Page] | Fact | None = None
    again: int = 0
    vanished: Fact | None = None
    lies: int = 1
    lied: bool = False
    has_tags: bool = False
    wrong: str = ""

    def to(self, place: int, lie: bool = False, **changes: Any) -> State:
        """Return the state after a step of the actor at this place."""
        actor = self.actors[place]._replace(**changes)
        actors = (*self.actors[:place], actor, *self.actors[place + 1 :])
        if lie:
            return self._replace(actors=actors, lies=self.lies - 1, lied=True)
        return self._replace(actors=actors)

    def put(self, fact: Fact | None) -> State:
        return self if fact is None else self._replace(loose=self.loose | {fact})

    def taken(self, name: str, revision: int) -> bool:
        """Return whether there is a loose record under this key."""
        return any(fact.key == (name, revision) for fact in self.loose)

    def truth(self, name: str, dropped: Names) -> Fact | None:
        loose = self.loose if self.vanished is None else self.loose | {self.vanished}
        return ruling(loose, self.pages, name, "page wins" in dropped)

    def ended(self, whose: str) -> State:
        return self._replace(sessions=frozenset(s for s in self.sessions if s.who != whose))


Step = tuple[str, State]


def best(facts: Facts, name: str) -> Fact | None:
    found = [fact for fact in facts if fact.name == name]
    return max(found, key=lambda fact: fact.revision) if found else None


@lru_cache(maxsize=400_000)
def ruling(loose: Facts, pages: Pages, name: str, loose_wins: bool = False) -> Fact | None:
    """Return the fact that rules: the highest revision; at equal revisions a page's, the lowest page's."""
    alone, joined = best(loose, name), None
    for page in pages:
        fact = best(page.facts, name)
        if fact is not None and (joined is None or fact.revision > joined.revision):
            joined = fact
    if alone is None or joined is None:
        return alone or joined
    return alone if alone.revision > joined.revision - loose_wins else joined


@lru_cache(maxsize=400_000)
def covered(pages: Pages, name: str, revision: int) -> bool:
    """Return whether a page has this revision, or a higher one."""
    return any(fact.name == name and fact.revision >= revision for page in pages for fact in page.facts)


def is_missing(state: State, listed: Facts, pages: Pages) -> bool:
    """Return whether an index knows a loose record that is neither listed nor in a page."""
    fact = state.vanished
    return fact is not None and fact not in listed and not covered(pages, *fact.key)


def in_page(fact: Fact, dropped: Names) -> Fact:
    """Return what a page keeps of a fact: of a final one only id, revision and state."""
    if fact.state not in FINAL or (fact.number > 0 and "announcements" not in dropped):
        return fact
    return fact._replace(needs=NONE, tag=False, number=-1, by="")


def is_own(pages: Pages, fact: Fact, dropped: Names) -> bool:
    kept = in_page(fact, dropped)
    if "own write" not in dropped:
        return any(kept in page.facts for page in pages)
    return any(kept == other._replace(by=kept.by) for page in pages for other in page.facts)


@lru_cache(maxsize=400_000)
def shown(pages: Pages, volumes: frozenset[int], dropped: Names = NONE) -> Pages | None:
    """Return the pages as a process reads them that has none in its cache; None: it cannot know what they say."""
    mended = {page.mends for page in pages}
    read: list[Page] = []
    for number, page in enumerate(pages):
        if page.damage and number not in mended:
            if page.damage == "gone" and (number not in volumes or "volumes prove" in dropped):
                return tuple(read) if number + 1 == len(pages) else None
            if "unreadable" not in dropped:
                return None
        read.append(Page(NO_FACTS) if page.damage else page)
    return tuple(read)


def late_steps(state: State) -> Iterator[Step]:
    """Yield the step in which an object of a failed PUT is stored after all, unless its key is taken by then."""
    late = state.late
    if isinstance(late, Fact):
        if not state.taken(*late.key):
            yield f"{late.name}.{late.revision} {late.state} is stored late", state.put(late)._replace(late=None)
    elif late is not None and late[0] == len(state.pages):
        yield f"page {late[0]} is stored late", state._replace(pages=(*state.pages, late[1]), late=None)
