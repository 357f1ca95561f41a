"""Ranks: how the ranks of one job exchange small messages, and notice that one of them is dead.

In: values under keys, each set by one rank. Out: the same values, on every rank. No call is a collective, blocks for
long, or needs the ranks to call in the same order; so a thread in the background may use it at any time.

Invariant: every message belongs to one attempt of the job: a restarted job has another channel, and reads none of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

from ..errors import InvalidInputError, RanksError, SnapstoreError
from ..text import log
from ..threads import no_threads

T = TypeVar("T")
K = TypeVar("K")
#: The shortest and the longest pause between two looks for a message [s].
POLL_S, POLL_MAX_S = 0.002, 0.05
#: Between these, a pause is this share of the time that the wait has taken so far: so long a message may lie unread.
POLL_SHARE = 0.25
#: A rank sends a heartbeat this many times in `silent_s`.
BEATS = 4
#: The longest period of heartbeats, and the period of the functions that were added to the Heart [s].
BEAT_S, CALL_S = 30.0, 1.0
#: The period at which a waiting rank looks whether another rank has ended [s].
LOOK_ENDED_S = 0.5
#: After an error, a closing rank waits so long for the others to read its last messages [s].
LINGER_S = 5.0
#: After a normal end, a closing rank waits at most so long for ranks that are alive and have not closed [s].
CLOSE_S = 60.0
#: After this time, a rank that waits for the others to call `save` warns once [s].
WARN_S = 30.0
#: The text of why a rank has ended is cut to this many characters.
MAX_TEXT = 400
#: The key under which rank 0 may tell the numbers of ranks whose process has ended, such as "1 5".
ENDED_PROCESSES = "ended processes"
RESTART = "start the job again: it resumes from the newest committed snapshot"


class ChannelError(RanksError):
    """The messages of the ranks cannot be reached any more: rank 0, which keeps them, has ended or is stopped."""

    @classmethod
    def of(cls, why: str, ranks: Sequence[int] = (0,)) -> ChannelError:
        """Return the error that says `why`, and what to do."""
        return cls(f"{why}; {RESTART}", ranks=ranks)

    @property
    def why(self) -> str:
        """Return the message without the advice."""
        return str(self).removesuffix(f"; {RESTART}")


class ClosedError(RanksError, InvalidInputError):
    """This rank has closed its channel, and still uses it: by mistake, or in a save that `close` did not wait for."""


@runtime_checkable
class Ranks(Protocol):
    """The ranks of one job, as one of them sees them.

    Call sequence: any method, from any thread, until `close`. All ranks make their channels in the same order. Every
    method but `close` raises ChannelError if the channel is broken or does not answer, and ClosedError after `close`.

    Attributes:
        rank: of this process, from 0.
        count: the number of ranks, at least 1.
        attempt: identifies this attempt of the job; 32 hex digits.
        silent_s: a rank without a heartbeat for so long counts as dead [s].
        total_s: the longest wait for messages of living ranks, such as their reports of a save [s].
        is_hosted: whether this process keeps the messages, so that they are lost when it ends.
        job_ranks: by rank, its number in torch.distributed's job, which meshes use; None: the same numbers.
    """

    rank: int
    count: int
    attempt: str
    silent_s: float
    total_s: float
    is_hosted: bool
    job_ranks: Sequence[int] | None

    def post(self, key: str, value: bytes) -> None:
        """Set a key for all ranks. Only the first value of a key counts; a second one is ignored."""
        ...

    def look(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is not set."""
        ...

    def look_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of many keys in few requests; None unless all are set."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys that no rank will look up again."""
        ...

    def beat(self) -> None:
        """Send a heartbeat: tell the other ranks that this one is alive."""
        ...

    def silences(self, ranks: Collection[int]) -> list[float]:
        """Return for each of some ranks the time since its last heartbeat, in few requests [s]."""
        ...

    def close(self, limit_s: float = LINGER_S) -> None:
        """End the channel; other ranks may still read what was posted for `limit_s`. It is idempotent."""
        ...


