"""Calls of a manager from a thread that saves or mirrors, by handlers of the log, end; so do waits if they raise."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kit.repositories import OPTIONS
from snapstore import InvalidInputError, KeepLast, SnapshotManager, StorageError, text
from snapstore.engine.cpu import CpuEngine
from snapstore.save.background import SaveHandle
from snapstore.storage.memory import MemoryStore

STATE = {"w": np.arange(500_000)}
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


class GateStore(MemoryStore):
    """A store whose records wait until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.refuse = threading.Event(), False

    def put(self, key: str, body: object) -> None:
        if key.startswith("snapshots/"):
            assert self.gate.wait(30)
            if self.refuse:
                raise StorageError("no answer")
        super().put(key, body)  # type: ignore[arg-type]


@contextmanager
def told_of_lines(told: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Call a function at each line of the log, in the thread that logs."""
    handler, log = logging.Handler(), logging.getLogger("snapstore")
    handler.emit, level = told, log.level  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def refused(manager: SnapshotManager, handle: SaveHandle) -> list[str]:
    """Call everything that waits for a save; return what was refused."""
    calls: dict[str, Callable[[], object]] = {
        "result": handle.result,
        "wait": manager.wait_until_finished,
        "close": manager.close,
        "close in time": lambda: manager.close(timeout=1),
        "save": lambda: manager.save(9, STATE),
        "prepare": lambda: manager.prepare(STATE),
        "restore": manager.restore,
    }
    names = []
    for name, call in calls.items():
        with suppress(InvalidInputError):
            call()
            continue
        names.append(name)
    return names


ALL = ["result", "wait", "close", "close in time", "save", "prepare", "restore"]


def test_the_thread_of_a_save_cannot_wait_for_itself():
    store, found = GateStore(), []
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        handle = manager.save(0, STATE)
        with told_of_lines(lambda record: found.append(refused(manager, handle))):
            store.gate.set()
            handle.result()
            manager.wait_until_finished()
        manager.save(1, STATE).result()
        assert manager.all_steps() == [0, 1]
    assert found == [ALL]


def test_a_thread_of_the_engine_cannot_wait_for_a_save(monkeypatch):
    """Python's garbage collector may call a finalizer there, which closes the manager."""
    start_encode, found = CpuEngine.start_encode, []

    def call_and_encode(self, batch):
        self._threads.start(lambda _: found.append(refused(manager, handle)), [None])()
        return start_encode(self, batch)

    store = GateStore()
    store.gate.set()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        handle = manager.save(0, STATE)
        handle.result()
        monkeypatch.setattr(CpuEngine, "start_encode", call_and_encode)
        manager.save(1, {"w": np.random.default_rng(0).standard_normal(500_000)}).result()
    assert found
    assert all(names == ALL[1:] for names in found)  # the save of the handle has ended


def test_the_thread_of_a_mirror_cannot_wait_for_itself(monkeypatch):
    found = []

    def told(record: logging.LogRecord) -> None:
        if "is behind" in record.getMessage():
            for call in (manager.wait_until_mirrored, manager.close):
                with pytest.raises(InvalidInputError, match="which would deadlock"):
                    call()
            found.append(record)

    def fail() -> bool:
        raise StorageError("no answer")

    with told_of_lines(told):
        manager = SnapshotManager(MemoryStore(), run="a", options=OPTIONS, mirror=MemoryStore())
        catch_up = manager._mirror._catch_up
        monkeypatch.setattr(manager._mirror, "_catch_up", fail)
        manager.save(0, STATE).result()
        manager.wait_until_mirrored()
        monkeypatch.setattr(manager._mirror, "_catch_up", catch_up)
        assert manager.wait_until_mirrored() == []
        manager.close()
    assert found


def no_handler(record: logging.LogRecord) -> None:
    raise LookupError("no such handler")


def end(record: logging.LogRecord) -> None:
    """End the program, as some handlers do: in a thread, SystemExit ends only the thread."""
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit("no such handler")


@pytest.mark.parametrize("told", [no_handler, end])
def test_a_handler_that_raises_fails_nothing(capsys, told):
    """logging catches no error of a filter, nor of a handler's `emit`."""
    with (
        told_of_lines(told),
        SnapshotManager(MemoryStore(), run="a", options=OPTIONS, mirror=MemoryStore(), keep=KeepLast(1)) as manager,
    ):
        for step in range(3):
            assert manager.save(step, STATE, tags=["best"]).result().step == step
            assert manager.wait_until_mirrored(20) == []
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        assert manager.restore()["w"][7] == 7
    assert "no such handler" in capsys.readouterr().err


def test_a_handler_may_end_the_program_in_the_main_thread():
    with told_of_lines(lambda record: sys.exit("told to")), pytest.raises(SystemExit, match="told to"):
        text.log.warning("end")


def test_a_handler_that_raises_ends_no_thread_of_a_mirror(monkeypatch):
    with told_of_lines(no_handler):
        manager = SnapshotManager(MemoryStore(), run="a", options=OPTIONS, mirror=MemoryStore())
        target = manager._mirror._target.context.store
        put = target.put
        monkeypatch.setattr(target, "put", lambda *_: no_answer())
        manager.save(0, STATE).result()
        assert manager.wait_until_mirrored() == [0]
        monkeypatch.setattr(target, "put", put)
        assert manager.wait_until_mirrored(20) == []
        manager.close()


def no_answer() -> None:
    raise StorageError("no answer")


def test_lines_of_the_log_name_their_place(caplog):
    text.log.warning("1 %s", "x")
    assert [(r.module, r.funcName, r.getMessage()) for r in caplog.records] == [
        ("test_calls_in_save_threads", "test_lines_of_the_log_name_their_place", "1 x")
    ]


def test_every_module_logs_through_the_log_that_raises_nothing():
    for path in Path(text.__file__).parent.rglob("*.py"):
        assert path.name in ("text.py", "app.py") or 'getLogger("snapstore")' not in path.read_text(), path


def test_a_handler_that_raises_ends_no_wait_for_a_failed_save():
    store = GateStore()
    store.gate.set()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        store.refuse = True
        with told_of_lines(no_handler):
            handle = manager.save(0, STATE)
            with pytest.raises(StorageError, match="no answer"):
                handle.result(20)
            with pytest.raises(StorageError, match="no answer"):
                manager.wait_until_finished()
        store.refuse = False
        manager.save(1, STATE).result()
        assert manager.all_steps() == [1]


def test_a_forked_child_does_not_wait_for_a_save():
    store = GateStore()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        handle = manager.save(0, STATE)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                handle.result()
            except InvalidInputError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        store.gate.set()
        assert handle.result().step == 0
