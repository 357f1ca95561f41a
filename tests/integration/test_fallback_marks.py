"""What a restore with fallback leaves behind: marks in the index, notes of quarantine, and whom they keep from what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from kit import mirrored
from kit.damage import encoded_wrongly
from kit.fallbacks import (
    STEPS,
    blank,
    damaged_newest,
    local,
    needs,
    notes,
    opened_by,
    own_blob,
    require_version,
    saved,
    state_of,
)
from kit.faults import FaultStore
from kit.objects import clone, flip, keys_of, replace
from kit.ranks import small_boxes
from kit.repositories import OPTIONS, created_like, index_of, opened, same
from kit.shell import invoke
from snapstore import (
    InvalidInputError,
    KeepLast,
    Repository,
    SaveOptions,
    Skipped,
    SnapshotManager,
)
from snapstore.catalog.pages import PageReader
from snapstore.format.keys import pack_key
from snapstore.storage.local import LocalStore


def verified(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[str], Skipped]:
    """Restore with fallback; return (the snapshot, the steps that were verified, what was skipped)."""
    tried: list[Any] = []
    read = PageReader.record
    with monkeypatch.context() as patch:
        patch.setattr(PageReader, "record", lambda *args: tried.append(read(*args)) or tried[-1])
        with SnapshotManager(folder, run="a", **options) as manager:
            snapshot = manager.restore_into(state := blank(state_of(0)), fallback=(skipped := Skipped()))
    require_version(state, snapshot.step)
    return snapshot, [one.step for one in tried], skipped


def test_the_next_restore_goes_directly_to_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = clone(saved(1))
    pack = damaged_newest(store)
    replace(store, needs(1)[1].snapshot.manifests[0].key, b"")
    folder = local(store, tmp_path / "r")
    snapshot, tried, _ = verified(folder, monkeypatch)
    assert (snapshot.step, tried) == (STEPS - 3, [STEPS - 1, STEPS - 2, STEPS - 3])
    assert notes(folder) == {pack: []}
    snapshot, tried, skipped = verified(folder, monkeypatch)
    assert (snapshot.step, tried) == (STEPS - 3, [STEPS - 3])
    assert [step for step, *_ in skipped.snapshots] == [STEPS - 1, STEPS - 2]
    assert all("marked in the index: " in why for *_, why in skipped.snapshots)
    with Repository.open(folder) as repository:  # the bytes are put back, and a check finds all whole
        for key in (pack, needs(1)[1].snapshot.manifests[0].key):
            replace(LocalStore(folder), key, saved(1).get(key))
        repository.check(level="metadata")
        assert len(repository.context.index.marks.packed()) == 2
        repository.rebuild_index()
        assert len(repository.context.index.marks.packed()) == 2  # a rebuild proves nothing
        repository.check(level="restore")
        assert repository.context.index.marks.packed() == {}
    assert verified(folder, monkeypatch)[0].step == STEPS - 1


def test_a_mark_never_makes_a_restore_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other snapshot is whole, those with a mark are tried again: the mark may be stale."""
    store = clone(saved(1))
    pack = damaged_newest(store)
    folder = local(store, tmp_path / "r")
    assert verified(folder, monkeypatch)[0].step == STEPS - 2
    replace(LocalStore(folder), pack, saved(1).get(pack))
    for one in needs(1)[1:]:
        replace(LocalStore(folder), one.snapshot.manifests[0].key, b"")
    snapshot, _, skipped = verified(folder, monkeypatch)
    assert snapshot.step == STEPS - 1
    assert STEPS - 1 not in [step for step, *_ in skipped.snapshots]


def test_a_read_only_manager_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = clone(saved(1))
    damaged_newest(store)
    folder = local(store, tmp_path / "r")
    before = keys_of(LocalStore(folder))
    assert verified(folder, monkeypatch, read_only=True)[0].step == STEPS - 2
    assert keys_of(LocalStore(folder)) == before
    assert verified(folder, monkeypatch, read_only=True)[1] == [STEPS - 2]  # the index has a mark


def test_a_store_that_refuses_notes_prevents_no_restore() -> None:
    store = clone(saved(1))
    pack = damaged_newest(store)
    refusing = FaultStore(store, 0, "full")
    with opened_by(refusing) as manager:
        assert manager.restore_into(blank(state_of(0)), fallback=True).step == STEPS - 2
        assert not [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]
        refusing.heal()
        manager.save(STEPS, state_of(STEPS - 1)).result()  # the same content as the damaged one
    with opened(store) as repository:
        assert pack_key_in(repository, f"a@{STEPS}") & {pack} == set()
        assert same(repository.restore(f"a@{STEPS}"), state_of(STEPS - 1))


def pack_key_in(repository: Repository, ref: str) -> set[str]:
    """Return the packs that a snapshot needs."""
    headers = repository.context.index.headers(repository.snapshot(ref).manifests)
    return {pack_key(name) for header in headers for name in header.pack_names}


