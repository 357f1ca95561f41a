"""Probes of `snapstore doctor`: try out each promise of a store that the protocol builds on, in an empty sandbox.

Every probe takes an empty store and says in plain words what it found; `Unfit` carries a verdict.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ...errors import AlreadyExistsError, NotFoundError, SnapstoreError, StorageError
from ...storage.base import ObjectStore
from ...text import human_bytes

RACERS = 8
#: A store's clock may differ from ours by so much before we say so [s].
CLOCK_SKEW_S = 60.0
#: What is sent and fetched once to measure a rate [bytes].
RATE_BYTES = 16 * 1024 * 1024


class Unfit(Exception):  # noqa: N818 - not an error of ours, a verdict
    """The place lacks what the protocol needs."""


def _writing(store: ObjectStore) -> str:
    """A whole put, and what a listing shows behind it."""
    store.put("probe/first", b"0")  # locally it makes the folder
    began = time.perf_counter()
    store.put("probe/second", b"1")
    took_ms = 1000 * (time.perf_counter() - began)
    seen = sorted(info.key for info in store.list("probe/"))
    if seen != ["probe/first", "probe/second"]:
        raise Unfit(f"two objects were put, {len(seen)} are listed; a gc would take live objects for missing ones")
    return f"what is put is listed at once; a small durable write takes {took_ms:.1f} ms"


def _case(store: ObjectStore) -> str:
    store.put("probe/a", b"0")
    try:
        store.get("probe/A")
    except NotFoundError:
        return "differ by case"
    raise Unfit("'a' and 'A' are one name here: runs that are called so would share their records")


def _permissions(store: ObjectStore) -> str:
    """What these credentials may do, one by one, and what it costs where they may not."""
    tries: dict[str, tuple[str, Callable[[], object]]] = {
        "write": ("nothing can be saved", lambda: store.put("sessions/probe", b"0")),
        "read": ("nothing can be restored", lambda: store.get("sessions/probe")),
        "list": ("nothing can be found", lambda: list(store.list("sessions/"))),
        "renew": ("a save of more than an hour looks dead to a gc", lambda: store.touch("sessions/probe")),
        "delete": (
            "gc must run elsewhere, and saves leave their sessions to it",
            lambda: store.delete(["sessions/probe"]),
        ),
    }
    refused: dict[str, str] = {}
    for what, (cost, ask) in tries.items():
        try:
            ask()
        except SnapstoreError:
            refused[what] = cost
    said = "; ".join(f"may not {what}: {cost}" for what, cost in refused.items())
    if refused.keys() & {"write", "read", "list"}:
        raise Unfit(said)
    return said or f"may {', '.join(tries)}"


def _race(store: ObjectStore) -> str:
    """Threads put the same key: one must win, and its bytes must stand."""
    start, won = threading.Barrier(RACERS), []

    def racer(number: int) -> None:
        start.wait()
        try:
            store.put("probe/race", bytes([number]))
            won.append(number)
        except AlreadyExistsError:
            pass
        except SnapstoreError:
            won.append(-1)

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stands = store.get("probe/race")
    if len(won) != 1:
        raise Unfit(f"{len(won)} of {RACERS} racing writers won, expected one")
    if stands != bytes(won):
        raise Unfit("the bytes of a loser stand")
    return f"one of {RACERS} racing writers wins"


def _ranges(store: ObjectStore) -> str:
    data = bytes(range(256)) * 1024
    store.put("probe/ranges", data)
    wanted = [(0, 1), (1000, 3000), (len(data) - 1, 1)]
    got = [bytes(store.get_range("probe/ranges", offset, length)) for offset, length in wanted]
    if got != [data[offset : offset + length] for offset, length in wanted]:
        raise Unfit("parts of an object come back other than they are")
    return "parts of objects come back as they are"


def _deletes(store: ObjectStore) -> str:
    store.put("probe/gone", b"")
    try:
        store.delete(["probe/gone", "probe/never-there"])
    except StorageError as error:
        return f"are refused here, so saves and restores work and gc does not: {error}"
    if "probe/gone" in {info.key for info in store.list("probe/")}:
        raise Unfit("a deleted object is still listed")
    return "work"


def _life(store: ObjectStore) -> str:
    store.lock("probe/held", b"")
    held = store.is_locked("probe/held")
    store.touch("probe/held")
    store.release("probe/held")
    if held is False:
        raise Unfit("a lock that is held looks free: gc would take living saves for dead")
    return "work" if held else "are missing here; gc waits an hour for saves that died"


def _clock(store: ObjectStore) -> str:
    skew_s = store.now_s() - time.time()
    return "agrees" if abs(skew_s) < CLOCK_SKEW_S else f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"


def _checksums(store: ObjectStore) -> str:
    """Only where bytes travel: a store that refuses bytes whose SHA-256 is another than was said."""
    refuses = getattr(store, "refuses_damage", None)
    if refuses is None:
        return "are compared by snapstore whenever it reads"
    return (
        "are compared by the server with what it got, and by snapstore whenever it reads" if refuses() else
        "are not compared by the server: a write that is damaged on the way is found when it is read, or by 'check'; "
        "run that after saves"
    )  # fmt: skip


def _rate(store: ObjectStore) -> str:
    data = os.urandom(RATE_BYTES)
    began = time.perf_counter()
    store.put("probe/rate", data)
    up_s, began = time.perf_counter() - began, time.perf_counter()
    store.get_range("probe/rate", 0, RATE_BYTES)
    down_s = time.perf_counter() - began
    return f"{human_bytes(int(RATE_BYTES / up_s))}/s to the store, {human_bytes(int(RATE_BYTES / down_s))}/s back"


PROBES: dict[str, Callable[[ObjectStore], str]] = {
    "writing": _writing,
    "names": _case,
    "permissions": _permissions,
    "create-only": _race,
    "ranges": _ranges,
    "deletes": _deletes,
    "signs of life": _life,
    "clock": _clock,
    "checksums": _checksums,
    "throughput": _rate,
}
