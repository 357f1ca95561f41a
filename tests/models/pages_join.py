"""Joiners, in the model of pages.

A joiner lists loose records, leaves out those of sessions that exist, puts the next page, and reads it back. Where
pages may be damaged it puts a volume then, and reads the pages once more. It deletes the loose records that it has
read and put, and those that older pages cover, in any order. Reading the pages and the PUT of the next one are one
step here: the PUT is create-only, so it succeeds only if no page has been added in between, and then both show the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pages_store import FINAL, NO_FACTS, Fact, Facts, Names, Page, State, Step, covered, in_page, ruling, shown

Keys = frozenset[tuple[str, int]]
NO_KEYS: Keys = frozenset()


class Join(NamedTuple):
    """A joiner.

    Attributes:
        rounds: how many it may still begin.
        asks: whether it lists sessions; in scenes without sessions it need not.
        late: whether its PUT may fail and be stored later.
        volumes: whether it puts a volume as well.
        single: whether it may also take one snapshot alone.
        busy: ids that sessions announced.
        version: how many page numbers had been given twice when it put its page: none is given twice since.
    """

    who: str = "J1"
    rounds: int = 1
    asks: bool = False
    late: bool = False
    volumes: bool = False
    single: bool = True
    at: str = "idle"
    listed: Facts = NO_FACTS
    busy: Names = frozenset()
    page: Page = Page(NO_FACTS)
    number: int = 0
    version: int = 0
    keys: Keys = NO_KEYS

    def steps(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        if self.at == "idle" and self.rounds:
            yield from self._lists(state, place, dropped)
        elif self.at == "sessions":
            busy = frozenset(session.name for session in state.sessions)
            yield f"{self.who} lists sessions: {sorted(busy)}", state.to(place, at="put", busy=busy)
            if state.lies and busy:
                yield f"{self.who} lists sessions: a lie, none", state.to(place, lie=True, at="put")
        elif self.at == "put":
            yield from self._puts(state, place, dropped)
        elif self.at == "read":
            there = len(state.pages) > self.number and state.pages[self.number]
            if there and there.facts == self.page.facts and not there.damage:
                yield f"{self.who} reads page {self.number} back", state.to(place, at=self._after())
            else:
                yield f"{self.who} does not find its page", self._idle(state, place)
        elif self.at == "read again":
            read = shown(state.pages, state.volumes, dropped)
            if read is not None and len(read) > self.number and state.again == self.version:
                yield f"{self.who} reads the pages back once more", state.to(place, at="delete")
            else:
                yield f"{self.who} does not find its page", self._idle(state, place)
        elif self.at == "volume":
            held = state._replace(volumes=state.volumes | set(range(self.number + 1)))
            at = "read again" if "read back again" not in dropped else "delete"
            yield f"{self.who} puts a volume", _rest(held.to(place, at=at), place, self.keys)
            final = {fact.name for fact in self.page.facts if fact.state in FINAL}
            early = frozenset(k for k in self.keys if k[0] in final) if "graves wait" in dropped else NO_KEYS
            yield from self._deletes(state, place, self.keys if "volume first" in dropped else early, dropped)
        elif self.at == "delete":
            yield from self._deletes(state, place, self.keys, dropped)
        if "pages stay" in dropped and self.at == "idle":
            yield from self._merges(state)

    def _deletes(self, state: State, place: int, keys: Keys, dropped: Names) -> Iterator[Step]:
        for key in sorted(keys):
            all_of = "keys" in dropped  # of the id, read or not
            gone = frozenset(fact for fact in state.loose if fact.key == key or (all_of and fact.name == key[0]))
            deleted = state._replace(loose=state.loose - gone)
            yield f"{self.who} deletes {key[0]}.{key[1]}", _rest(deleted, place, self.keys - {key})

    def _after(self) -> str:
        return "volume" if self.volumes else "delete"

    def _idle(self, state: State, place: int) -> State:
        return state.to(place, **_fresh(self))

    def _lists(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        rest = self._replace(rounds=self.rounds - 1)
        names = sorted({fact.name for fact in state.loose})
        at, busy = "sessions" if self.asks else "put", frozenset[str]()
        if "sessions" in dropped:
            at = "put"
        if "sessions last" in dropped and self.asks:
            if self.at == "idle" and not self.number:
                busy = frozenset(session.name for session in state.sessions)
                yield f"{self.who} lists sessions: {sorted(busy)}", state.to(place, number=1, busy=busy)
                return
            at, busy = "put", self.busy
        for chosen in [names, *([name] for name in names if self.single and len(names) > 1)]:
            if chosen:
                listed = frozenset(fact for fact in state.loose if fact.name in chosen)
                changes: dict[str, Any] = {"at": at, "rounds": rest.rounds, "listed": listed, "busy": busy}
                text = " ".join(f"{fact.name}.{fact.revision}" for fact in sorted(listed))
                yield f"{self.who} lists {text}", state.to(place, **changes, number=len(state.pages))

    def _puts(self, state: State, place: int, dropped: Names) -> Iterator[Step]:
        read = shown(state.pages, state.volumes, dropped)
        if read is None:
            yield f"{self.who} cannot read a page, and leaves all", self._idle(state, place)
            return
        number = self.number if "create-only" in dropped else len(read)
        listed = frozenset(fact for fact in self.listed if fact.name not in self.busy)
        old = frozenset(fact for fact in listed if covered(read, *fact.key))
        fresh = listed if "knows all" in dropped else listed - old
        ids = {fact.name for fact in fresh}
        facts = frozenset(in_page(f, dropped) for name in ids if (f := ruling(fresh, (), name)))
        if "graves" in dropped:
            facts = frozenset(fact for fact in facts if fact.state not in FINAL)
        keys = frozenset(fact.key for fact in listed)
        page = Page(facts)
        kept: dict[str, Any] = {"listed": NO_FACTS, "busy": frozenset()}
        if not fresh:
            name = f"{self.who} finds nothing to join"
            yield (
                name,
                _rest(
                    state.to(place, at=self._after(), number=len(read) - 1, version=state.again, **kept), place, keys
                ),
            )
            return
        after = "read" if "read back" not in dropped else self._after()
        changes = {"at": after, "page": page, "number": number, "keys": keys, "version": state.again, **kept}
        text = f"{self.who} puts page {number}"
        if number == len(state.pages):
            yield text, state._replace(pages=(*state.pages, page)).to(place, **changes)
        elif "create-only" in dropped:
            pages = (*state.pages[:number], page, *state.pages[number + 1 :])
            yield f"{text} over another", state._replace(pages=pages).to(place, **changes)
        elif state.pages[number].damage == "gone":
            pages = (*state.pages[:number], state.pages[number]._replace(facts=facts, damage=""))
            yield (
                f"{text} in place of the one that is gone",
                state._replace(pages=pages, again=state.again + 1).to(place, **changes | {"version": state.again + 1}),
            )
        if state.lies:
            yield f"{text}: a lie, it is not stored", state.to(place, lie=True, **changes)
        if self.late and state.late is None:
            yield f"{text}: it fails, and may be stored later", self._idle(state._replace(late=(number, page)), place)

    def _merges(self, state: State) -> Iterator[Step]:
        if len([page for page in state.pages if page.facts]) and state.pages[-1].mends != -2:
            union: dict[str, Fact] = {}
            for page in state.pages:
                for fact in page.facts:
                    union.setdefault(fact.name, fact)
                    union[fact.name] = max(union[fact.name], fact, key=lambda f: f.revision)
            blank = (Page(NO_FACTS),) * len(state.pages)
            merged = state._replace(pages=(*blank, Page(frozenset(union.values()), mends=-2)))
            yield f"{self.who} joins all pages into one more and deletes them", merged


def _fresh(join: Join) -> dict[str, Any]:
    """Return the fields of a joiner that has ended its round."""
    first = Join()
    return {name: getattr(first, name) for name in ("at", "listed", "busy", "page", "number", "version", "keys")}


def _rest(state: State, place: int, keys: Keys) -> State:
    """Return the state with these keys still to be deleted; without any the round is over."""
    join: Join = state.actors[place]
    return state.to(place, keys=keys) if keys else state.to(place, **_fresh(join))
