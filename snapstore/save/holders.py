"""Holders: which ranks hold the plain tensors that not all ranks hold, such as the layers of a pipeline's stages.

In: the trees of a rank's state. Out: the same on all ranks: for each such tensor its holders, of whom each stores a
share. The ranks exchange this in the first save, and in the one after a save that has failed on rank 0. A rank that
copied only its share of a tensor could not store the rest later: until it knows the holders, it copies plain tensors
whole, or, if they are too large for that, exchanges before it copies (staging.py). Equal trees are sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import xxhash

from ..distributed import messages
from ..distributed.base import Ranks, Watch, wait_for
from ..distributed.messages import Ask, Failed, Outcome, decode, encode
from ..errors import RanksError
from .merged_trees import holders_of
from .rank_state import PartTree, decode_trees, encode_trees
from .shares import Name

T = TypeVar("T")
Holders = Mapping[Name, tuple[int, ...]]


class Exchange:
    """The exchange of one save, on one rank.

    Args:
        key: returns the key of a message of that save.
        check: is called between looks, and raises to end a wait.
        prefix: of the keys of all saves.

    All methods raise:
        SnapstoreError: another rank cannot save its state; it is named.
        RanksError: a rank is silent, or does not call `save`.
    """

    def __init__(self, ranks: Ranks, key: Callable[[str], str], check: Callable[[], object], prefix: str) -> None:
        self._ranks, self._key, self._check, self._prefix = ranks, key, check, prefix

    def is_wanted(self, *, here: bool) -> bool:
        """Return whether the ranks exchange holders in this save: rank 0 decides, as it wants it `here`."""
        ranks = self._ranks
        if ranks.rank == 0:
            return here

        def said() -> bool | None:
            if ranks.look(self._key("digest/0")) is not None:
                return True
            return None if ranks.look(self._key("begin")) is None else False

        return self._wait("rank 0 to begin a save", said, [0])

    def holders(self, trees: Sequence[PartTree]) -> Holders:
        """Return the holders of the plain tensors that not all ranks hold."""
        ranks, key = self._ranks, self._key
        own = encode_trees(trees)
        ranks.post(key(f"digest/{ranks.rank}"), xxhash.xxh3_128_digest(own))
        if ranks.rank == 0:
            found = self._gather(own)
            by_holders: dict[tuple[int, ...], list[Name]] = {}
            for name, holders in found.items():
                by_holders.setdefault(holders, []).append(name)
            ranks.post(key("holders"), msgspec.msgpack.encode(list(by_holders.items())))
            return found
        asked = decode(self._wait("rank 0 to compare trees", lambda: ranks.look(key("ask-trees")), [0]), Ask)
        if ranks.rank in asked.ranks:
            ranks.post(key(f"trees/{ranks.rank}"), own)
        data = self._wait("rank 0 to tell who holds which tensors", lambda: ranks.look(key("holders")), [0])
        groups = msgspec.msgpack.decode(data, type=list[tuple[tuple[int, ...], list[Name]]])
        return {name: holders for holders, names in groups for name in names}

    def _gather(self, own: bytes) -> Holders:
        """Return the holders from the trees of all ranks, on rank 0."""
        ranks = self._ranks
        keys = [self._key(f"digest/{rank}") for rank in range(ranks.count)]

        def missing() -> list[int]:
            return [rank for rank, name in enumerate(keys) if ranks.look(name) is None]

        digests = self._wait("all ranks to call save", lambda: ranks.look_all(keys), missing)
        alike: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            alike.setdefault(digest, []).append(rank)
        others = [of[0] for of in alike.values()][1:]
        ranks.post(self._key("ask-trees"), encode(Ask(others)))
        names = [self._key(f"trees/{rank}") for rank in others]
        found = self._wait("trees", lambda: ranks.look_all(names), others)
        return holders_of([(of, decode_trees(data)) for of, data in zip(alike.values(), [own, *found], strict=True)])

    def _wait(self, what: str, look: Callable[[], T | None], who: Sequence[int] | Callable[[], Sequence[int]]) -> T:
        """Return what `look` returns, once it is not None."""
        ranks, key = self._ranks, self._key
        watch = Watch(ranks, what, who if callable(who) else lambda: who, ranks.total_s, self._prefix)

        def watch_all() -> None:
            self._check()
            if (data := ranks.look(key("failed"))) is not None:
                raise messages.raised(decode(data, Failed), ranks.rank)
            if (data := ranks.look(key("outcome"))) is not None:
                failed = decode(data, Outcome).failed
                raise messages.raised(failed, ranks.rank) if failed else RanksError("rank 0 has ended this save")
            watch()

        return wait_for(look, watch_all)
