"""Questions: rank 0 answers for all ranks, so that all of them use the same answer.

In: a question that every rank asks at the same place of the program, such as which snapshot is the newest. Out: rank
0's answer, or its error, on every rank.

Rank 0 does not wait for the others, so its program may ask alone (to log a step, for example), and another rank must
not take that answer for one of its own questions. So an answer repeats the question, and says how many saves rank 0 has
begun: after the next save no rank takes it any more. If the answer to the same question changes between two saves, rank
0 waits until all ranks have the new one, for MEET_S at most. See "Questions" in docs/design/ranks.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import InvalidInputError, RanksError
from ..text import log
from . import messages
from .base import LOOK_ENDED_S, WARN_S, Ranks, Watch, wait_for
from .messages import Answer, Failed, decode, encode

#: The longest time that rank 0 waits for ranks to ask again: they may be in a collective that waits for rank 0 [s].
MEET_S = 60.0
#: A rank tells rank 0 after so many answers that it has read them.
TOLD_EVERY = 64
V = TypeVar("V", bound=str | int | list[int] | None)
_ADVICE = (
    "call the methods of a SnapshotManager in the same order on all ranks, also restore, latest_step, has_step and the "
    "others that look at steps; a rank that looks or restores alone uses a snapstore.Repository"
)


class Questions:
    """The questions of one user of a channel.

    Args:
        prefix: of all its keys.
        saves: returns the number of saves that this rank has begun, as the lowest and the highest number that it may be
            on other ranks: it is not known whether they count a save that this rank gave up before it began.
        agree: called on other ranks than rank 0, with the highest number of rank 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        saves: Callable[[], tuple[int, int]] = lambda: (0, 0),
        agree: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._ranks, self._prefix, self._saves, self._agree = ranks, prefix, saves, agree
        self._number = 0
        self._forgotten = 0  # rank 0's answers below this number are removed
        self._told: tuple[int, dict[str, object]] = (0, {})  # rank 0's answers since a save, by question

    def _own_prefix(self) -> str:
        return f"{self._prefix}question/{self._number}/"

    def _key(self) -> str:
        return f"{self._prefix}answer/{self._number}"

    def ask(self, question: str, answer: Callable[[], V]) -> V:
        """Return rank 0's answer to a question; `answer` is called only on rank 0.

        Raises:
            SnapstoreError: the error that `answer` has raised on rank 0.
            InvalidInputError: rank 0 has asked another question here, or has begun another number of saves.
            RanksError: rank 0 does not answer, or does not ask; or another rank does not ask.
        """
        if self._ranks.rank == 0:
            return self._answer(question, answer)
        while (found := self._wait_for_answer(question)).saves[1] < self._saves()[0]:
            log.warning("rank 0 alone has asked for %s: %s", found.question, _ADVICE)
            self._number += 1
        prefix, mine = self._own_prefix(), self._saves()
        self._number += 1
        if self._number % TOLD_EVERY == 0:
            self._ranks.post(self._asked(self._number, self._ranks.rank), b"1")
        if found.question != question or found.saves[0] > mine[1]:
            raise self._unlike(question, found, mine, prefix)
        self._agree(found.saves[1])
        if found.meets:
            self._ranks.post(f"{prefix}heard/{self._ranks.rank}", b"1")
        if found.failed is not None:
            raise messages.raised(found.failed, self._ranks.rank)
        value: V = found.value
        return value

    def vote(self, question: str, own: bytes, decide: Callable[[Sequence[bytes]], V]) -> V:
        """Return what `decide` makes, on rank 0, of the votes of all ranks, by rank; all ranks call this.

        Unlike `ask`, rank 0 waits for the others, for `total_s` at most.

        Raises:
            SnapstoreError: as `ask`; or a rank does not vote.
        """
        number, ranks = self._number, self._ranks
        keys = [f"{self._prefix}vote/{number}/{rank}" for rank in range(ranks.count)]
        if ranks.rank > 0:
            ranks.post(keys[ranks.rank], own)
            return self.ask(question, lambda: decide([own]))

        def look_for_error() -> None:
            """Raise if a rank has asked for something else, here or in the question before."""
            for at in (number - 1, number):
                if (data := ranks.look(f"{self._prefix}question/{at}/unlike")) is not None:
                    raise messages.raised(decode(data, Failed), 0)

        def answer() -> V:
            others = keys[1:]

            def missing() -> list[int]:
                return [rank for rank, key in enumerate(others, 1) if ranks.look(key) is None]

            what = f"all ranks' votes ({question})"
            watch = Watch(ranks, what, missing, ranks.total_s, self._prefix, look_for_error, WARN_S)
            votes = wait_for(lambda: ranks.look_all(others), watch) if others else []
            ranks.remove(others)
            return decide([own, *votes])

        return self.ask(question, answer)

    def asked_unheard(self, data: bytes) -> str:
        """Return the question that rank 0 waits for this rank to ask, if it has not asked it; else "".

        Args:
            data: rank 0's note that it waits.
        """
        number, _, question = data.decode(errors="replace").partition(" ")
        return question if int(number) >= self._number else ""

    def asked(self) -> int:
        """Return the number of the next answer: this rank looks up none below it again."""
        return self._number

    def _wait_for_answer(self, question: str) -> Answer:
        key, save = self._key(), f"{self._prefix}{self._saves()[1]}/"
        next_look, has_begun = time.monotonic() + LOOK_ENDED_S, False

        def look_for_save() -> None:
            """Raise if rank 0 has begun the next save; not at the first look that sees it: it may have answered."""
            nonlocal next_look, has_begun
            if has_begun:
                raise RanksError(
                    f"rank {self._ranks.rank} calls {question}, but rank 0 is already in the next save: " + _ADVICE,
                    ranks=[0],
                )
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_ENDED_S
                has_begun = any(self._ranks.look(save + name) is not None for name in ("digest/0", "begin"))

        what = f"rank 0's answer ({question})"
        watch = Watch(self._ranks, what, lambda: [0], self._ranks.total_s, self._prefix, look_for_save)
        return decode(wait_for(lambda: self._ranks.look(key), watch), Answer)

    def _unlike(self, question: str, found: Answer, mine: tuple[int, int], prefix: str) -> InvalidInputError:
        """Return the error that rank 0 has asked for something else; tell it to rank 0, which may wait."""
        own, first = f"asks for {question}", f"has asked for {found.question}"
        if found.question == question:
            own, first = f"{own} after {mine[1]} saves", f"{first} after {found.saves[1]} saves"
        error = InvalidInputError(f"rank {self._ranks.rank} {own}, and rank 0 {first}: {_ADVICE}")
        failed = encode(Failed.of(error, self._ranks.rank))
        self._ranks.post(f"{prefix}unlike", failed)
        number = self._number
        while self._ranks.look(f"{self._prefix}answer/{number}") is not None:  # rank 0 has asked more questions
            self._ranks.post(f"{self._prefix}question/{number}/unlike", failed)
            number += 1
        return error

    def _asked(self, number: int, rank: int) -> str:
        return f"{self._prefix}asked/{number}/{rank}"

    # -- rank 0

    def _forget_read(self) -> None:
        """Remove old answers that all ranks have read, also in a job that never saves."""
        number = self._number - TOLD_EVERY
        keys = [self._asked(number, rank) for rank in range(1, self._ranks.count)]
        if number > 0 and self._number % TOLD_EVERY == 0 and self._ranks.look_all(keys) is not None:
            self.forget(number)
            self._ranks.remove(keys)

    def forget(self, number: int) -> None:
        """Remove the answers below a number: each other rank has `asked` as many. Two threads may call it at once."""
        self._ranks.remove([f"{self._prefix}answer/{old}" for old in range(self._forgotten, number)])
        self._forgotten = max(self._forgotten, number)

    def _answer(self, question: str, answer: Callable[[], V]) -> V:
        saves = self._saves()
        key, prefix = self._key(), self._own_prefix()
        self._number += 1
        found = Answer(question, failed=Failed("RanksError", f"rank 0 has ended ({question})", 0), saves=saves)
        try:
            value = answer()
            if self._told[0] != saves[1]:
                self._told = saves[1], {}
            meets = self._told[1].setdefault(question, value) != value
            found = Answer(question, value, saves=saves, meets=meets)
        except Exception as error:
            found = Answer(question, failed=Failed.of(error, 0), saves=saves)
            raise
        finally:
            try:
                if self._ranks.count > 1:
                    self._ranks.post(key, encode(found))
                    self._forget_read()
            except RanksError:
                if found.failed is None:
                    raise
        if found.meets:
            self._told[1][question] = value
            self._meet(question, prefix, f"{self._prefix}{saves[1]}/")
        return value

    def _meet(self, question: str, prefix: str, save: str) -> None:
        """Wait until all ranks have the answer: they may have taken an older answer to the same question.

        Raises:
            InvalidInputError, RanksError: a rank does not ask.
        """
        keys = {rank: f"{prefix}heard/{rank}" for rank in range(1, self._ranks.count)}
        self._ranks.post(f"{save}asks", f"{self._number - 1} {question}".encode())

        def look_for_error() -> None:
            for key in (f"{prefix}unlike", f"{save}failed"):
                if (data := self._ranks.look(key)) is not None:
                    raise messages.raised(decode(data, Failed), 0)

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if self._ranks.look(key) is None]

        what = f"all ranks to ask for {question}, whose answer has changed since rank 0 asked before"
        limit_s = min(self._ranks.total_s, MEET_S)
        watch = Watch(self._ranks, what, missing, limit_s, self._prefix, look_for_error, WARN_S)
        wait_for(lambda: self._ranks.look_all([*keys.values()]), watch)
        self._ranks.remove([*keys.values()])
