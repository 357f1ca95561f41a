"""LocalRanks: ranks for tests, threads that share a dict; messages are late, lost or doubled by a seed.

In: a number of ranks. Out: one `Ranks` for each. Everything that may go wrong with messages goes wrong here.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from snapstore.distributed.base import ChannelError
from snapstore.errors import RanksError
from snapstore.format.records import new_id


@dataclass(slots=True)
class MessageFaults:
    """How often messages go wrong.

    Attributes:
        drop, delay, double: the share of messages that are lost, late, or posted again later, 0 to 1.
        delay_s: the longest that a message is late [s].
    """

    drop: float = 0.0
    delay: float = 0.0
    double: float = 0.0
    delay_s: float = 0.05
    seed: int = 0


class _Board:
    """The dict, which all ranks share. A value can be read once its time has come [s, time.monotonic]."""

    def __init__(self, faults: MessageFaults) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, tuple[float, bytes]] = {}
        self.beaten: dict[int, float] = {}
        self.faults, self.random = faults, random.Random(faults.seed)
        self.sent_bytes: dict[int, int] = {}
        self.all: list[LocalRank] = []
        self.tells_deaths = False


class LocalRank:
    """One of the ranks; see `Ranks`.

    Attributes:
        posted: the keys that it has posted.
        dead: its process is gone, so each of its calls raises an error.
        is_hosted: on rank 0: it hosts the messages, so when it is dead the calls of all ranks raise.
    """

    def __init__(self, board: _Board, rank: int, count: int, attempt: str, silent_s: float, total_s: float) -> None:
        self._board, self.rank, self.count, self.attempt = board, rank, count, attempt
        self.silent_s, self.total_s = silent_s, total_s
        self.is_hosted = False
        self.job_ranks: Sequence[int] | None = None
        self.posted: list[str] = []
        self.dead = False

    def post(self, key: str, value: bytes) -> None:
        """Set a key for all ranks, unless a fault keeps it from them."""
        self._require_life()
        board, faults = self._board, self._board.faults
        self.posted.append(key)
        with board.lock:
            board.sent_bytes[self.rank] = board.sent_bytes.get(self.rank, 0) + len(key) + len(value)
            dice = [board.random.random() for _ in range(4)]
            due = time.monotonic() + (faults.delay_s * dice[3] if dice[1] < faults.delay else 0.0)
            if dice[0] >= faults.drop:
                board.values.setdefault(key, (due, value))
            if dice[2] < faults.double:  # and once more, later: also if it was removed meanwhile
                timer = threading.Timer(faults.delay_s * dice[3], self._again, [key, value])
                timer.daemon = True
                timer.start()

    def _again(self, key: str, value: bytes) -> None:
        with self._board.lock:
            self._board.values.setdefault(key, (0.0, value))

    def look(self, key: str) -> bytes | None:
        """Return the value of a key that has arrived."""
        self._require_life()
        with self._board.lock:
            due, value = self._board.values.get(key, (0.0, None))
        return value if due <= time.monotonic() else None

    def look_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of keys that have all arrived."""
        found = [value for key in keys if (value := self.look(key)) is not None]
        return found if len(found) == len(keys) else None

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys."""
        self._require_life()
        with self._board.lock:
            for key in keys:
                self._board.values.pop(key, None)

    def beat(self) -> None:
        """Note that this rank lives."""
        self._require_life()
        with self._board.lock:
            self._board.beaten[self.rank] = time.monotonic()

    def silences(self, ranks: Collection[int]) -> list[float]:
        """Return how long each of some ranks has been silent [s]."""
        self._require_life()
        if self._board.tells_deaths:
            return [math.inf if self._board.all[rank].dead else 0.0 for rank in ranks]
        now = time.monotonic()
        with self._board.lock:
            return [now - self._board.beaten[rank] for rank in ranks]

    def close(self, limit_s: float = 0) -> None:
        """Do nothing: the dict is no thread and no socket."""

    def _require_life(self) -> None:
        if self.dead:
            raise RanksError(f"rank {self.rank}: its process is gone", ranks=[self.rank])
        if self._board.all[0].dead and self._board.all[0].is_hosted:
            raise ChannelError.of(f"rank 0 of {self.count}: its process is gone, and the messages with it")


class LocalRanks(list[LocalRank]):
    """The ranks of one attempt.

    Args:
        count: of ranks.
        faults: what goes wrong with their messages.
        tells_deaths: the silence of a dead rank is infinite, and that of others 0. So a busy machine does not change
            how a job ends.

    Attributes:
        sent_bytes: keys and values that each rank has posted [bytes].
        keys: the keys that are set now.
    """

    def __init__(
        self,
        count: int,
        *,
        silent_s: float = 600.0,
        total_s: float = 3600.0,
        faults: MessageFaults | None = None,
        tells_deaths: bool = False,
    ) -> None:
        self._board = _Board(faults or MessageFaults())
        attempt, now = new_id(), time.monotonic()
        super().__init__(LocalRank(self._board, rank, count, attempt, silent_s, total_s) for rank in range(count))
        self._board.beaten = dict.fromkeys(range(count), now)
        self._board.all, self._board.tells_deaths = list(self), tells_deaths

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank has posted, keys included."""
        return self._board.sent_bytes

    @property
    def keys(self) -> list[str]:
        """Return the keys that are set."""
        with self._board.lock:
            return sorted(self._board.values)