def test_a_misbuilt_blob_is_named_in_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pack has its SHA-256: a repair that does not rebuild chunks must not release it."""
    options = SaveOptions(threads=1, pack_bytes=4096, verify_writes="off")
    with SnapshotManager(tmp_path / "r", run="a", options=options, async_save=False) as manager, small_boxes():
        manager.save(0, state_of(0))
        with encoded_wrongly():
            manager.save(1, state_of(1))
    assert verified(tmp_path / "r", monkeypatch)[0].step == 0
    (offsets,) = notes(tmp_path / "r").values()
    assert offsets
    with Repository.open(tmp_path / "r") as repository:
        repository.repair(apply=True)
    assert offsets in notes(tmp_path / "r").values()


@pytest.mark.parametrize("noted", [True, False])
def test_policies_count_no_damaged_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool) -> None:
    """KeepLast(1) keeps the newest whole one, known by a note or by a mark alone; so does a forget by hand."""
    store = clone(saved(1))
    damaged_newest(store)
    folder = local(store, tmp_path / "r")
    assert verified(folder, monkeypatch, read_only=not noted)[0].step == STEPS - 2
    assert bool(notes(folder)) == noted
    with Repository.open(folder) as repository:
        with pytest.raises(InvalidInputError, match="not known to be damaged"):
            repository.forget_snapshots([f"a@{STEPS - 2}"])
        repository.forget([KeepLast(1)], run="a")
        assert [s.step for s in repository.snapshots("a")] == [STEPS - 2, STEPS - 1]
        repository.gc()
        assert same(repository.restore(f"a@{STEPS - 2}"), state_of(STEPS - 2))


def test_the_training_goes_on(tmp_path: Path) -> None:
    """Train, lose the newest, fall back, train on, save the same steps again, restore the newest, check, repair."""
    folder = local(saved(1), tmp_path / "r")
    pack = own_blob(1)[0]
    flip(LocalStore(folder), pack, own_blob(1)[1] + 60, 4)
    with SnapshotManager(folder, run="a", options=OPTIONS, keep=[KeepLast(3)], async_save=False) as manager:
        whole = manager.restore_into(blank(state_of(0)), fallback=True)
        assert whole.step == STEPS - 2
        saved_again = [manager.save(step, state_of(step)).result() for step in (STEPS - 1, STEPS, STEPS + 1)]
        assert saved_again[0].parent == whole.id
        assert manager.latest_step() == STEPS + 1
        state = blank(state_of(0))
        assert manager.restore_into(state).step == STEPS + 1
        require_version(state, STEPS + 1)
        manager.restore_into(state, STEPS - 1)  # of the two, the new one
        require_version(state, STEPS - 1)
    with Repository.open(folder) as repository:
        result = repository.check(level="restore")
        assert {s.id for s in result.damaged} == {needs(1)[0].snapshot.id}
        assert {one.id for one in saved_again} <= {s.id for s in result.restorable}
        repository.repair(apply=True, drop=True, purge=True)
        repository.gc()
        assert repository.check(level="restore").damaged == []
        found = repository.snapshots("a")
        assert [s.step for s in found] == [STEPS - 1, STEPS - 1, STEPS, STEPS + 1]  # the damaged one was healed
        assert all(same(repository.restore(f"id:{s.id}"), state_of(s.step)) for s in found)
    assert notes(folder) == {}


# -- the index


def marked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Damage the newest snapshot of a local repository, and let a restore mark it; return its damaged pack."""
    store = clone(saved(1))
    pack = damaged_newest(store)
    assert verified(local(store, folder), monkeypatch, read_only=True)[0].step == STEPS - 2
    return pack


def marks_of(folder: Path) -> set[int]:
    """Return the steps with a mark, as a new process finds them."""
    with Repository.open(folder) as repository:
        index = repository.context.index
        return {s.step for s in repository.snapshots("a") if index.marks.why(s)}


def test_marks_survive_what_happens_to_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full and built again, removed while it is open, or rebuilt: the marks stay."""
    folder = tmp_path / "r"
    marked(folder, monkeypatch)
    assert marks_of(folder) == {STEPS - 1}
    with Repository.open(folder) as repository:
        index = repository.context.index
        put, full = type(index._environment).put, [True]

        def put_once_full(self: Any, items: Any) -> None:
            if full.pop() if full else False:
                raise lmdb.MapFullError("full")
            put(self, items)

        monkeypatch.setattr(type(index._environment), "put", put_once_full)
        repository.tag("a@0", "first")
        assert not full
    assert marks_of(folder) == {STEPS - 1}
    with Repository.open(folder) as repository:
        shutil.rmtree(index_of(folder))
        repository.tag("a@0", "second")
    assert marks_of(folder) == {STEPS - 1}
    with Repository.open(folder) as repository:
        repository.rebuild_index()
    assert marks_of(folder) == {STEPS - 1}


def test_a_mark_is_of_the_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new revision with the same manifests stays marked; one that is healed is marked no longer."""
    folder = tmp_path / "r"
    marked(folder, monkeypatch)
    with Repository.open(folder) as repository:
        repository.tag(f"a@{STEPS - 1}", "good")
    assert marks_of(folder) == {STEPS - 1}
    with Repository.open(folder) as repository:
        repository.save(state_of(STEPS - 1), run="twin", step=0)  # the same content once more
        repository.repair(apply=True)
    assert marks_of(folder) == set()
    assert verified(folder, monkeypatch)[0].step == STEPS - 1


