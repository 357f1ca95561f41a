"""A store that answers one operation wrongly, once; and every wrong answer that an operation can be given.

`LyingStore` records the operations and the lengths of its listings. So a first run of a verb shows which lies the next
run can be told (`lies_of`). A lie is one of these, and nothing else is ever wrong:

    missing         get, get_range, stat: 404 for what is there
    other N         get, get_range: the bytes of the N-th other object of its kind, valid in themselves
    empty           list, sizes: nothing
    first N         list: the first N keys by name
    without N       list, sizes: all but the N-th key by name
    stale           list: as it was before the verb began
    taken           put, lock: 412 for a free key, and nothing is stored
    nothing         put, lock, delete, release: reports success, and does nothing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from kit.faults import FaultStore
from kit.objects import with_keys_alone
from snapstore.errors import AlreadyExistsError, IntegrityError, NotFoundError
from snapstore.storage.base import GET_LIMIT_BYTES, Buffer, ObjectInfo, ObjectStore

#: For one read, the bytes of this many other objects are tried.
OTHERS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """One operation, as an honest store has answered it."""

    name: str
    key: str
    listed: int = 0  # how many keys a listing gave


class LyingStore(FaultStore):
    """An `ObjectStore` whose k-th operation is answered by a lie.

    Attributes:
        asked: all operations.
        told: whether the lie was told: it differed from the truth.
    """

    def __init__(self, inner: ObjectStore, *, seen_dead: bool = False) -> None:
        super().__init__(inner)
        self.asked: list[Asked] = []
        self.told = False
        self.lie_at: int | None = None
        self.lie = ""
        self._seen_dead = seen_dead
        self._before = {info.key: info for info in inner.list("")}

    def lie_once(self, k: int, lie: str) -> None:
        """Tell a lie at the k-th operation from now on."""
        self.lie_at, self.lie = len(self.asked) + k, lie
        self._before = {info.key: info for info in self.inner.list("")}

    def _now(self, name: str, key: str) -> str:
        """Record an operation; return the lie that is due, or ""."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(Asked(name, key))
        return self.lie if number == self.lie_at else ""

    def _lied(self) -> None:
        self.told = True

    def _there(self, key: str) -> bool:
        return any(info.key == key for info in self.inner.list(""))

    def _other(self, key: str, number: int) -> str:
        """Return the key of another object of the same kind; the same key if there is none."""
        kind = key.partition("/")[0]
        suffix = key.rpartition(".")[2] if kind == "gc" else ""
        keys = sorted(i.key for i in self.inner.list("") if i.key.partition("/")[0] == kind and i.key.endswith(suffix))
        others = [other for other in keys if other != key]
        return others[number * (len(others) - 1) // max(1, OTHERS - 1)] if others else key

    def put(self, key: str, data: Buffer) -> None:
        self._put("put", key, data)

    def lock(self, key: str, data: Buffer) -> None:
        self._put("lock", key, data)

    def _put(self, name: str, key: str, data: Buffer) -> None:
        lie = self._now(name, key)
        if lie in ("taken", "nothing") and not self._there(key):
            self._lied()
            if lie == "taken":
                raise AlreadyExistsError(f"{key}: taken (a lie)")
            return
        getattr(super(), name)(key, data)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        lie = self._now("get", key)
        return super().get(self._misled(lie, key), limit_bytes=limit_bytes)

    def get_range(self, key: str, offset: int, length: int, into=None) -> memoryview:
        lie = self._now("get_range", key)
        other = self._misled(lie, key)
        try:
            return super().get_range(other, offset, length, into)
        except IntegrityError:
            if other == key:
                raise
            raise IntegrityError(f"{key}: ends before the range does (a lie)") from None

    def _misled(self, lie: str, key: str) -> str:
        """Return the key whose bytes are given."""
        if not lie.startswith(("missing", "other")) or not self._there(key):
            return key
        if lie == "missing":
            self._lied()
            raise NotFoundError(f"{key}: missing (a lie)")
        other = self._other(key, int(lie.split()[1]))
        if other != key:
            self._lied()
        return other

    def stat(self, key: str) -> ObjectInfo:
        self._misled(self._now("stat", key), key)
        return super().stat(key)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        lie = self._now("sizes", "")
        found = super().sizes(keys)
        self.asked[-1] = Asked("sizes", "", len(found))
        kept = set(self._cut(lie, sorted(found)))
        return {key: size for key, size in found.items() if key in kept}

    def list(self, prefix: str, key_only=None) -> Iterator[ObjectInfo]:
        lie = self._now("list", prefix)
        number = len(self.asked) - 1
        found = {info.key: info for info in super().list(prefix)}
        self.asked[number] = Asked("list", prefix, len(found))
        if lie == "stale":
            old = {key: info for key, info in self._before.items() if key.startswith(prefix)}
            self.told = self.told or old.keys() != found.keys()
            return with_keys_alone(old.values(), key_only)
        kept = self._cut(lie, sorted(found))
        return with_keys_alone((found[key] for key in kept), key_only)

    def _cut(self, lie: str, keys: list[str]) -> list[str]:
        if not lie or not keys:
            return keys
        self._lied()
        number = int(lie.split()[1]) if " " in lie else 0
        if lie == "empty":
            return []
        return keys[:number] if lie.startswith("first") else keys[:number] + keys[number + 1 :]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._now("delete", key) and self._there(key):
                self._lied()
                continue
            super().delete([key])

    def release(self, key: str) -> None:
        if self._now("release", key) and self._there(key):
            self._lied()
            self._held.discard(key)
            self.drop(key)
            return
        super().release(key)

    def drop(self, key: str) -> None:
        """Release the lock of an object, whether the object is there or not."""
        with self.inner._mutex:
            self.inner._locked.discard(key)

    def is_locked(self, key: str) -> bool | None:
        return None if self._seen_dead else super().is_locked(key)


class RandomLiar(LyingStore):
    """A store that lies at one operation, whatever that is. It never claims to have stored a pack or a manifest.

    A save notices that lie only with `verify_writes="full"`.
    """

    def __init__(self, inner: ObjectStore, at: int, random: Random) -> None:
        super().__init__(inner)
        self.lie_at, self._random = at, random

    def _now(self, name: str, key: str) -> str:
        if len(self.asked) == self.lie_at:
            lies = lies_of(Asked(name, key, listed=8))
            if name == "put" and key.startswith(("packs/", "manifests/")):
                lies = ["taken"]
            self.lie = self._random.choice(lies) if lies else ""
        return super()._now(name, key)


def lies_of(asked: Asked) -> list[str]:
    """Return every wrong answer to an operation."""
    if asked.name in ("put", "lock"):
        return ["taken", "nothing"]
    if asked.name in ("delete", "release"):
        return ["nothing"]
    if asked.name == "stat":
        return ["missing"]
    if asked.name in ("get", "get_range"):
        return ["missing", *(f"other {number}" for number in range(OTHERS))]
    if asked.name in ("list", "sizes"):
        count = asked.listed
        cuts = [f"without {number}" for number in range(count)] if count > 1 else []
        if asked.name == "list":
            cuts += [f"first {number}" for number in range(1, count - 1)] + ["stale"]
        return [*(["empty"] if count else []), *cuts]
    return []


def every_lie(asked: Iterable[Asked]) -> list[tuple[int, str]]:
    """Return (k, lie) for every lie about every operation."""
    return [(k, lie) for k, one in enumerate(asked) for lie in lies_of(one)]


def first(of: Iterable[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    return list(islice(of, count))
