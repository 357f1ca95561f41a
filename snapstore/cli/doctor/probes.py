"""Probe a store: test each promise that the protocol needs.

In: an empty store, for each probe. Out: the finding, as text; `Unfit` means that the store breaks the promise.
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
#: A smaller difference between the store's clock and this machine's is not reported [s].
CLOCK_SKEW_S = 60.0
#: The size of the object that is put and read once to measure rates [bytes].
RATE_BYTES = 16 * 1024 * 1024


class Unfit(Exception):  # noqa: N818 - a verdict, no error
    """The store breaks a promise that the protocol needs."""


def _writing(store: ObjectStore) -> str:
    """Put two objects: a listing must show both at once."""
    store.put("probe/first", b"0")  # a local store creates the folder here
    began = time.perf_counter()
    store.put("probe/second", b"1")
    took_ms = 1000 * (time.perf_counter() - began)
    seen = sorted(info.key for info in store.list("probe/"))
    if seen != ["probe/first", "probe/second"]:
        raise Unfit(f"two objects were put, a listing shows {len(seen)}; a gc would take live objects for missing ones")
    return f"a listing shows new objects at once; a small durable write takes {took_ms:.1f} ms"


def _case(store: ObjectStore) -> str:
    store.put("probe/a", b"0")
    try:
        store.get("probe/A")
    except NotFoundError:
        return "differ by case"
    raise Unfit("'a' and 'A' are the same name here: runs with such names would share their records")


def _permissions(store: ObjectStore) -> str:
    """Try each operation: the credentials may lack permissions, and each missing permission has another effect."""
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
    """Put the same key from several threads: one must win, and its bytes must stay."""
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
        raise Unfit("the stored bytes are those of a writer that lost")
    return f"one of {RACERS} racing writers wins"


def _ranges(store: ObjectStore) -> str:
    data = bytes(range(256)) * 1024
    store.put("probe/ranges", data)
    wanted = [(0, 1), (1000, 3000), (len(data) - 1, 1)]
    got = [bytes(store.get_range("probe/ranges", offset, length)) for offset, length in wanted]
    if got != [data[offset : offset + length] for offset, length in wanted]:
        raise Unfit("a range of an object has the wrong bytes")
    return "ranges of objects have the right bytes"


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
        raise Unfit("a held lock looks free: gc would take live saves for dead ones")
    return "work" if held else "are missing here; gc waits an hour for a save that died"


def _clock(store: ObjectStore) -> str:
    skew_s = store.now_s() - time.time()
    return "agrees" if abs(skew_s) < CLOCK_SKEW_S else f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"


def _checksums(store: ObjectStore) -> str:
    """Ask a remote store whether it refuses bytes that do not match their SHA-256."""
    refuses = getattr(store, "refuses_damage", None)
    if refuses is None:
        return "are verified by snapstore at every read"
    if refuses():
        return "are verified by the server at every write, and by snapstore at every read"
    return (
        "are not verified by the server: a write that is damaged in transit is found only by a read; run "
        "'snapstore check --read-data' after saves"
    )


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
