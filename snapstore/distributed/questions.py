"""Questions: rank 0 answers for all ranks, so that all of them use the same answer.

In: a question that every rank asks at the same place of the program, such as which snapshot is the newest. Out: rank
0's answer, or its error, on every rank. The answer repeats the question, so a rank notices that it asks another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import InvalidInputError, RanksError
from . import messages
from .base import Ranks, Watch, wait_for
from .messages import Answer, Failed, Word, decode, encode

V = TypeVar("V", bound=str | int | None)


class Questions:
    """The questions of one user of a channel.

    Args:
        prefix: of all its keys.
    """

    def __init__(self, ranks: Ranks, prefix: str) -> None:
        self._ranks, self._prefix = ranks, prefix
        self._number = 0

    @property
    def prefix(self) -> str:
        """Return a prefix for keys that belong to the next question; it is the same on all ranks."""
        return f"{self._prefix}question/{self._number}/"

    def ask(self, question: str, answer: Callable[[], V]) -> V:
        """Return rank 0's answer to a question; `answer` is called only on rank 0.

        Raises:
            SnapstoreError: the error that `answer` has raised on rank 0.
            InvalidInputError: rank 0 has asked another question here.
            RanksError: rank 0 does not answer, or does not ask.
        """
        key, unlike = f"{self._prefix}answer/{self._number}", f"{self.prefix}unlike"
        self._number += 1
        if self._ranks.rank == 0:
            return self._answer(key, question, answer)
        watch = Watch(self._ranks, f"rank 0's answer ({question})", lambda: [0], self._ranks.total_s, self._prefix)
        found = decode(wait_for(lambda: self._ranks.look(key), watch), Answer)
        if found.question != question:
            error = InvalidInputError(
                f"rank {self._ranks.rank} asks for {question}, and rank 0 has asked for {found.question}: call the "
                "methods of a SnapshotManager in the same order on all ranks, also latest_step, best_step and restore"
            )
            self._ranks.post(unlike, encode(Word(failed=Failed.of(error, self._ranks.rank))))
            raise error
        if found.failed is not None:
            raise messages.raised(found.failed, self._ranks.rank)
        value: V = found.value
        return value

    def _answer(self, key: str, question: str, answer: Callable[[], V]) -> V:
        found = Answer(question, failed=Failed("RanksError", f"rank 0 has ended ({question})", 0))
        try:
            value = answer()
            found = Answer(question, value)
            return value
        except Exception as error:
            found = Answer(question, failed=Failed.of(error, 0))
            raise
        finally:
            try:
                self._ranks.post(key, encode(found))
            except RanksError:
                if found.failed is None:
                    raise
