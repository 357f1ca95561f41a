"""docs/design/walk.md names the functions that a save, restore, forget and gc really call, in that order."""

import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.chunks.reader import ChunkReader
from snapstore.chunks.uploader import PackUploader
from snapstore.engine.cpu import CpuEngine
from snapstore.storage.kept_open import KeptOpen
from snapstore.storage.local import LocalStore

WALK = Path(__file__).parents[2] / "docs/design/walk.md"
MOST_FRAMES_OF_A_SAVE = 16


def sections():
    """Return section title -> the functions of its table, in order."""
    found = {}
    for section in WALK.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found[title] = re.findall(r"^\| \d+ \| `([^`]+)` \|", text, re.MULTILINE)
    return found


def stack():
    """Return the functions of snapstore on the call stack of this thread, the outermost first."""
    frame, names = sys._getframe(2), []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("snapstore."):
            names.append(f"{module.removeprefix('snapstore.')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names[::-1]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """Run a save, a restore, a forget and a gc; return function -> the stacks of its calls, verb -> its calls."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return recorded(monkeypatch, tmp_path_factory.mktemp("walk"))


def recorded(monkeypatch, folder):
    found = {}

    def watch(owner, name):
        original = getattr(owner, name)
        full = f"{owner.__module__.removeprefix('snapstore.')}.{owner.__qualname__}.{name}"

        def watched(*args, **kwargs):
            found.setdefault(full, []).append([*stack(), full])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (SnapshotManager, "_run"), (PackUploader, "seal"), (LocalStore, "put"), (LocalStore, "delete"),
        (KeptOpen, "get_ranges"), (ChunkReader, "_read"),
    ):  # fmt: skip
        watch(owner, name)
    monkeypatch.setattr(CpuEngine, "batch_bytes", 1 << 18)  # so the tensor takes several
    Repository.create(folder, chunk_bytes=4096).close()
    begin = SnapshotManager._begin
    monkeypatch.setattr(
        SnapshotManager, "_begin", lambda *args: (found.setdefault("begin", []).append(stack()), begin(*args))[1]
    )
    with SnapshotManager(folder, run="a", options=SaveOptions(pack_bytes=65536, threads=1)) as snapshots:
        snapshots.save(0, {"w": np.random.default_rng(0).integers(0, 2**31, 200_000)})
        snapshots.wait_until_finished()
        snapshots.restore(0)
        snapshots.save(1, {"w": np.zeros(3)})
        snapshots.wait_until_finished()
        with order_of_calls(found.setdefault("forget", [])):
            snapshots.repository.forget(KeepLast(1), run="a")
        with order_of_calls(found.setdefault("gc", [])):
            snapshots.repository.gc()
    return found


@contextmanager
def order_of_calls(names):
    """Append each function of snapstore that this thread or a new one calls, once, in the order of the first calls."""

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("snapstore."):
            name = f"{module.removeprefix('snapstore.')}.{frame.f_code.co_qualname}"
            if name not in names:
                names.append(name)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


WRAPPERS = ("protocol.same_repository.pinned.<locals>.call", "threads._Team.run", "threads.Pending.compute")


def steps(stacks):
    """Return the stacks without decorators and without the thread pool: the steps that a reader of the code sees."""
    return [[name for name in names if name not in WRAPPERS] for names in stacks]


def test_a_tensor_through_save(stacks):
    """The table has the frames of the caller's thread, then of the save's thread, then of the uploader's."""
    walk = sections()["A tensor through save"]
    assert len(walk) <= MOST_FRAMES_OF_A_SAVE
    assert [*stacks["begin"][0], "manager.SnapshotManager._begin"] == walk[:2]
    seal = walk.index("chunks.uploader.PackUploader.seal")
    assert walk[2 : seal + 1] in stacks["chunks.uploader.PackUploader.seal"]
    assert walk[seal + 1 :] in steps(stacks["storage.local.LocalStore.put"])


def test_the_commit(stacks):
    walk = sections()["The commit"]
    assert any(names[-len(walk) :] == walk for names in stacks["storage.local.LocalStore.put"])


def test_a_tensor_through_restore(stacks):
    walk = sections()["A tensor through restore"]
    begun = walk.index("chunks.reader.ChunkReader._read") + 1
    assert walk[:begun] in stacks["chunks.reader.ChunkReader._read"]
    assert walk[begun:] in steps(stacks["storage.kept_open.KeptOpen.get_ranges"])


def test_a_pack_through_gc(stacks):
    walk = sections()["A pack through gc"]
    assert walk in steps(stacks["storage.local.LocalStore.delete"])


@pytest.mark.parametrize(("verb", "title"), [("forget", "A record through forget"), ("gc", "The steps of gc")])
def test_the_steps_are_called_in_this_order(stacks, verb, title):
    walk = sections()[title]
    called = [name for name in stacks[verb] if name in walk]
    assert called == walk


def test_other_names_exist():
    """Every dotted name in the page is a module, a class or a function of snapstore."""
    import importlib

    for name in set(re.findall(r"`((?:[a-z_]+\.)+[\w.]+)`", WALK.read_text())):
        parts = name.partition(".<locals>")[0].split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(["snapstore", *parts[:cut]]))
            except ImportError as error:
                if (error.name or "").startswith("snapstore"):
                    continue
                break  # a package for the GPU is missing
            for part in parts[cut:]:
                found = getattr(found, part)
            break
        else:
            pytest.fail(f"{name}: no module of snapstore")
