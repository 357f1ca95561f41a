"""The objects of a store: their keys, a copy of all of them, and bytes that change behind the store's back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snapstore.storage.base import ObjectStore, key_alone
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    """Return the keys below a prefix, sorted."""
    return sorted(info.key for info in store.list(prefix))


def with_keys_alone(infos, key_only):
    """Return what a listing shows, after a lie, with the key alone where the caller has asked for no more."""
    found = {info.key: info for info in infos}
    bare = key_only(list(found)) if key_only else ()
    return iter([key_alone(key) if key in bare else info for key, info in found.items()])


def clone(store: MemoryStore) -> MemoryStore:
    """Return a copy of everything, held objects included."""
    copy = MemoryStore()
    copy._objects, copy._locked = dict(store._objects), set(store._locked)
    return copy


def copy_objects(store: ObjectStore, target: LocalStore) -> LocalStore:
    """Put a copy of every object into another store; return that store."""
    for key in keys_of(store):
        target.put(key, store.get(key))
    return target


def replace(store: ObjectStore, key: str, data: bytes | bytearray) -> None:
    """Delete an object and put other bytes under its key, as another process does: its time and tag change."""
    store.delete([key])
    store.put(key, bytes(data))


def change(store: MemoryStore, key: str, edit: Callable[[bytearray], object]) -> None:
    """Let `edit` change an object's bytes in place, as a decaying disk does: time, tag and holder stay."""
    data, info = store._objects[key]
    edited = bytearray(data)
    edit(edited)
    assert len(edited) == len(data)
    store._objects[key] = bytes(edited), info


def flip(store: ObjectStore, key: str, at: int, mask: int = 1) -> None:
    """Flip bits of one byte of an object, by `replace`: every cache sees that the object has changed."""
    data = bytearray(store.get(key))
    _flip_byte(data, at, mask)
    replace(store, key, data)


def flip_in_place(store: MemoryStore, key: str, at: int, mask: int = 1) -> None:
    """Flip bits of one byte of an object, by `change`: no cache sees it."""
    change(store, key, lambda data: _flip_byte(data, at, mask))


def flip_file(path: Path, at: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file, in place."""
    data = bytearray(path.read_bytes())
    _flip_byte(data, at, mask)
    path.write_bytes(data)


def _flip_byte(data: bytearray, at: int, mask: int) -> None:
    data[at] ^= mask
