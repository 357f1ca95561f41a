"""The rules of pages, into which records are joined, explored state by state.

A small explicit-state model of docs/design/history.md, after those of saves, gcs and rewrites. B is committed and
needs pack `b`; users forget it and bring it back. X is committed and needs `x`; nobody touches it. Joiners copy loose
records into the next page of the run, and then delete the loose ones. Beside them there are, by scene: a save S, which
builds on `b` and puts `s`; an un-forget that may stall between any two of its steps; a gc, or two of one mark; a
rewrite of B; copies of Z; two processes that move a tag; a policy; repairs. Any actor may stall anywhere, also
permanently, as if it had crashed. In most scenes the store answers wrongly once, to any actor at any time, or in one
way for a whole gc; in others it damages a page.

The invariants: what a committed record needs is there; no ruling record is lost or replaced; a process that was told
"committed", "un-forgotten" or the like was told the truth, and a save that was told "failed" has failed, unless the
store lied; the tag is on a committed snapshot; a reader's view has every record that ruled when it began; a copy keeps
its number; and, if the store has not lied, a record or a session explains each pack. With a rule dropped there must be
a counter-example, or the rule is not needed.

    python tests/models/pages.py [name of a scene, or of a rule]        all of them: some minutes

pages_store.py has what is stored, and what rules; pages_join.py joiners; pages_writers.py saves, users and readers;
pages_gc.py the gc; pages_claims.py rewrites, copies and tags; pages_damage.py damage and repairs.

The model was made smaller where that loses nothing. A step that only its own actor can notice is one with the step
before. Reading the pages and the PUT of the next one are one step (pages_join.py), and so are the deletions of a gc
(pages_gc.py). A joiner's listing never lies: without its highest revisions it looks as it did earlier, and without
others as after a deletion of them. Where X is left out, nobody would touch it: hiding it from a gc only stops the gc,
and that it is not lost, the other scenes show. Two reductions may lose schedules: a joiner takes all snapshots or one,
and in most scenes with damage all; and beside damage the store does not lie, but for reading a page as damaged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import exploring
from pages_claims import Claim, Tag
from pages_damage import Damage, Mend, PutBack, Vanish
from pages_gc import MADE_FOR, Gc
from pages_join import Join
from pages_store import NONE, Fact, Names, Page, State, Step, late_steps
from pages_writers import Read, Revise, Save, Users

#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "loose first": "who reads lists loose records before pages",
    "read back": "a joiner reads its page back before it relies on it",
    "page wins": "a page rules over a loose record of the same revision",
    "knows all": "a joiner leaves out loose records that a page covers",
    "keys": "a joiner deletes only the keys that it has read and put into its page",
    "create-only": "a page number is given once; the second joiner begins again",
    "pages stay": "a page is never deleted, only copied into volumes",
    "graves": "a page keeps the ids of swept and aborted snapshots",
    "announcements": "the record that announces a copy stays whole in a page",
    "sessions": "a joiner leaves alone the records that sessions announce",
    "sessions last": "a joiner lists sessions after the records, not before",
    "user looks again": "who puts a revision looks for pages after its PUT",
    "own write": "a fact in a page is one's own only by the write id of this very PUT",
    "looks before it takes": "who moves a tag looks for pages against the keeper before it revises the loser",
    "gc looks again": "a gc looks for pages after it has put `swept`, before it deletes",
    "two answers": "a gc asks for pages in two ways (GET of the next number, LIST), and so does who puts a revision",
    "save looks again": "a save looks for its session and for pages after it has put its record",
    "since its session": "a save looks for its id in pages put since its session began, not since it listed records",
    "failure looks again": "a save that fails looks for its record in pages, after it has put it as aborted",
    "explained": "a gc deletes nothing while a pack is unexplained",
    "fence copies what rules": "a fence copies the revision before as it rules: from a page before a loose record",
    "volume first": "loose records are deleted only when a volume holds them too",
    "graves wait": "so are those of swept and aborted snapshots",
    "read back again": "a joiner reads its page back once more, after it has put the volume",
    "unreadable": "while a page cannot be read, nobody joins, sweeps or revises",
    "volumes prove": "a page that a volume holds exists: if there is none, the pages are not whole",
    "same pages": "who looks for pages compares the listing with the pages that it has read",
}

B, X = Fact("B", 0, "committed", frozenset("b")), Fact("X", 0, "committed", frozenset("x"))
FORGOTTEN = B.next("forgotten")
SWEPT = FORGOTTEN.next("swept", needs=NONE, number=-1)


def _state(*actors: Any, loose: tuple[Fact, ...] = (B, X), **others: Any) -> State:
    packs = frozenset(pack for fact in loose for pack in fact.needs)
    return State(frozenset(loose), **({"packs": packs} | others), actors=actors)


def _forgotten(*actors: Any, **others: Any) -> State:
    """Return a first state in which B is forgotten, and its pack is still there."""
    return _state(*actors, loose=(B, FORGOTTEN, X), **others)


def _void(*actors: Any) -> State:
    """Return a first state in which an un-forget died after its PUT: a page says that B was swept."""
    pages = (Page(frozenset([SWEPT])),)
    return _state(*actors, loose=(X, FORGOTTEN.next("committed")), packs=frozenset("x"), pages=pages)


def _tags(*actors: Any) -> State:
    facts = (Fact("A", 0, "committed", tag=True), Fact("C", 0, "committed"))
    return _state(*actors, loose=facts, has_tags=True)


def _copy(number: int) -> Claim:
    return Claim(f"copy{number}", "Z", f"z{number}", made=1, is_copy=True)


#: For joiners beside sessions, and with volumes; a gc that no cache misleads all the time.
ASKS, HOLDS, GC = Join(asks=True), Join(volumes=True, single=False), Gc(may_be_blind=False)
FENCES = GC._replace(at="sessions", mark=frozenset("b"))
TWO_GCS = tuple(GC._replace(who=who, again=True, mark=frozenset("b")) for who in ("gc1", "gc2"))
MARKED = frozenset([frozenset("b")])
#: Scenes of at most a few seconds.
SHORT = {
    "user, gc, joiner": _state(Users(), Revise(), Gc(), Join()),
    "user, gc, joiner of two rounds, no lie": _state(Users(), Revise(), Gc(), Join(rounds=2), lies=0),
    "save, gc, joiner": _state(Save(), Gc(), ASKS),
    "save, gc that has marked, joiner": _state(
        Save(), FENCES, ASKS._replace(single=False), loose=(B, FORGOTTEN), marks=MARKED
    ),
    "save, gc, joiner of two rounds, no lie": _state(Save(), Gc(), ASKS._replace(rounds=2), lies=0),
    "rewrite, gc, joiner": _state(Claim(), Gc(), ASKS),
    "copy, gc, joiner": _state(_copy(1), Gc(), ASKS),
    "copy of a swept one, gc, joiner": _void(Claim("copy", "B", "r", 3, True), Gc(), ASKS),
    "two copies, joiner": _state(_copy(1), _copy(2), ASKS._replace(rounds=2)),
    "tag, policy, joiner": _tags(Tag(), Revise("policy", "C", "committed", "forgotten", True), Join(rounds=2)),
    "untag, taker of a tag, joiner": _tags(
        Revise("untag", "A", "committed", "committed", untags=True), Tag(), Join(rounds=2)
    )._replace(has_tags=False),
    "damage, two un-forgets, joiner": _forgotten(Damage(), Mend(), Revise(), Revise("V"), Join(volumes=True), lies=0),
    "no damage, repair, user, gc, joiner": _forgotten(Mend(), Revise(), GC, HOLDS),
}
#: Scenes of up to some minutes.
LONG = {
    "save, user, gc, joiner": _state(Users(), Save(), Gc(), ASKS),
    "save, user, gc, joiner of two rounds": _state(Users(), Save(), Gc(), ASKS._replace(rounds=2), loose=(B,)),
    "save with a late record, gc, joiner, no lie": _forgotten(Save(late=True), GC, ASKS, lies=0),
    "save, gc, joiner, base forgotten": _forgotten(Save(), GC, ASKS),
    "user, reader, two joiners": _state(Users(), Revise(), Read(), Join(), Join("J2")),
    "late page, user, gc, joiner": _forgotten(Users(), Revise(), GC, Join(rounds=2, late=True), lies=0),
    "rewrite, user, gc, joiner": _state(Users(), Claim(), GC, ASKS),
    "rewrite, gc, two joiners": _state(Claim(), GC, ASKS, ASKS._replace(who="J2"), lies=0),
    "two takers of a tag, joiner": _tags(Tag(), Tag("T2", "A", "C"), Join(rounds=2)),
    "repair puts back, un-forget, gc, joiner": _forgotten(Vanish(FORGOTTEN), PutBack(FORGOTTEN), Revise(), GC, Join()),
    "two gcs of one mark, un-forget, joiner": _forgotten(Revise(), *TWO_GCS, Join(), marks=MARKED),
    "two gcs of one mark, save, joiner, no lie": _state(
        Save(), *TWO_GCS, ASKS._replace(single=False), loose=(B, FORGOTTEN), marks=MARKED, lies=0
    ),
    "damage, un-forget, gc, joiner": _forgotten(Damage(), Mend(), Revise(), Join(volumes=True), GC, lies=0),
    "damage, save, gc, joiner": _state(
        Damage(("bad",)), Mend(), Save(), GC, HOLDS._replace(asks=True), loose=(B, FORGOTTEN), lies=0
    ),
    "page gone, un-forget, sweep, two joiners": _forgotten(
        Damage(("gone",)), Revise(), Users(sweeps=True), Join(volumes=True), Join("J2", volumes=True), lies=0
    ),
    "damage, un-forget, sweep, two joiners": _forgotten(
        Damage(), Mend(), Revise(), Users(sweeps=True), HOLDS, HOLDS._replace(who="J2"), lies=0
    ),
}
SCENES = SHORT | LONG
#: rule -> the scene that needs it.
NEEDED_IN = {
    "loose first": "user, reader, two joiners",
    "read back": "user, gc, joiner",
    "page wins": "user, gc, joiner",
    "knows all": "user, gc, joiner of two rounds, no lie",
    "keys": "user, reader, two joiners",
    "create-only": "user, reader, two joiners",
    "pages stay": "user, reader, two joiners",
    "graves": "user, gc, joiner",
    "announcements": "two copies, joiner",
    "sessions": "save, gc, joiner",
    "sessions last": "save, gc, joiner",
    "user looks again": "tag, policy, joiner",
    "own write": "two takers of a tag, joiner",
    "looks before it takes": "tag, policy, joiner",
    "gc looks again": "user, gc, joiner",
    "two answers": "user, gc, joiner",
    "save looks again": "save, gc, joiner",
    "since its session": "save, gc that has marked, joiner",
    "failure looks again": "save, gc, joiner",
    "explained": "user, gc, joiner",
    "fence copies what rules": "copy of a swept one, gc, joiner",
    "volume first": "damage, un-forget, gc, joiner",
    "graves wait": "damage, un-forget, gc, joiner",
    "read back again": "page gone, un-forget, sweep, two joiners",
    "unreadable": "damage, un-forget, gc, joiner",
    "volumes prove": "page gone, un-forget, sweep, two joiners",
    "same pages": "page gone, un-forget, sweep, two joiners",
}


def steps(state: State, dropped: Names) -> Iterator[Step]:
    """Yield all steps that may come next."""
    for place, actor in enumerate(state.actors):
        for name, after in actor.steps(state, place, dropped):
            yield name, checked(state, alike(after), dropped)
    for name, after in late_steps(state):
        yield name, checked(state, after, dropped)


def alike(state: State) -> State:
    """Return the state with its two joiners in one order: they differ by their names alone.

    So a schedule may exchange the two names from one step to the next.
    """
    last = state.actors[-2:]
    if len(last) < 2 or type(last[0]) is not Join or type(last[1]) is not Join:
        return state
    nameless = [hash(joiner._replace(who="")) for joiner in last]
    if nameless[0] <= nameless[1]:
        return state
    swapped = (last[1]._replace(who=last[0].who), last[0]._replace(who=last[1].who))
    return state._replace(actors=(*state.actors[:-2], *swapped))


def checked(before: State, after: State, dropped: Names) -> State:
    """Return the state after a step; say so if the step has replaced what rules by something older, or other."""
    if after.loose is before.loose and after.pages is before.pages:
        return after
    for name in _names(before):
        was, now = before.truth(name, dropped), after.truth(name, dropped)
        if was is None or now == was or (now is not None and now.revision > was.revision):
            continue
        if now is None or _kept(now) != _kept(was):
            return after._replace(wrong=f"the ruling record of {name} is lost")
    return after


def _names(state: State) -> Names:
    return frozenset(fact.name for fact in state.loose) | {fact.name for page in state.pages for fact in page.facts}


def _kept(fact: Fact) -> Fact:
    """Return what is to be kept of a fact in any case: of a final one its state."""
    return Fact(*fact[:3]) if fact.state in ("swept", "aborted") else fact


def what_is_wrong(state: State, dropped: Names) -> str:
    """Return which invariant of the module does not hold; "": all do."""
    if state.wrong:
        return state.wrong
    truth = {name: fact for name in _names(state) if (fact := state.truth(name, dropped))}
    committed = [fact for fact in truth.values() if fact.state == "committed"]
    if gone := {pack for fact in committed for pack in fact.needs} - state.packs:
        return f"needed and gone: {sorted(gone)}"
    if any(fact.number < 0 for fact in committed):
        return "a copy has lost its number"
    if state.has_tags and not any(fact.tag for fact in committed):
        return "the tag is on no snapshot"
    return _falsely_told(state, truth) or ("" if state.lied else _unexplained(state, truth))


def _falsely_told(state: State, truth: dict[str, Fact]) -> str:
    for actor in state.actors:
        told = getattr(actor, "told", None)
        if told is not None:
            fact = truth.get(told.name)
            if fact is None or (_kept(fact) != _kept(told) and fact.revision <= told.revision):
                return f"{actor.who} was told that {told.name}.{told.revision} is {told.state}, and it is not"
        if getattr(actor, "failed", False) and not state.lied and "S" in truth and truth["S"].state == "committed":
            return "save was told that it has failed, and it is committed"
    return ""


def _unexplained(state: State, truth: dict[str, Fact]) -> str:
    announced = {(session.name, session.revision) for session in state.sessions}
    for pack in state.packs:
        name, revision = MADE_FOR[pack]
        if (name, revision) not in announced and not (name in truth and truth[name].revision >= revision):
            return f"nothing will ever explain pack {pack}"
    return ""


def explore(dropped: Names = NONE, scene: str = "", limit: int = 5_000_000) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks an invariant, or None; states seen), in a scene or in the one a rule is for."""
    first = SCENES[scene or NEEDED_IN[min(dropped)]]
    found: list[str] = []

    def holds(state: State) -> bool:
        if wrong := what_is_wrong(state, dropped):
            found.append(wrong)
        return not wrong

    broken, count = exploring.explore(first, lambda state: steps(state, dropped), holds, limit)
    return (None if broken is None else broken + found), count


def main(chosen: list[str]) -> None:
    """Print what the model finds in each scene with all rules, and without each rule in the scene that needs it."""
    for name in chosen or [*SCENES, *RULES]:
        began = time.process_time()
        rule = frozenset([name]) if name in RULES else NONE
        broken, count = explore(rule, NEEDED_IN.get(name, name))
        text = f"without: {RULES[name]} [{NEEDED_IN[name]}]" if rule else name
        print(f"{text}: {count} states, {time.process_time() - began:.0f} s")
        print(f"    {' | '.join(broken) if broken else 'the invariants hold'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
