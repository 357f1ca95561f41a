"""Pools of threads need no semaphore, keep no results or items, and raise a clear error if no thread can start."""

import gc
import importlib
import re
import sys
import threading
import types
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest

import snapstore
from kit.processes import run_python
from snapstore import CapabilityError, InvalidInputError, Repository, SaveOptions
from snapstore import threads as threads_module
from snapstore.storage.memory import MemoryStore
from snapstore.threads import MAX_RUNS, Pending, Threads, imported, msgpack_decoder, without_gc


@pytest.fixture
def threads():
    with Threads(4) as made:
        yield made


@pytest.mark.parametrize("count", [0, 1, 3, MAX_RUNS, MAX_RUNS + 1, 10 * MAX_RUNS + 7])
def test_every_item_is_computed_once_and_in_order(threads, count):
    seen = []
    assert threads.start(lambda i: (seen.append(i), i * i)[1], range(count))() == [i * i for i in range(count)]
    assert sorted(seen) == list(range(count))


def test_no_thread_is_started_while_another_is_idle(threads):
    """Each thread keeps memory of its last work."""
    used = {threads.start(lambda _: threading.get_ident(), [None])()[0] for _ in range(20)}
    assert len(used) == 1
    go = threading.Event()
    waiting = [threads.start(lambda _: go.wait(600), [None]) for _ in range(3)]
    threads.start(lambda _: None, [None])()  # a fourth one: the others wait
    go.set()
    assert [pending() for pending in waiting] == [[True]] * 3


def test_an_exception_ends_its_run_and_no_other(threads):
    seen = []

    def work(i):
        seen.append(i)
        if i == 5:
            raise ValueError("five")

    pending = threads.start(work, range(10))
    with pytest.raises(ValueError, match="five"):
        pending()
    assert sorted(seen) == list(range(10))
    with pytest.raises(ValueError, match="five"):
        pending()


def test_the_exception_of_the_first_item_is_raised_whichever_fails_first(threads):
    last_failed = threading.Event()

    def fail(i):
        if i == 2:
            last_failed.set()
        elif i == 1:
            last_failed.wait(30)
        if i:
            raise ValueError(i)

    with pytest.raises(ValueError, match="1"):
        threads.start(fail, [0, 1, 2])()


def test_a_run_may_be_computed_outside_of_a_pool():
    """The loader of kernels does so."""
    pending = Pending(lambda i: i + 1, [2])
    threading.Thread(target=pending.compute, args=[0]).start()
    assert pending.ready(30)
    assert pending() == [3]


def test_ready_waits_no_longer_than_it_is_told(threads):
    go = threading.Event()
    pending = threads.start(lambda _: go.wait(600), [None])
    assert not pending.ready(0.01)
    go.set()
    assert pending.ready(600)


def test_no_more_threads_run_than_there_are_items(threads):
    before = threading.active_count()
    threads.start(abs, [-1])()
    assert threading.active_count() == before + 1


def test_work_that_is_started_one_by_one_runs_at_once(threads):
    barrier = threading.Barrier(4, timeout=600)
    for wait in [threads.start(lambda _: barrier.wait(), [None]) for _ in range(4)]:
        wait()


def test_an_idle_pool_holds_no_results(threads):
    class Result:
        pass

    found = weakref.ref(threads.start(lambda _: Result(), [None])()[0])
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("fails", [False, True])
def test_results_hold_no_items(threads, fails):
    class Item:
        pass

    def work(item):
        if fails:
            raise ValueError

    items = [Item()]
    item, pending = weakref.ref(items[0]), threads.start(work, items)
    assert pending.ready(600)
    items.clear()
    if fails:
        with pytest.raises(ValueError, match=r"^$") as caught:
            pending()
        caught.value.__traceback__ = None
        del caught
    del pending
    assert item() is None, "the item must be freed without the garbage collector"


def test_a_pool_works_with_the_threads_that_it_has(threads, monkeypatch):
    threads.start(abs, [-1])()
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
    assert threads.start(abs, [-1, -2, -3])() == [1, 2, 3]


def test_a_save_without_threads_raises_a_capability_error_and_the_next_works(monkeypatch):
    with Repository.create(MemoryStore(), options=SaveOptions(threads=2)) as repository:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
            with pytest.raises(CapabilityError, match="cannot start a thread; raise the limit"):
                repository.save({"w": np.arange(100_000)}, run="a", step=0)
        assert repository.snapshots() == []
        repository.save({"w": np.arange(100_000)}, run="a", step=1)
        assert repository.check("restore").ok


