"""Actors: real code in threads that take turns, one store operation of one actor at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Any

from snapstore.storage.base import GET_LIMIT_BYTES, Buffer, ObjectInfo, ObjectStore


class Stopped(BaseException):
    """The schedule is over: the actor ends before its next operation."""


class Actor:
    """Real code in a thread of its own, which stops before every operation of its `store` until told to go on.

    Attributes:
        at: the (operation, key) that it is about to do; None once it has ended.
        result, error: how it ended.
    """

    def __init__(self, name: str, inner: ObjectStore, body: Callable[[ObjectStore], Any], *, seen_dead: bool = False):
        self.name = name
        self.store = SteppingStore(self, inner, seen_dead=seen_dead)
        self.at: tuple[str, str] | None = ("start", "")
        self.result: Any = None
        self.error: BaseException | None = None
        self.steps = 0
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._main, args=(body,), name=name, daemon=True)
        self._thread.start()

    def _main(self, body: Callable[[ObjectStore], Any]) -> None:
        self._go.acquire()
        try:
            if not self._stop:
                self.result = body(self.store)
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error
        self.at = None
        self._arrived.release()

    def pause(self, name: str, key: str) -> None:
        """Wait before an operation, in the actor's own thread, until `step` or `stop` is called."""
        if self._stop:
            raise Stopped
        self.at = (name, key)
        self._arrived.release()
        self._go.acquire()
        if self._stop:
            raise Stopped

    @property
    def ended(self) -> bool:
        return self.at is None

    def step(self) -> None:
        """Do one operation; return when the actor stands before its next one, or has ended."""
        assert not self.ended
        self.steps += 1
        self._go.release()
        assert self._arrived.acquire(timeout=600), f"{self.name} hangs at {self.at}"

    def until(self, name: str, part: str = "") -> Actor:
        """Run until it stands before operation `name` on a key that contains `part`."""
        if self.at == ("start", ""):
            self.step()
        while self.at is not None and not (self.at[0] == name and part in self.at[1]):
            self.step()
        assert self.at is not None, f"{self.name} ended before {name} {part}: {self.error or self.result}"
        return self

    def finish(self) -> Any:
        """Run to the end; return its result, or raise its error."""
        while not self.ended:
            self.step()
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self) -> None:
        """End it where it stands."""
        self._stop = True
        if not self.ended:
            self._go.release()
        self._thread.join(60)


class SteppingStore:
    """An `ObjectStore` that asks its actor before every operation.

    Args:
        seen_dead: `is_locked` returns None, as it does for a session of another host.
    """

    puts_at_once, gets_at_once = 2, 1

    def __init__(self, actor: Actor, inner: ObjectStore, *, seen_dead: bool) -> None:
        self._actor, self._inner, self._seen_dead = actor, inner, seen_dead
        self.url, self.place = inner.url, inner.place

    def put(self, key: str, data: Buffer) -> None:
        self._actor.pause("put", key)
        self._inner.put(key, data)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        self._actor.pause("get", key)
        return self._inner.get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, offset: int, length: int, into=None) -> memoryview:
        self._actor.pause("get_range", key)
        return self._inner.get_range(key, offset, length, into)

    kept_open = ObjectStore.kept_open  # one range after the other

    def stat(self, key: str) -> ObjectInfo:
        self._actor.pause("stat", key)
        return self._inner.stat(key)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        self._actor.pause("sizes", "")
        return self._inner.sizes(keys)

    def list(self, prefix: str, key_only=None) -> Iterator[ObjectInfo]:
        self._actor.pause("list", prefix)
        return iter(list(self._inner.list(prefix, key_only)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._actor.pause("delete", key)
            self._inner.delete([key])

    def now_s(self) -> float:
        return self._inner.now_s()

    def sync(self, prefix: str) -> None:
        self._actor.pause("sync", prefix)
        self._inner.sync(prefix)

    def lock(self, key: str, data: Buffer) -> None:
        self._actor.pause("lock", key)
        self._inner.lock(key, data)

    def touch(self, key: str) -> None:
        self._actor.pause("touch", key)
        self._inner.touch(key)

    def release(self, key: str) -> None:
        self._actor.pause("release", key)
        self._inner.release(key)

    def is_locked(self, key: str) -> bool | None:
        self._actor.pause("is_locked", key)
        return None if self._seen_dead else self._inner.is_locked(key)

    def pinned(self) -> AbstractContextManager[None]:
        return self._inner.pinned()

    def clean(self) -> int:
        self._actor.pause("clean", "")
        return self._inner.clean()


def run_randomly(actors: Sequence[Actor], random: Random) -> list[tuple[str, str, str]]:
    """Do one operation of one actor at a time, until all have ended; now and then one stalls for up to 100 turns."""
    trace: list[tuple[str, str, str]] = []
    stalled: dict[Actor, int] = {}
    while any(not actor.ended for actor in actors):
        for actor in list(stalled):
            stalled[actor] -= 1
            if stalled[actor] <= 0:
                del stalled[actor]
        ready = [actor for actor in actors if not actor.ended and actor not in stalled]
        if not ready:
            stalled.clear()
            continue
        actor = random.choice(ready)
        for _ in range(random.choice((1, 1, 2, 8))):
            if actor.ended:
                break
            trace.append((actor.name, *actor.at))
            actor.step()
        if random.random() < 0.05:
            stalled[actor] = random.choice((5, 20, 100))
    return trace