def test_a_mark_that_does_not_decode_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "r"
    marked(folder, monkeypatch)
    with Repository.open(folder) as repository:
        index = repository.context.index
        index._environment.put({b"damaged": dict.fromkeys(index.marks.packed(), b"{")})
    assert marks_of(folder) == set()
    assert verified(folder, monkeypatch)[0].step == STEPS - 2


# -- a mirror, and the shell


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_the_mirror_comes_before_older_snapshots(how: str) -> None:
    """What the mirror has whole is copied back: nothing is skipped, and the next plain restore works."""
    fast, slow = clone(saved(1)), created_like(saved(1))
    with opened(fast) as repository:
        repository.copy(to=slow)
    damaged_newest(fast, how=how)
    skipped, state = Skipped(), blank(state_of(0))
    with mirrored.manager(fast, slow) as manager:
        assert manager.restore_into(state, fallback=skipped).step == STEPS - 1
        require_version(state, STEPS - 1)
        assert not skipped
        assert manager.restore_into(blank(state_of(0))).step == STEPS - 1
    with opened(slow) as repository:
        replace(slow, repository.snapshot(f"a@{STEPS - 1}").manifests[0].key, b"")
    damaged_newest(fast := clone(saved(1)), how=how)
    with mirrored.manager(fast, slow) as manager:  # both are damaged
        assert manager.restore_into(state, fallback=skipped).step == STEPS - 2
        assert [step for step, *_ in skipped.snapshots] == [STEPS - 1]


def test_the_shell_falls_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local(saved(1), tmp_path / "r")
    key, first, length = own_blob(1)
    flip(LocalStore(folder), key, first + length // 2, 4)
    env = {"SNAPSTORE_REPO": str(folder)}
    output = tmp_path / "out.pt"
    command = ["restore", "a@latest", "-o", str(output)]
    assert invoke(command, env).exit_code == 20
    done = invoke([*command, "--fallback"], env)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"skipped step {STEPS - 1} (id:{needs(1)[0].snapshot.id[:12]}): ")
    assert f"restored a@{STEPS - 2} " in done.stdout
    found, wanted = torch.load(output, weights_only=False), state_of(STEPS - 2)
    assert same(found["model"], wanted["model"])
    assert (found["version"], found["optimizer"]["noise"].numpy().tobytes()) == (
        STEPS - 2,
        wanted["optimizer"]["noise"].tobytes(),
    )
    assert list(notes(folder)) == [key]
    done = invoke([*command, "--fallback", "--force", "--json"], env)
    document = json.loads(done.stdout)
    assert document["snapshot"]["step"] == STEPS - 2
    assert [(one["step"], one["id"]) for one in document["skipped"]] == [(STEPS - 1, needs(1)[0].snapshot.id)]
    for ref in (f"a@{STEPS - 1}", f"id:{needs(1)[0].snapshot.id}", f"a@{STEPS - 3}"):
        document = json.loads(
            invoke(["restore", ref, "-o", str(output), "--fallback", "--force", "--json"], env).stdout
        )
        assert document["snapshot"]["step"] == STEPS - (3 if ref.endswith(str(STEPS - 3)) else 2)
    for one in needs(1):
        replace(LocalStore(folder), one.snapshot.manifests[0].key, b"")
    before = output.read_bytes()
    assert invoke([*command, "--fallback", "--force"], env).exit_code == 20
    assert output.read_bytes() == before


def test_the_shell_falls_back_to_an_older_folder(tmp_path: Path) -> None:
    env = {"SNAPSTORE_REPO": str(tmp_path / "r")}
    assert invoke(["init"], env).exit_code == 0
    for step in range(2):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / "file").write_bytes(np.random.default_rng(step).bytes(300_000))
        assert invoke(["save", str(tmp_path / "in"), "--run", "a", "--step", str(step)], env).exit_code == 0
    store = LocalStore(tmp_path / "r")
    with opened(tmp_path / "r") as repository:
        header = repository.context.index.header(repository.snapshot("a@1").manifests[-1])
    key = pack_key(header.pack_names[-1])
    flip(store, key, len(store.get(key)) // 2)
    done = invoke(["restore", "a@latest", "-o", str(tmp_path / "out"), "--fallback", "--json"], env)
    document = json.loads(done.stdout)
    assert (document["snapshot"]["step"], document["files"], len(document["skipped"])) == (0, 1, 1)
    assert (tmp_path / "out" / "file").read_bytes() == np.random.default_rng(0).bytes(300_000)