SAVE = """
import _multiprocessing, sys
def refuse(*args): raise OSError(28, "No space left on device")
_multiprocessing.SemLock = refuse  # /dev/shm is full, read-only or missing
import numpy as np
from snapstore import Repository
with Repository.create(sys.argv[1]) as repository:
    repository.save({"w": np.arange(100_000), "v": np.zeros(10)}, run="a", step=0)
    assert (repository.restore("a@0")["w"] == np.arange(100_000)).all()
    assert repository.check("restore").ok
assert "multiprocessing.synchronize" not in sys.modules
print("saved")
"""


def test_a_save_and_a_restore_need_no_shared_memory(tmp_path):
    done = run_python("-c", SAVE, tmp_path / "r")
    assert (done.stdout, done.returncode) == ("saved\n", 0), done.stderr


FIRST_USES = """
import sys, threading
import msgspec
from snapstore.distributed.messages import Answer, Failed, decode, encode
from snapstore.threads import msgpack_decoder

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(4)
answer = encode(Answer("q", None, Failed("RanksError", "text", 0)))
kinds = []
for i in range(200):
    fields, of_builtins = [(f"a{k}", "int | None") for k in range(8)], {"__module__": "builtins"}
    inner = msgspec.defstruct(f"Inner{i}", fields, namespace=of_builtins)
    kinds.append(msgspec.defstruct(f"Outer{i}", [("inner", inner), ("others", list[inner])]))
packed = msgspec.msgpack.encode({"inner": {f"a{k}": k for k in range(8)}, "others": []})

def run():
    barrier.wait()
    decode(answer, Answer)
    for kind in kinds:
        barrier.wait()
        assert msgpack_decoder(kind).decode(packed).inner.a7 == 7

threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all threads are done")
"""


