"""The rules by which ranks learn who holds a plain tensor that not all of them hold, explored state by state.

A small explicit-state model of `save/ranks/holders.py`: three ranks save twice. Before the first save all know the
holders of one tensor. In each save other ranks may hold it, and another tensor, which only rank 1 has, may come or go.
Before a rank hears anything, it has copied only its old share if it has kept the tensor, or all of a tensor that is new
to it. Either save may fail at any point. The invariant: a committed save stores each sixth of the tensor exactly once,
or none if no rank holds it; and no save is given up only because more ranks hold the tensor. With a rule dropped there
must be a counter-example, or the rule is not needed.

    python tests/models/holders.py        every rule, kept and dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import exploring

Names = frozenset[str]
NONE: Names = frozenset()
#: rule -> what it says; `explore` takes the names of those to drop.
RULES = {
    "ask": "a rank that holds other tensors than in the last exchange asks before it stores",
    "rank 0 exchanges": "rank 0 lets all exchange if it holds other tensors than in the last exchange",
    "all have spoken": "rank 0 answers when every other rank has reported or asks as well",
    "kept by all": "rank 0 gives up if some have kept a tensor and others have dropped it",
    "kept shares": "if all have kept a tensor and others hold it as well, the shares stay in this save",
    "kept here": "a rank gives up if a tensor that it has kept is held by others than it knew",
    "after a failure": "all exchange in the save after one that has failed",
    "after kept shares": "all exchange in the save after one whose shares have stayed",
}
COUNT = 3
#: A tensor in parts that one, two or three ranks can share evenly, as bits.
PARTS = 6
#: The sets of ranks, as bits.
SETS = range(1 << COUNT)


class Rank(NamedTuple):
    """One rank: what it knows, and where it is in the save.

    Attributes:
        known: the holders of the tensor that it was told last.
        sure: whether no save has failed here since then.
        had: whether it held the tensor, and the other one, in the last exchange that it took part in.
        copied: "" nothing, "share": its share of old, "whole".
        stored: parts of the tensor.
    """

    known: int
    had: tuple[bool, bool]
    sure: bool = True
    at: str = "start"
    copied: str = ""
    stored: int = 0


class State(NamedTuple):
    """The two saves: `held` in each, `other` in each; and the messages of the one that runs."""

    held: tuple[int, ...]
    other: tuple[bool, ...]
    ranks: tuple[Rank, ...]
    save: int = 0
    exchange: bool = False
    begun: bool = False
    told: int = -1  # the ranks that store the tensor, as rank 0 tells them
    again: bool = False  # whether all exchange in the next save
    outcome: str = ""


Step = tuple[str, State]


def share_of(rank: int, holders: int) -> int:
    """Return the parts that a rank stores of a tensor with these holders."""
    if not holders >> rank & 1:
        return 0
    size = PARTS // holders.bit_count()
    first = (holders & ((1 << rank) - 1)).bit_count() * size
    return ((1 << size) - 1) << first


def own(s: State, rank: int) -> tuple[bool, bool]:
    """Return whether a rank holds the tensor, and the other one, in the save that runs."""
    return bool(s.held[s.save] >> rank & 1), rank == 1 and s.other[s.save]


def put(s: State, number: int, rank: Rank) -> State:
    return s._replace(ranks=(*s.ranks[:number], rank, *s.ranks[number + 1 :]))


def kept(known: int, held: int, dropped: Names) -> int:
    """Return who stores a tensor that these ranks hold now: the known holders, if all of them have kept it."""
    stays = known and known & held == known and "kept shares" not in dropped
    return known if stays else held


def learn(s: State, number: int, found: int, dropped: Names, *, asked: bool) -> State:
    """A rank learns the holders: it stores its share, or gives the save up."""
    rank = s.ranks[number]
    kept = rank.sure and rank.had[0] and own(s, number)[0]
    if asked and kept and found != rank.known and "kept here" not in dropped:
        return put(s, number, rank._replace(at="failed", sure=False))
    had = own(s, number) if asked else rank.had
    stored = share_of(number, rank.known if rank.copied == "share" else found) if rank.copied else 0
    return put(s, number, rank._replace(known=found, had=had, sure=True, at="write", stored=stored))


def copy(s: State, number: int) -> State:
    rank = s.ranks[number]
    holds = own(s, number)[0]
    copied = ("share" if rank.sure and rank.had[0] else "whole") if holds else ""
    return put(s, number, rank._replace(at="learn", copied=copied))


def lead_steps(s: State, dropped: Names) -> Iterator[Step]:
    """Rank 0: exchange if it wants to, begin, store, answer, collect, commit; or give up anywhere."""
    lead, others = s.ranks[0], s.ranks[1:]
    if s.outcome:
        return
    changed = own(s, 0) != lead.had
    if lead.at == "start":
        yield "0: copies", copy(s, 0)
    elif lead.at == "learn" and not s.exchange:
        unsure = not lead.sure and "after a failure" not in dropped
        if unsure or (changed and "rank 0 exchanges" not in dropped):
            yield "0: begins an exchange", s._replace(exchange=True)
        else:
            yield "0: begins", learn(s, 0, lead.known, dropped, asked=False)._replace(begun=True)
    elif lead.at == "learn" and all(rank.at == "told" for rank in others):
        held = s.held[s.save]
        found = kept(lead.known, held, dropped) if lead.sure else held
        yield (
            "0: tells who stores it",
            learn(s, 0, found, dropped, asked=True)._replace(told=found, again=found != held),
        )
    elif lead.at == "write":
        yield "0: stores", put(s, 0, lead._replace(at="reported"))._replace(begun=True)
    elif lead.at == "reported":
        asks = [number for number in range(1, COUNT) if s.ranks[number].at == "asks"]
        spoken = all(rank.at in ("asks", "reported") for rank in others) or "all have spoken" in dropped
        if asks and s.told < 0 and spoken:
            mask = sum(1 << number for number in asks)
            held = (lead.known & ~mask) | (s.held[s.save] & mask)
            found = kept(lead.known, held, dropped)
            if found & lead.known and found != lead.known and "kept by all" not in dropped:
                is_lost = lead.known & held != lead.known
                yield "0: gives up, a tensor was kept", s._replace(outcome="F" if is_lost else "in vain")
            else:
                after = put(s, 0, lead._replace(known=found))
                yield "0: answers", after._replace(told=found, again=found != held)
        if all(rank.at == "reported" for rank in others):
            yield "0: commits", s._replace(outcome="C")
    yield "0: gives up", s._replace(outcome="F")


def rank_steps(s: State, number: int, dropped: Names) -> Iterator[Step]:
    """Another rank: copy, hear whether there is an exchange, ask if its tensors are others, store, report."""
    rank = s.ranks[number]
    if rank.at == "start":
        yield f"{number}: copies", copy(s, number)
    elif rank.at == "learn" and s.exchange:
        yield f"{number}: tells its tensors", put(s, number, rank._replace(at="told"))
    elif rank.at == "learn" and s.begun:
        if own(s, number) != rank.had and "ask" not in dropped:
            yield f"{number}: asks", put(s, number, rank._replace(at="asks"))
        else:
            yield f"{number}: goes on", learn(s, number, rank.known, dropped, asked=False)
    elif rank.at in ("told", "asks") and s.told >= 0:
        yield f"{number}: hears the holders", learn(s, number, s.told, dropped, asked=True)
    elif rank.at == "write":
        yield f"{number}: reports", put(s, number, rank._replace(at="reported"))


def next_save(s: State, dropped: Names) -> Iterator[Step]:
    """The save has ended: all go on to the next one; after a failure, or if shares have stayed, they are unsure."""
    if not s.outcome or s.save == len(s.held) - 1:
        return
    for blind in range(-1, COUNT) if s.outcome == "C" else [-1]:  # a rank that cannot know that it is committed
        knows = s.outcome == "C" and (not s.again or "after kept shares" in dropped)
        ranks = tuple(
            rank._replace(at="start", copied="", stored=0, sure=rank.sure and knows and number != blind)
            for number, rank in enumerate(s.ranks)
        )
        yield "the next save", State(s.held, s.other, ranks, save=s.save + 1)


def first_steps() -> Iterator[State]:
    """Yield every choice of holders before and in the saves; ranks 1 and 2 differ by rank 1's other tensor."""
    for before in SETS:
        ranks = tuple(Rank(before, (bool(before >> rank & 1), False)) for rank in range(COUNT))
        for first in SETS:
            for second in {first, before, first & ~before}:
                for other in ((False, False), (True, True)):
                    yield State((first, second), other, ranks)


def steps(s: State | None, dropped: Names) -> Iterator[tuple[str, State | None]]:
    if s is None:
        yield from (("", first) for first in first_steps())
        return
    yield from lead_steps(s, dropped)
    if not s.outcome:
        for number in range(1, COUNT):
            yield from rank_steps(s, number, dropped)
    yield from next_save(s, dropped)


def holds(s: State | None) -> bool:
    """Return whether a committed save has stored each part once, and none was given up though no rank lacks a part."""
    if s is None or s.outcome != "C":
        return s is None or s.outcome != "in vain"
    stored = 0
    for rank in s.ranks:
        if stored & rank.stored:
            return False
        stored |= rank.stored
    return stored == ((1 << PARTS) - 1 if s.held[s.save] else 0)


def explore(dropped: Names = NONE) -> tuple[list[str] | None, int]:
    """Return (a schedule that breaks the invariant, or None; states seen)."""
    return exploring.explore(None, lambda s: steps(s, dropped), holds)


if __name__ == "__main__":
    exploring.report(RULES, explore)