class Heart:
    """A thread that sends the heartbeats of a rank, if there are ranks, and calls added functions, until it is closed.

    It runs as long as the channel, and not only during a save: a rank that has not called `save` yet is late, not dead.

    Raises:
        CapabilityError: no thread can be started.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._calls: list[Callable[[], object]] = [] if ranks is None else [ranks.beat]
        self._period_s = CALL_S if ranks is None else period_s(ranks)
        self._soon, self._stopped = threading.Event(), False
        try:
            threading.Thread(target=self._run, name="snapstore-heart", daemon=True).start()
        except RuntimeError as error:
            raise no_threads() from error

    def add(self, call: Callable[[], object]) -> None:
        """Call a function every second from now on; it may raise SnapstoreError."""
        self._calls.append(call)
        self._period_s = min(self._period_s, CALL_S)
        self._soon.set()

    def _run(self) -> None:
        while not self._stopped:
            for call in tuple(self._calls):
                with suppress(SnapstoreError):  # a rank that waits for a message raises it
                    call()
            self._soon.wait(self._period_s)
            self._soon.clear()

    def close(self) -> None:
        """Stop; the thread ends by itself, since a call in it may never return."""
        self._stopped = True
        self._soon.set()


def wait_for(look: Callable[[], T | None], watch: Callable[[], object]) -> T:
    """Return the first result of `look` that is not None; between looks call `watch`, which raises to end the wait."""
    began = time.monotonic()
    while (found := look()) is None:
        watch()
        time.sleep(min(max(POLL_SHARE * (time.monotonic() - began), POLL_S), POLL_MAX_S))
    return found


class Watch:
    """Limits a wait: raises once a rank that is waited for is dead or has ended, or the time is over.

    Args:
        what: the thing that is waited for, in errors.
        who: returns the ranks that are waited for.
        limit_s: of the whole wait [s].
        ends: the prefix under which ranks say that they have ended (`say_ended`).
        also: called at every look; it may raise.
        warn_s: after this time, warn once that living ranks have not come; None: never.
    """

    def __init__(
        self,
        ranks: Ranks,
        what: str,
        who: Callable[[], Sequence[int]],
        limit_s: float,
        ends: str,
        also: Callable[[], object] = lambda: None,
        warn_s: float | None = None,
    ) -> None:
        self._also = also
        self._ranks, self._what, self._who = ranks, what, who
        self._limit_s, self._began, self._next = limit_s, time.monotonic(), 0.0
        self._ends, self._next_ends, self._has_ended = ends, self._began + LOOK_ENDED_S, False
        self._warn_at = math.inf if warn_s is None else self._began + warn_s

    def __call__(self) -> None:
        """Look whether all are alive, and twice a second whether one has ended.

        The first look comes at once, the next ones four times in the shorter of `silent_s` and the limit.

        Raises:
            RanksError: one is dead or has ended, or the time is over.
        """
        self._also()
        now = time.monotonic()
        if now >= self._next_ends:
            self._next_ends = now + LOOK_ENDED_S
            self._look_for_ends()
        if now >= self._warn_at and (late := self._who()):
            self._warn_at = math.inf
            log.warning(
                "rank %d has waited %.0f s for %s; still missing: %s; all ranks must make the same calls",
                self._ranks.rank,
                now - self._began,
                self._what,
                named(late),
            )
        if now < self._next and now - self._began <= self._limit_s:
            return
        self._next = now + min(self._ranks.silent_s, self._limit_s) / BEATS
        who = self._who()
        if not who:
            return  # all messages have come since the last look
        silences = self._ranks.silences(who)
        if silent := [rank for rank, silence in zip(who, silences, strict=True) if silence > self._ranks.silent_s]:
            raise RanksError(
                f"{named(silent)} of {self._ranks.count}: no heartbeat for {self._ranks.silent_s:.6g} s, while rank "
                f"{self._ranks.rank} waited for {self._what}",
                ranks=silent,
            )
        if now - self._began > self._limit_s:
            raise RanksError(
                f"{named(who)} of {self._ranks.count}: alive, but {self._what} has not come within "
                f"{self._limit_s:.6g} s; do all ranks call save, restore and close in the same order?",
                ranks=who,
            )

    def _look_for_ends(self) -> None:
        """Raise for a rank that has ended; not at the first look that sees an end: its messages are read before."""
        ended = ended_processes(self._ranks)
        if not self._has_ended:
            self._has_ended = bool(ended) or self._ranks.look(f"{self._ends}ended") is not None
            return
        who = self._who()
        if killed := sorted(ended & set(who)):
            raise ended_error(self._ranks, killed, self._what)
        for rank in who:
            if (why := self._ranks.look(f"{self._ends}ended/{rank}")) is not None:
                raise RanksError(
                    f"rank {rank} of {self._ranks.count} {why.decode(errors='replace')}, while rank "
                    f"{self._ranks.rank} waited for {self._what}",
                    ranks=[rank],
                )


def ended_processes(ranks: Ranks) -> set[int]:
    """Return the ranks whose process has ended without a word, as far as rank 0 has told."""
    return set(map(int, (ranks.look(ENDED_PROCESSES) or b"").split()))


def ended_error(ranks: Ranks, ended: Sequence[int], what: str) -> RanksError:
    """Return the error that the processes of some ranks have ended, while this rank waited for `what`."""
    return RanksError(
        f"{named(ended)} of {ranks.count}: its process has ended (killed, or failed) without closing its "
        f"SnapshotManager, while rank {ranks.rank} waited for {what}; start the job again",
        ranks=ended,
    )


def say_ended(ranks: Ranks, prefix: str, error: BaseException | None, limit_s: float | None = None) -> None:
    """Tell the other ranks that this one has ended; a rank that waits for it raises an error.

    Args:
        prefix: of its keys; the same on all ranks.
        error: why it has ended; None: it has closed.
        limit_s: the longest wait; then a thread goes on. The message may come behind a call of the save that still
            runs, which waits for `silent_s` if the channel does not answer. None: as long as the channel waits [s].
    """
    if limit_s is not None:
        with suppress(RuntimeError):  # no thread can be started: this one posts
            say = threading.Thread(target=say_ended, args=(ranks, prefix, error), name="snapstore-end", daemon=True)
            say.start()
            say.join(limit_s)
            return
    why = "has closed its SnapshotManager" if error is None else f"has ended: {type(error).__name__}: {error}"
    with suppress(SnapstoreError):
        ranks.post(f"{prefix}ended/{ranks.rank}", why[:MAX_TEXT].encode(errors="replace"))
        ranks.post(f"{prefix}ended", b"1")


def wait_for_ends(ranks: Ranks, prefix: str, limit_s: float) -> None:
    """Wait until all ranks have said that they have ended, or the others send no heartbeats, or the time is over."""
    patience_s, began, next_look = 2.5 * period_s(ranks), time.monotonic(), 0.0
    keys = {rank: f"{prefix}ended/{rank}" for rank in range(ranks.count)}
    has_warned, pause_s = False, POLL_S
    with suppress(SnapstoreError):
        while ranks.look_all([*keys.values()]) is None and (now := time.monotonic()) < began + limit_s:
            if now >= next_look:
                next_look = now + CALL_S
                ended = ended_processes(ranks)
                late = [rank for rank, key in keys.items() if rank not in ended and ranks.look(key) is None]
                if not late or min(ranks.silences(late)) > patience_s:
                    return
                if late and now > began + LINGER_S and not has_warned:
                    has_warned = True
                    log.warning("rank %d has closed, and waits until %s has", ranks.rank, named(late))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)


def period_s(ranks: Ranks) -> float:
    """Return the period of a rank's heartbeats [s]."""
    return min(ranks.silent_s / BEATS, BEAT_S)


def ranks_by(values: Iterable[tuple[int, K]]) -> dict[K, list[int]]:
    """Return the ranks that have each value, in the order of the pairs (rank, value)."""
    found: dict[K, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def named(ranks: Sequence[int], *, most: int = 8) -> str:
    """Return "rank 3", "ranks 1, 2" or, with `most` 4, "ranks 0, 1, 2, 3 and 60 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more}"