def test_threads_that_decode_a_type_for_the_first_time_at_once():
    """Threads may decode a type for the first time at the same moment: msgspec alone would crash with SIGSEGV."""
    done = run_python("-c", FIRST_USES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all threads are done\n", done.stderr


def test_all_types_are_decoded_by_decoders_that_one_thread_makes():
    allowed = Path(snapstore.__file__).parent / "threads.py"
    for file in allowed.parent.rglob("*.py"):
        if file != allowed:
            found = re.findall(r"msgpack\.(?:Decoder\(|decode\(.*type=)|msgspec\.(?:convert|json)", file.read_text())
            assert not found, f"{file}: {found}: take threads.msgpack_decoder: first uses by two threads may crash"


def test_a_module_that_another_thread_is_importing_is_not_imported_yet(tmp_path, monkeypatch):
    (tmp_path / "slowly_imported.py").write_text("import kit_gate\nkit_gate.reached()\nname = 1\n")
    begun, goes_on = threading.Event(), threading.Event()
    gate = types.ModuleType("kit_gate")
    gate.reached = lambda: (begun.set(), goes_on.wait(60))
    monkeypatch.setitem(sys.modules, "kit_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("slowly_imported") is None
    importing = threading.Thread(target=importlib.import_module, args=["slowly_imported"])
    importing.start()
    try:
        assert begun.wait(60)
        assert not hasattr(sys.modules["slowly_imported"], "name")
        assert imported("slowly_imported") is None
    finally:
        goes_on.set()
        importing.join()
    assert imported("slowly_imported").name == 1
    del sys.modules["slowly_imported"]


def test_modules_of_other_packages_are_looked_up_by_imported():
    folder = Path(snapstore.__file__).parent
    for file in (file for file in folder.rglob("*.py") if file != folder / "threads.py"):
        found = re.findall(r"sys\.modules\.get\(.torch|in sys\.modules", file.read_text())
        assert not found, f"{file}: {found}: take threads.imported: another thread may be importing it"


FORKS = """
import _thread, os, signal, sys, threading
at, hooks, register = int(sys.argv[1]), 0, os.register_at_fork

def counted(**given):
    global hooks
    if "after_in_child" in given:
        if hooks == at:
            register(after_in_child=_thread.interrupt_main)  # written in C: the signal strikes the hook after it
        hooks += 1
    register(**given)

os.register_at_fork = counted
from snapstore import threads
from snapstore.catalog.lmdb_file import Environment
from snapstore.storage import locks
from snapstore.storage.s3 import deadline

os.register_at_fork = register
signal.alarm(60)  # the script must not hang
held, forked = threading.Event(), threading.Event()

def hold():
    with Environment._open_lock:
        held.set()
        forked.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
fd, watchdog = locks._open_tracked(sys.argv[2]), deadline._watchdog
sys.unraisablehook = lambda error: None
try:
    child = os.fork()
except KeyboardInterrupt:  # no hook was in Python
    child = 0
if child:
    forked.set()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
problems = []
try:
    os.fstat(fd)
    problems.append("a locked file is open")
except OSError:
    pass
if deadline._watchdog is watchdog:
    problems.append("deadlines have no thread")

def take():
    for lock in locks._FORK_LOCK, Environment._open_lock, threads._preparing:
        if not lock.acquire(timeout=1):
            problems.append("a lock is held")

thread = threading.Thread(target=take)
thread.start()
thread.join()
os.write(1, f"{hooks} hooks {problems}".encode())
os._exit(0)
"""


@pytest.mark.slow
def test_a_signal_that_strikes_a_child_as_it_begins_leaves_it_no_lock(tmp_path):
    """The signal comes before each hook in turn, and its handler raises; Python then goes on without that hook."""
    count = at = 0
    while at <= count:
        done = run_python("-c", FORKS, at, tmp_path / "lock")
        found, _, problems = done.stdout.partition(" hooks ")
        assert (done.returncode, problems) == (0, "[]"), (at, done.stdout, done.stderr)
        count, at = int(found), at + 1
    assert count > 3


def test_a_signal_that_ends_the_wait_for_a_fork_harms_no_thread():
    """The fork goes on without the lock; the thread that has it keeps it, and the child gets a new one."""
    script = """
import os, signal, sys, threading, time
from snapstore import threads
from snapstore.storage import locks
signal.alarm(60)
lock = {"decoders": threads._preparing, "files": locks._FORK_LOCK}[sys.argv[1]]
held, forked, errors = threading.Event(), threading.Event(), []

def hold():
    try:
        with lock:
            held.set()
            forked.wait()
    except RuntimeError as error:
        errors.append(error)

def strike(*_):
    raise KeyboardInterrupt

thread = threading.Thread(target=hold)
thread.start()
held.wait()
sys.unraisablehook = lambda error: None
signal.signal(signal.SIGALRM, strike)
signal.setitimer(signal.ITIMER_REAL, 0.2)
child = os.fork()
if child == 0:
    got = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=1)))
    thread.start()
    thread.join()
    os._exit(0 if got == [True] else 1)
status = os.waitpid(child, 0)[1]
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(status), errors)
"""
    for lock in "decoders", "files":
        done = run_python("-c", script, lock)
        assert (done.returncode, done.stdout) == (0, "0 []\n"), (lock, done.stdout, done.stderr)


def test_a_fork_in_a_signal_handler_waits_for_no_lock_of_its_own_thread():
    script = """
import os, signal
from snapstore import threads
from snapstore.storage import locks
signal.alarm(20)  # the script must not hang
for lock in threads._preparing, locks._FORK_LOCK:
    with lock:
        child = os.fork()
    if child == 0:  # it has left the code that the signal interrupted
        os._exit(lock._is_owned())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")


def test_a_signal_handler_that_decodes_while_its_thread_makes_a_decoder(monkeypatch):
    """It gets an error: waiting would deadlock, and msgspec alone would crash."""

    class Kind:
        pass

    monkeypatch.setattr(msgspec.msgpack, "Decoder", lambda kind: msgpack_decoder(kind))
    with pytest.raises(InvalidInputError, match="signal handler"):
        msgpack_decoder(Kind)


def test_garbage_collection_is_allowed_again_whatever_the_order(monkeypatch):
    """A second thread finds it disabled; before that one goes on, the first has ended."""
    first = without_gc()
    first.__enter__()
    real = gc.isenabled

    def isenabled():
        found = real()
        if not found and threads_module._preventing:
            first.__exit__(None, None, None)
        return found

    monkeypatch.setattr(gc, "isenabled", isenabled)
    with without_gc():
        pass
    assert real()


def test_whether_work_is_done_is_known_without_a_lock():
    """A fork may leave the lock of an event locked in the child."""
    with Threads(1) as pool:
        pending = pool.start(str, [1])
        pending()
        with pending._done._cond:
            found = []
            asking = threading.Thread(target=lambda: found.append(pending.is_done()), daemon=True)
            asking.start()
            asking.join(10)
            assert found == [True]
