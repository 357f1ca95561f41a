"""Count what a block costs: requests, calls of the operating system, writes and digested bytes of the index.

A time limit judges no speed on a busy machine; these numbers are the same on every one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kit.faults import FaultStore
from snapstore.catalog.lmdb_file import Environment
from snapstore.storage.base import ObjectInfo

#: S3 gives so many names at once.
PAGE = 1000


@dataclass
class Costs:
    """The costs of a block.

    Attributes:
        requests: to the store, as S3 counts them.
        os_calls: of Python code and its threads: each function of `os` that enters the kernel, and each open.
        index_writes: transactions that write into an index.
        digested_bytes: of index files, for their seals.
    """

    requests: int = 0
    os_calls: int = 0
    index_writes: int = 0
    digested_bytes: int = 0


class CountedStore(FaultStore):
    """A store whose log has one entry for each request."""

    def list(self, prefix: str, key_only: Any = None) -> Iterator[ObjectInfo]:
        found = list(super().list(prefix, key_only))
        self.log += [("list", prefix)] * ((len(found) - 1) // PAGE)
        return iter(found)


@contextmanager
def counted(*stores: CountedStore) -> Iterator[Costs]:
    """Count what the block costs, also in threads that it starts."""
    costs, before = Costs(), sum(len(store.log) for store in stores)
    put, digest = Environment.put, Environment._digest

    def look(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and (
            getattr(called, "__module__", None) in ("posix", "_io") or called.__qualname__.startswith("DirEntry.")
        ):
            costs.os_calls += 1

    def counted_put(self: Environment, items: Any) -> None:
        costs.index_writes += 1
        put(self, items)

    def counted_digest(self: Environment, used_bytes: int) -> str:
        costs.digested_bytes += used_bytes
        return digest(self, used_bytes)

    Environment.put, Environment._digest = counted_put, counted_digest  # type: ignore[method-assign]
    threading.setprofile(look)  # type: ignore[arg-type]
    sys.setprofile(look)
    try:
        yield costs
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        Environment.put, Environment._digest = put, digest  # type: ignore[method-assign]
        costs.requests = sum(len(store.log) for store in stores) - before
