"""Holders: which ranks hold the plain tensors that not all ranks hold, such as the layers of a pipeline's stages.

In: the trees of a rank's state. Out, equal on all ranks: the holders of each such tensor; each holder stores a share.
The ranks exchange this in the first save, and in the one after a save that has failed on rank 0. A rank that copied
only its share of a tensor could not store the rest later. So until it knows the holders, it copies plain tensors whole;
if they are too large for that, it exchanges before it copies (staging.py). Equal trees are sent once.

Rank 0 also tells, for each plain tensor that all ranks hold, which rank stores its first cell. It alone chooses this,
and keeps to it, so that no two ranks cut a tensor by different choices.

Later a rank may hold other plain tensors, such as optimizer state that appears after the first save. It copies new
plain tensors whole. If it is rank 0, all ranks exchange again. Else it asks rank 0, which answers when every other rank
has reported, or asks as well. Ranks whose tensors have not changed do not wait: their shares are valid as long as each
tensor that they have kept has its former holders. If more ranks hold it, the shares of the former ones are the whole
tensor, so these alone count as its holders in this save, and all exchange in the next one. If some ranks have kept it
and others have dropped it, nothing has copied their shares: the save fails, and the next one exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import xxhash

from ...distributed import base, messages
from ...distributed.base import Ranks, Watch, ranks_by, wait_for
from ...distributed.messages import Ask, Failed, Outcome, decode, encode
from ...errors import RanksError
from ...state.values.containers import shown
from ...text import some
from ...threads import msgpack_decoder
from ..shares import Name, common
from .merged_trees import PartTree, decode_trees, encode_trees, holders_of
from .outcomes import ended

T = TypeVar("T")
#: Waits that end once other ranks have called `save`; in the others, ranks may have much to write.
_CALLS = _BEGINS, _COMES = "rank 0 to begin a save", "all ranks to call save"
Holders = Mapping[Name, tuple[int, ...]]
Turns = Mapping[Name, int]  # see `RankShares.turns`


class HolderExchange:
    """The exchange of one save, on one rank.

    Args:
        key: returns the key of a message of that save.
        check: called between looks for a message; it raises to end a wait.
        prefix: of the keys of all saves.

    Attributes:
        is_stale: whether more ranks hold a tensor than the returned holders say, on rank 0: all exchange in the next
            save.

    All methods raise:
        SnapstoreError: another rank cannot save its state; it is named.
        RanksError: a rank does not answer, or does not call `save`.
    """

    def __init__(self, ranks: Ranks, key: Callable[[str], str], check: Callable[[], object], prefix: str) -> None:
        self._ranks, self._key, self._check, self._prefix = ranks, key, check, prefix
        self.is_stale = False

    def is_wanted(self, *, here: bool) -> bool:
        """Return whether the ranks exchange holders in this save: the value of `here` on rank 0."""
        ranks = self._ranks
        if ranks.rank == 0:
            return here

        def said() -> bool | None:
            if ranks.look(self._key("digest/0")) is not None:
                return True
            return None if ranks.look(self._key("begin")) is None else False

        return self._wait(_BEGINS, said, lambda: [0])

    def holders(
        self,
        trees: Sequence[PartTree],
        names: Collection[Name],
        choose: Callable[[Holders], Turns],
        known: Holders | None = None,
    ) -> tuple[Holders, Turns]:
        """Return the holders of the plain tensors that not all ranks hold, and the turns of the others.

        Args:
            names: of this rank's plain tensors.
            choose: returns the turns, given the holders; only rank 0 calls it.
            known: the holders by which ranks may have copied, on rank 0.
        """
        ranks, key = self._ranks, self._key
        own = encode_trees(trees)
        ranks.post(key(f"digest/{ranks.rank}"), xxhash.xxh3_128_digest(own))
        if ranks.rank == 0:
            everyone = dict.fromkeys(names, tuple(range(ranks.count)))
            found = self._keep_shares(self._gather(own), everyone, known or {})
            turns = choose(found)
            self._tell(found, turns)
            return found, turns
        asked = decode(self._wait("rank 0 to compare trees", lambda: ranks.look(key("ask-trees")), lambda: [0]), Ask)
        if ranks.rank in asked.ranks:
            ranks.post(key(f"trees/{ranks.rank}"), own)
        return self._told(names)

    def ask(self, names: Collection[Name]) -> tuple[Holders, Turns]:
        """Return the same after a change, on a rank that holds other plain tensors than in the last exchange."""
        ranks = self._ranks
        ranks.post(self._key(f"changed/{ranks.rank}"), msgspec.msgpack.encode(list(names)))
        ranks.post(self._key("changed"), b"yes")
        return self._told(names)

    def answer(self, holders: Holders, own: Collection[Name], turns: Turns) -> Holders | None:
        """Answer the ranks that ask, on rank 0, and return the new holders.

        None: no rank asks, or another one may still ask.

        Args:
            holders, own, turns: the holders, rank 0's plain tensors and the turns, as of the last exchange.

        Raises:
            RanksError: see `require_kept`.
        """
        ranks, changed = self._ranks, dict[int, set[Name]]()
        if ranks.look(self._key("changed")) is None:
            return None
        for rank in range(1, ranks.count):
            if (data := ranks.look(self._key(f"changed/{rank}"))) is not None:
                changed[rank] = set(msgpack_decoder(list[Name]).decode(data))
            elif ranks.look(self._key(f"report/{rank}")) is None:
                return None
        everyone = dict.fromkeys(own, tuple(range(ranks.count)))
        old = everyone | dict(holders)
        found = {name: {rank for rank in of if rank not in changed} for name, of in old.items()}
        for rank, names in changed.items():
            for name in names:
                found.setdefault(name, set()).add(rank)
        new = self._keep_shares({name: tuple(sorted(of)) for name, of in found.items() if of}, {}, holders)
        require_kept((name for name, of in old.items() if not found[name].isdisjoint(of)), old, new)
        new = {name: of for name, of in new.items() if of != everyone.get(name)}
        self._tell(new, turns)
        return new

    def _keep_shares(self, found: Holders, everyone: Holders, known: Holders) -> dict[Name, tuple[int, ...]]:
        """Return holders in which a tensor that all its known holders have kept has these.

        Args:
            found: the holders of now; `everyone` has more.
        """
        held = {name: found.get(name) or everyone.get(name, ()) for name in known}
        more = {name: of for name, of in known.items() if set(of) < set(held[name])}
        self.is_stale = bool(more)
        return dict(found) | more

    def _tell(self, found: Holders, turns: Turns) -> None:
        by_holders: dict[tuple[int, ...], list[Name]] = {}
        for name, holders in found.items():
            by_holders.setdefault(holders, []).append(name)
        in_order = [turns[name] for name in common(turns, found)]  # all ranks have the same order
        self._ranks.post(self._key("holders"), msgspec.msgpack.encode((list(by_holders.items()), in_order)))

    def _told(self, own: Iterable[Name]) -> tuple[Holders, Turns]:
        ranks, key = self._ranks, self._key
        data = self._wait("rank 0 to tell who holds which tensors", lambda: ranks.look(key("holders")), lambda: [0])
        groups, turns = msgpack_decoder(tuple[list[tuple[tuple[int, ...], list[Name]]], list[int]]).decode(data)
        found = {name: holders for holders, names in groups for name in names}
        return found, dict(zip(common(own, found), turns, strict=False))

    def _gather(self, own: bytes) -> Holders:
        """Return the holders from the trees of all ranks, on rank 0."""
        ranks = self._ranks
        keys = [self._key(f"digest/{rank}") for rank in range(ranks.count)]

        def missing() -> list[int]:
            return [rank for rank, name in enumerate(keys) if ranks.look(name) is None]

        digests = self._wait(_COMES, lambda: ranks.look_all(keys), missing)
        alike = ranks_by(enumerate(digests))
        others = [of[0] for of in alike.values()][1:]
        ranks.post(self._key("ask-trees"), encode(Ask(others)))
        names = [self._key(f"trees/{rank}") for rank in others]
        found = self._wait("trees", lambda: ranks.look_all(names), lambda: others)
        return holders_of([(of, decode_trees(data)) for of, data in zip(alike.values(), [own, *found], strict=True)])

    def _wait(self, what: str, look: Callable[[], T | None], who: Callable[[], Sequence[int]]) -> T:
        """Return what `look` returns, once it is not None."""
        ranks, key = self._ranks, self._key

        def look_for_the_end() -> None:
            self._check()
            if (data := ranks.look(key("failed"))) is not None:
                raise messages.raised(decode(data, Failed), ranks.rank)
            if (data := ranks.look(key("outcome"))) is not None:
                raise ended(decode(data, Outcome), ranks.rank)

        warn_s = base.WARN_S if what in _CALLS else None
        return wait_for(look, Watch(ranks, what, who, ranks.total_s, self._prefix, look_for_the_end, warn_s))


def require_kept(kept: Iterable[Name], old: Holders, new: Holders) -> None:
    """Check that the tensors which a rank has kept since the last exchange have the same holders as then.

    Raises:
        RanksError: some have other holders: the ranks that kept these tensors have copied only their old shares.
    """
    moved = sorted({shown(name[1]) for name in kept if new.get(name) != old.get(name)})
    if moved:
        error = RanksError(
            f"{some(moved, 5)}: the ranks that hold it have changed since the last save, and some ranks have copied "
            "only their old shares; nothing was committed; save again: the next save stores it"
        )
        error.not_begun = True  # so the next save begins
        raise error
