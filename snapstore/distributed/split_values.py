"""Split values: values of a TCPStore that are larger than its server accepts.

In: a value of any size. Out: one key, as for a small value, that all ranks read. torch's server drops the connection of
a client that sends it a string of more than 8 MiB (torch 2.13); then all ranks lose the channel. So a large value is
split into pieces under keys of their own, and its key holds only their names. Small values are stored as they are, in
one request.

Invariant: the key is set when all pieces are there, so a rank that finds the key finds the pieces, until they are
removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import RanksError
from ..format.records import new_id
from ..text import human_bytes
from ..threads import msgpack_decoder

#: A larger value is split [bytes].
PIECE_BYTES = 4 << 20
#: The host of rank 0 keeps all values in memory, so a larger value is refused [bytes].
MAX_BYTES = 1 << 30
#: The value of a key whose value is split begins with this; so does no other one.
MARK = b"snapstore: split into\0"


class SplitValues:
    """Sets, reads and removes values of any size.

    Args:
        client: returns the client of the store (`torch_ranks`). It may raise; no call of the client sends or receives
            more than a piece.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._posted: dict[str, list[str]] = {}  # the keys of the pieces of each split value from here
        self._lock = threading.Lock()

    def post(self, key: str, value: bytes) -> None:
        """Set a key, unless it is set.

        Raises:
            RanksError: the value is too large.
        """
        if len(value) <= PIECE_BYTES and not value.startswith(MARK):
            self._client().call(lambda store: store.compare_set(key, "", value))
            return
        if len(value) > MAX_BYTES:
            raise RanksError(
                f"the message {key!r} between the ranks: {human_bytes(len(value))}, expected at most "
                f"{human_bytes(MAX_BYTES)}; it lists the plain values and the names of a rank's state: keep large data "
                "in tensors or arrays, or give all ranks the same keys and values, which are then not sent"
            )
        prefix, pieces = f"{key}/{new_id()}", range(0, len(value), PIECE_BYTES)
        names = [f"{prefix}/{number}" for number in range(len(pieces))]
        for name, begin in zip(names, pieces, strict=True):
            self._client().set(name, value[begin : begin + PIECE_BYTES])
        head = MARK + msgspec.msgpack.encode(names)
        if self._client().call(lambda store: store.compare_set(key, "", head)) != head:
            self._client().call(lambda store: [store.delete_key(name) for name in names])  # the key had a value
            return
        with self._lock:
            self._posted[key] = names

    def whole(self, value: bytes | None) -> bytes | None:
        """Return a value from that of its key; None if the key was not set, or its pieces have been removed."""
        if value is None or not value.startswith(MARK):
            return value
        pieces = []
        for name in msgpack_decoder(list[str]).decode(value[len(MARK) :]):
            if (piece := self._client().look(name)) is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def all_keys(self, keys: Sequence[str]) -> list[str]:
        """Return keys that are to be removed, with those of the pieces of their values; these are then forgotten."""
        with self._lock:
            return [*keys, *(name for key in keys for name in self._posted.pop(key, ()))]
