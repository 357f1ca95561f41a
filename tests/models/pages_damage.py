"""A damaged page and its repair, in the model of pages.

Loose records are deleted only once a volume holds them too, and the page has been read back after that. So either a
volume has all facts of a damaged page, or all of them are still loose. A repair lists loose records, then volumes. If
no volume holds the page by then, no loose record of it had been deleted. It puts a later page that mends the damaged
one. The order of the two listings does not matter: a joiner that puts the volume later finds the page damaged, and
deletes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pages_claims import views
from pages_store import NO_FACTS, Fact, Facts, Names, Page, State, Step, covered, in_page, ruling


class Damage(NamedTuple):
    """The store damages a page, once: its bytes, or the object is gone."""

    kinds: tuple[str, ...] = ("bad", "gone")
    left: int = 1

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        for kind in self.kinds if self.left else ():
            for number, page in enumerate(state.pages):
                pages = (*state.pages[:number], page._replace(damage=kind), *state.pages[number + 1 :])
                yield f"page {number} is {kind}", state._replace(pages=pages).to(place, left=0)


class Mend(NamedTuple):
    """A repair that mends a damaged page; it may stall anywhere.

    Attributes:
        number: of the damaged page.
        held: whether a volume holds it, as listed.
    """

    who: str = "repair"
    at: str = "see"
    number: int = -1
    listed: Facts = NO_FACTS
    held: bool = False
    target: int = 0

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "see":
            mended = {page.mends for page in state.pages}
            for number in range(len(state.pages)) if state.lies else ():
                text = f"{self.who} reads page {number}: a lie, damaged"
                yield text, state.to(place, lie=True, at="loose", number=number, target=len(state.pages))
            for number, page in enumerate(state.pages):
                is_seen = page.damage == "bad" or (page.damage and is_noticed(state, number))
                if is_seen and number not in mended:
                    text = f"{self.who} finds page {number} damaged"
                    yield text, state.to(place, at="loose", number=number, target=len(state.pages))
        elif self.at == "loose":
            yield f"{self.who} lists loose records", state.to(place, at="volumes", listed=state.loose)
        elif self.at == "volumes":
            held = self.number in state.volumes
            yield f"{self.who} lists volumes: {held}", state.to(place, at="put", held=held)
        elif self.at == "put":
            fresh: dict[str, Any] = {"at": "see", "number": -1, "listed": NO_FACTS, "held": False, "target": 0}
            if len(state.pages) != self.target:
                yield f"{self.who} finds its number taken", state.to(place, **fresh)
                return
            facts = state.pages[self.number].facts if self.held else self._of_loose(state, dropped)
            after_put = state._replace(pages=(*state.pages, Page(facts, mends=self.number)))
            text = f"{self.who} mends page {self.number} from {'a volume' if self.held else 'loose records'}"
            yield text, after_put.to(place, **fresh)

    def _of_loose(self, state: State, dropped: Names) -> Facts:
        whole = tuple(page for n, page in enumerate(state.pages) if not page.damage and n != self.number)
        left = frozenset(fact for fact in self.listed if not covered(whole, *fact.key))
        busy = {session.name for session in state.sessions}
        names = {fact.name for fact in left} - busy
        return frozenset(in_page(fact, dropped) for name in names if (fact := ruling(left, (), name)))


def is_noticed(state: State, number: int) -> bool:
    """Return whether a volume, or a later page, shows that there was a page of this number."""
    return number in state.volumes or number + 1 < len(state.pages)


class Vanish(NamedTuple):
    """The store loses a loose record, which indexes still know."""

    fact: Fact
    left: int = 1

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.left and self.fact in state.loose and not covered(state.pages, *self.fact.key):
            lost = state._replace(loose=state.loose - {self.fact}, vanished=self.fact)
            yield f"{self.fact.name}.{self.fact.revision} vanishes", lost.to(place, left=0)


class PutBack(NamedTuple):
    """A repair that puts back a record which its index knows, and which is neither listed nor in a page."""

    fact: Fact
    who: str = "repair"
    at: str = "loose"

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        text = f"{self.fact.name}.{self.fact.revision}"
        if self.at == "loose" and self.fact not in state.loose:
            yield f"{self.who} does not list {text}", state.to(place, at="pages")
        elif self.at == "pages":
            for pages, lie in views(state, dropped):
                is_here = covered(pages, *self.fact.key)
                after = state.to(place, lie=lie, at="over" if is_here else "put")
                yield f"{self.who} {'finds' if is_here else 'does not find'} {text} in pages", after
        elif self.at == "put":
            after = state.to(place, at="over")
            if not state.taken(*self.fact.key):
                after = after.put(self.fact)._replace(vanished=None)
            yield f"{self.who} puts {text} back", after
