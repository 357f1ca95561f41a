"""A disk that forgets unsynced data: it records operations on files, and says what a power loss may leave of them.

The model is what POSIX promises, and no more. A file's bytes are durable once the file was fsynced. That a name is in a
directory, or is gone, is durable once the directory was. Until then each name by itself may be old or new, whatever the
order, and any number of unsynced bytes may be missing from a file's end.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

#: (what, path or number of a file, bytes): create, write, sync, link, unlink, mkdir, sync names.
Event = tuple[str, Any, Any]


class Recorder:
    """The operations of this process on files below a directory, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, list[Event]()
        self._numbers: dict[tuple[int, int], int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record system calls within the block, of all threads, one after the other."""
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "link", "unlink", "mkdir", "rmdir")}

        def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            fd: int = real["open"](path, flags, *rest, **options)
            if flags & os.O_CREAT and (name := self._name(path, options.get("dir_fd"))) is not None:
                number = self._numbers[self._inode(fd)] = len(self.events)
                self.events.append(("create", name, number))
            return fd

        def write(fd: int, data: Any) -> int:
            done: int = real["write"](fd, data)
            if (number := self._numbers.get(self._inode(fd))) is not None:
                self.events.append(("write", number, bytes(data[:done])))
            return done

        def fsync(fd: int) -> None:
            real["fsync"](fd)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                if (name := self._name(Path(f"/proc/self/fd/{fd}").readlink())) is not None:
                    self.events.append(("sync names", name, None))
            elif (number := self._numbers.get(self._inode(fd))) is not None:
                self.events.append(("sync", number, None))

        def link(source: Any, target: Any, **options: Any) -> None:
            real["link"](source, target, **options)
            folder = options["dst_dir_fd"]
            status = os.stat(target, dir_fd=folder)
            number = self._numbers[status.st_dev, status.st_ino]
            self.events.append(("link", self._name(target, folder), number))

        def unlink(path: Any, **options: Any) -> None:
            real["unlink"](path, **options)
            if (name := self._name(path, options.get("dir_fd"))) is not None:
                self.events.append(("unlink", name, None))

        def mkdir(path: Any, *rest: Any, **options: Any) -> None:
            real["mkdir"](path, *rest, **options)
            if (name := self._name(path, options.get("dir_fd"))) is not None:
                self.events.append(("mkdir", name, None))

        def rmdir(path: Any, **options: Any) -> None:
            name = self._name(path, options.get("dir_fd"))
            real["rmdir"](path, **options)
            if name is not None:
                self.events.append(("unlink", name, None))

        lock = threading.RLock()  # the events are in the order of their effects

        def in_turn(call: Callable[..., Any]) -> Callable[..., Any]:
            def locked(*args: Any, **options: Any) -> Any:
                with lock:
                    return call(*args, **options)

            return locked

        with pytest.MonkeyPatch.context() as patch:
            for name, ours in {"open": open_, "write": write, "fsync": fsync, "link": link, "unlink": unlink,
                               "mkdir": mkdir, "rmdir": rmdir}.items():  # fmt: skip
                patch.setattr(os, name, in_turn(ours))
            yield

    def _name(self, path: Any, folder: int | None = None) -> str | None:
        """Return a path below the root, "" for the root itself, None for any other."""
        above = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
        try:
            return str((above / path).relative_to(self.root)).removeprefix(".")
        except ValueError:
            return None

    @staticmethod
    def _inode(fd: int) -> tuple[int, int]:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino


class Disk:
    """The state of the files after some events; the root itself exists."""

    DIRECTORY = -1

    def __init__(self) -> None:
        self._names: dict[str, list[int | None]] = {}  # the durable value first, then every change since
        self._data: dict[int, bytearray] = {}
        self._synced_bytes: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one event."""
        what, which, value = event
        if what == "create":
            self._data[value], self._synced_bytes[value] = bytearray(), 0
            self._names.setdefault(which, [None]).append(value)
        elif what == "write":
            self._data[which] += value
        elif what == "sync":
            self._synced_bytes[which] = len(self._data[which])
        elif what == "link":
            self._names.setdefault(which, [None]).append(value)
        elif what == "unlink":
            self._names[which].append(None)
        elif what == "mkdir":
            self._names.setdefault(which, [None]).append(self.DIRECTORY)
        elif what == "sync names":
            for name in self._names:
                if name.rpartition("/")[0] == which:
                    self._names[name] = self._names[name][-1:]

    def left(self, choose: Callable[[Sequence[Any]], Any]) -> dict[str, bytes]:
        """Return the files by name after a power loss now.

        Args:
            choose: picks one of some values, the oldest first; called for every name and for every file's length.
        """
        stands = {name: choose(values) for name, values in self._names.items()}
        there = {name for name, value in stands.items() if value == self.DIRECTORY} | {""}
        lengths = {
            number: choose(range(self._synced_bytes[number], len(data) + 1)) for number, data in self._data.items()
        }
        return {
            name: bytes(self._data[number][: lengths[number]])
            for name, number in stands.items()
            if number not in (None, self.DIRECTORY) and _above(name) <= there
        }


def _above(name: str) -> set[str]:
    parts = name.split("/")[:-1]
    return {"/".join(parts[:i]) for i in range(1, len(parts) + 1)}


def nothing_unsynced(values: Sequence[Any]) -> Any:
    """Choose only what is durable."""
    return values[0]


def names_without_bytes(values: Sequence[Any]) -> Any:
    """Choose the last state of every name, and no unsynced byte."""
    return values[0] if isinstance(values, range) else values[-1]


def at_random(seed: int) -> Callable[[Sequence[Any]], Any]:
    """Choose at random."""
    return Random(seed).choice
