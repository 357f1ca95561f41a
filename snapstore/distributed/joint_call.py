"""Joint call: one call that all ranks make together, such as a restore in which they exchange chunks.

In: the ranks, and a prefix of keys that no other call has. Out: decisions that rank 0 makes from the values of all
ranks, and steps that the ranks of one node make together. A rank that fails tells the others, so its error is raised on
all of them, at this call. Every wait is limited, and an error names the rank.

Nothing here is a collective. Before a collective a rank calls `agree` or `step`: so it knows that the others come too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..errors import RanksError, SnapstoreError
from .base import Ranks, Watch, named, wait_for
from .messages import Failed, Word, decode, encode, raised

#: The longest pause between two looks of a rank that waits for the messages of others [s].
STEP_POLL_S = 0.01
#: Rank 0 names the ranks that are missing; the others wait so much longer for its message [s].
WORD_S = 15.0
#: After a collective that failed, a rank that posts nothing for so long counts as ended [s].
BLAME_S = 5.0


class JointCall:
    """One call of all ranks, as a context. All ranks enter and leave it in the same order of calls.

    Call sequence: enter; `agree` and `step` in the same order on all ranks (`step` on the ranks of one node); leave. An
    error inside is told to the other ranks. A rank that leaves without an error waits until all ranks have left, or
    raises their error.

    Args:
        prefix: of the keys of this call.
        what: the call, in errors.
        ends: the prefix under which ranks say that they have ended (`say_ended`).

    Attributes:
        has_begun: whether the ranks have agreed on a decision, so this rank cannot begin again by itself.
        heard: the error of another rank.
        posted: the keys that this rank has set.

    Raises:
        RanksError: a rank does not answer, has ended, or does not make this call.
        SnapstoreError: the error of another rank; it has the same class here, and names that rank.
    """

    def __init__(self, ranks: Ranks, prefix: str, what: str, ends: str) -> None:
        self._ranks, self._prefix, self._what, self._ends = ranks, prefix, what, ends
        self._steps = 0
        self.has_begun = False
        self.heard: Failed | None = None
        self.posted: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
            return
        try:
            self.agree("done", b"", lambda said: b"")
        except BaseException as failure:
            self.fail(failure)
            raise

    def agree(self, name: str, mine: bytes, settle: Callable[[list[bytes]], bytes]) -> bytes:
        """Return the decision that `settle` makes, on rank 0, from the values `mine` of all ranks."""
        ranks = self._ranks
        self._post(f"{name}/{ranks.rank}", Word(mine))
        if ranks.rank == 0:
            decision = settle(self._collect(name, range(ranks.count)))
            self._post(name, Word(decision))
        else:
            watch = Watch(ranks, f"rank 0's decision ({self._what})", lambda: [0], ranks.total_s + WORD_S, self._ends)
            decision = self._heard([wait_for(lambda: ranks.look(self._prefix + name), watch)])[0]
        self.has_begun = True
        return decision

    def step(self, peers: Sequence[int]) -> None:
        """Wait until all `peers`, this rank among them, have reached the same step."""
        name = f"step/{self._steps}"
        self._post(f"{name}/{self._ranks.rank}", Word())
        self._collect(name, peers)
        self._steps += 1

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error, at every place where they may wait for this one."""
        rank = self._ranks.rank
        word = Word(failed=self.heard or Failed.of(error, rank))
        names = [f"{name}/{rank}" for name in ("ready", f"step/{self._steps}", f"step/{self._steps + 1}", "done")]
        with suppress(SnapstoreError):
            for name in [*names, *(("ready", "done") if rank == 0 else ())]:
                self._post(name, word)  # only the first value of a key counts

    def blame(self, error: RanksError, peers: Sequence[int]) -> RanksError:
        """Tell the other ranks that a collective of `peers` has failed; return the error.

        It waits up to BLAME_S for the peers to tell of it too, and names those of them that do not.
        """
        self.fail(error)
        limit_s, began, quiet = min(BLAME_S, self._ranks.silent_s), time.monotonic(), list(peers)
        while quiet and time.monotonic() - began < limit_s:
            time.sleep(STEP_POLL_S)
            quiet = [rank for rank in quiet if self._ranks.look(f"{self._prefix}done/{rank}") is None]
        if not quiet:
            return error
        return RanksError(f"{named(quiet)} of {self._ranks.count}: has ended or stopped, and {error}", ranks=quiet)

    def _collect(self, name: str, who: Sequence[int]) -> list[bytes]:
        """Return the values that some ranks have posted, once all have."""
        keys = {rank: f"{self._prefix}{name}/{rank}" for rank in who}

        def look() -> list[bytes] | None:
            unlike = None if self.has_begun else self._ranks.look(f"{self._prefix}unlike")
            return [unlike] if unlike is not None else self._ranks.look_all([*keys.values()])

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if self._ranks.look(key) is None]

        watch = Watch(self._ranks, self._what, missing, self._ranks.total_s, self._ends)
        return self._heard(wait_for(look, watch, poll_max_s=STEP_POLL_S))

    def _heard(self, words: Sequence[bytes]) -> list[bytes]:
        """Return the values of messages; raise the first error among them."""
        said = [decode(word, Word) for word in words]
        self.heard = next((word.failed for word in said if word.failed is not None), None)
        if self.heard is not None:
            raise raised(self.heard, self._ranks.rank)
        return [word.value for word in said]

    def _post(self, name: str, word: Word) -> None:
        self.posted.append(self._prefix + name)
        self._ranks.post(self._prefix + name, encode(word))
