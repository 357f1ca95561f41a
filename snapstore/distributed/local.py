"""Local ranks: the ranks of one process, as threads that share one dict.

In: a number of ranks. Out: one `Ranks` for each. A job of one rank uses it (its tensors may be sharded on a mesh of one
rank), and so do tools that save as several ranks do. `tests/kit/local_ranks.py` has ranks whose messages are late or
lost.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..format.records import new_id


class LocalRank:
    """One of the ranks; see `Ranks`.

    Args:
        values: of all keys that are set; the ranks share it.
        beaten: the time of each rank's last heartbeat [s, time.monotonic]; the ranks share it.
    """

    is_hosted = False
    job_ranks: Sequence[int] | None = None
    silent_s, total_s = 600.0, 3600.0

    def __init__(self, values: dict[str, bytes], beaten: dict[int, float], rank: int, attempt: str) -> None:
        self._values, self._beaten = values, beaten
        self.rank, self.count, self.attempt = rank, len(beaten), attempt

    def post(self, key: str, value: bytes) -> None:
        """Set a key for all ranks."""
        self._values.setdefault(key, value)

    def look(self, key: str) -> bytes | None:
        """Return the value of a key."""
        return self._values.get(key)

    def look_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of keys that are all set."""
        found = [value for key in keys if (value := self.look(key)) is not None]
        return found if len(found) == len(keys) else None

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys."""
        for key in keys:
            self._values.pop(key, None)

    def beat(self) -> None:
        """Note that this rank is alive."""
        self._beaten[self.rank] = time.monotonic()

    def silences(self, ranks: Collection[int]) -> list[float]:
        """Return for each of some ranks the time since its last heartbeat [s]."""
        now = time.monotonic()
        return [now - self._beaten[rank] for rank in ranks]

    def close(self, limit_s: float = 0) -> None:
        """Do nothing: a dict needs no closing."""


def local_ranks(count: int) -> list[LocalRank]:
    """Return all ranks of one attempt."""
    values, beaten, attempt = dict[str, bytes](), dict.fromkeys(range(count), time.monotonic()), new_id()
    return [LocalRank(values, beaten, rank, attempt) for rank in range(count)]
