"""No listing and no answer passes over a snapshot whose record is damaged, gone, or cannot be read for a moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kit.damage import refs, three, wound
from kit.faults import Unreadable
from kit.objects import clone, copy_objects, flip, keys_of
from kit.repositories import opened, save, snapshot_of
from kit.shell import invoke
from snapstore import IntegrityError, KeepLast, Repository, SnapshotManager
from snapstore.errors import StorageError
from snapstore.integrations.fsspec import SnapstoreFileSystem
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")

ERRORS = {"damaged": IntegrityError, "unread": StorageError, "gone": IntegrityError}
HOW = pytest.mark.parametrize("how", ERRORS)


@pytest.fixture
def store():
    return three()


@contextmanager
def harmed(store, ref: str, how: str) -> Iterator[tuple[Repository, str]]:
    """Open a copy of a repository in which the record of a snapshot is not known; yield it, and the record's key."""
    key = snapshot_of(store, ref).key
    inner = clone(store)
    if how == "damaged":
        flip(inner, key, 60)
    with opened(Unreadable(inner, key) if how == "unread" else inner) as found:
        if how == "gone":
            assert found.snapshot(ref).key == key  # so the index knows it
            inner.delete([key])
        yield found, key


def on_disk(path, store) -> LocalStore:
    """Return a repository on disk with the objects of a store, which the index of this machine knows."""
    disk = copy_objects(store, LocalStore(path, create=True))
    assert invoke(["--repo", str(path), "log"]).exit_code == 0
    return disk


def harm(disk: LocalStore, key: str, how: str) -> None:
    flip(disk, key, 60) if how == "damaged" else disk.delete([key])


# --- the manager


@HOW
def test_the_steps_of_a_run_may_include_one_whose_record_is_unknown(store, how):
    with harmed(store, "a@1", how) as (found, key):
        manager = SnapshotManager(found, run="a")
        for ask in (manager.all_steps, lambda: manager.has_step(1)):
            with pytest.raises(ERRORS[how], match=f"may be a@1 .*{key}"):
                ask()
        assert (manager.has_step(0), manager.has_step(7)) == (True, False)
        save(found, "a", 1, 5)
        assert manager.all_steps() == [0, 1, 2], "the step was saved again"


@HOW
def test_a_run_with_an_unknown_record_only_is_no_new_run(store, how):
    """Its next save would have the parent of a fork."""
    with opened(store) as found:
        save(found, "b", 7, 7)
    with harmed(store, "b@7", how) as (found, _):
        with pytest.raises(ERRORS[how], match=r"parent a@1 of a new run b: may be b@7 "):
            SnapshotManager(found, run="b", parent="a@1")
        SnapshotManager(found, run="b").close()
        save(found, "b", 8, 8)
        SnapshotManager(found, run="b", parent="a@1").close()  # no effect: the run has a snapshot
        assert found.snapshot("b@8").parent is None


# --- the parent of a save


@HOW
def test_a_save_says_that_its_parent_may_be_an_older_snapshot(store, how, caplog):
    with harmed(store, "a@2", how) as (found, key):
        first = save(found, "a", 3, 3)
        said = [record.message for record in caplog.records if "the parent of this save" in record.message]
        assert len(said) == 1
        assert key in said[0]
        assert first.parent == found.snapshot("a@1").id
        caplog.clear()
        assert save(found, "a", 4, 4).parent == first.id
        save(found, "b", 0, 50)
        assert "the parent of this save" not in caplog.text


@HOW
def test_a_copy_says_nothing_of_the_parent_of_a_save(store, how, caplog):
    """The first snapshot of a run has none."""
    target = MemoryStore()
    with opened(store) as source:
        source.copy(["a@1", "a@2"], to=target)
        with harmed(target, "a@2", how) as (found, _):
            assert refs(source.copy(["a@0"], to=found).copied) == {"a@0"}
            assert found.snapshot("a@0").parent is None
    assert "the parent of this" not in caplog.text


# --- lists of snapshots


@HOW
def test_a_list_of_snapshots_names_the_records_that_it_leaves_out_once(store, how, caplog):
    with opened(store) as found:
        save(found, "b", 0, 50)
    with harmed(store, "a@1", how) as (found, key):
        assert refs(found.snapshots("b")) == {"b@0"}
        assert not caplog.records
        assert refs(found.snapshots("a")) == {"a@0", "a@2"}
        assert refs(found.snapshots()) == {"a@0", "a@2", "b@0"}
        assert [record.message for record in caplog.records] == [
            f"{found.url}: left out snapshots whose records cannot be read or are gone; run 'snapstore check': {key}"
        ]


@HOW
def test_children_name_the_records_that_they_leave_out(store, how, caplog):
    with harmed(store, "a@1", how) as (found, key):
        assert found.children("a@0") == []
        assert f"run 'snapstore check': {key}" in caplog.text


@HOW
def test_a_run_whose_only_record_is_unknown_does_not_count_as_empty(store, how):
    with opened(store) as found:
        save(found, "b", 7, 7)
    with harmed(store, "b@7", how) as (found, _):
        with pytest.raises(ERRORS[how], match=r"run 'b': may be b@7 "):
            found.snapshots("b")
        assert found.snapshots("c") == []


# --- recode


@HOW
def test_a_recode_of_all_names_the_records_that_it_leaves_out(store, how):
    with harmed(store, "a@1", how) as (found, key):
        result = found.recode()
        assert (refs(result.skipped), list(result.unknown)) == ({"a@0", "a@2"}, [key])
        assert found.recode(["a@0"]).unknown == {}


def test_the_shell_names_a_record_that_recode_could_not_read_once(tmp_path, store, monkeypatch):
    """A later look can read it."""
    disk = on_disk(tmp_path / "r", store)
    key = snapshot_of(disk, "a@1").key
    flip(disk, key, 60)
    look, looks = Repository.view, []

    def once(self):
        looks.append(look(self))
        if len(looks) == 1:
            flip(disk, key, 60)  # it can be read again
        return looks[-1]

    monkeypatch.setattr(Repository, "view", once)
    said = invoke(["--repo", str(disk.root), "recode", "--all", "--json"])
    assert (said.exit_code, list(json.loads(said.stdout)["unknown"])) == (3, [key])
    assert f"left out 1 record, unreadable or gone: {key}" in said.stderr


# --- a record that cannot be read any more once a verb has begun


class Meanwhile(Unreadable):
    """Runs `act`, once, before an operation that `when(operation, key)` chooses; `act` returns keys that fail then."""

    def __init__(self, inner, when, act):
        super().__init__(inner)
        self.when, self.act = when, act

    def _act(self, name, key, effect):
        if self.act is not None and self.when(name, key):
            act, self.act = self.act, None
            with opened(self.inner) as other:
                self.bad.add(act(other))
        return super()._act(name, key, effect)


@pytest.mark.parametrize("verb", ["restore", "diff"])
def test_a_snapshot_that_was_rewritten_and_cannot_be_read_for_a_moment_is_not_called_damaged(store, verb):
    def compact(other):
        other.gc()
        assert "a@2" in refs(other.compact().rewritten)
        other.gc()
        return other.snapshot("a@2").key

    with opened(store) as found:
        save(found, "b", 0, 50)
        found.forget_snapshots(["a@0", "a@1"])
    faulty = Meanwhile(store, lambda name, key: name == "get_range" and key.startswith("packs/"), compact)
    with opened(faulty) as found:
        act = found.restore if verb == "restore" else lambda ref: found.diff(ref, "b@0")
        with pytest.raises(StorageError, match=r"a@2: may be a@2 .*whose record cannot be read: .*Input/output error"):
            act("a@2")
        faulty.bad.clear()
        act("a@2")


# --- forget


@HOW
@pytest.mark.parametrize("dry_run", [True, False])
def test_forget_names_the_records_that_its_policies_do_not_count(store, how, dry_run):
    with opened(store) as found:
        save(found, "b", 0, 50)
    with harmed(store, "a@2", how) as (found, key):
        result = found.forget([KeepLast(1)], run="a", dry_run=dry_run)
        assert (refs(result.forgotten), list(result.unknown)) == ({"a@0"}, [key])
        assert found.forget([KeepLast(1)], run="b", dry_run=dry_run).unknown == {}


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_the_shell_says_which_records_forget_and_show_did_not_count(tmp_path, store, how):
    disk = on_disk(tmp_path / "r", store)
    forget = ["--repo", str(disk.root), "forget", "--run", "a", "--keep-last", "3", "-n"]
    show = ["--repo", str(disk.root), "show", "a@0"]
    key = snapshot_of(disk, "a@1").key
    assert invoke(forget).exit_code == invoke(show).exit_code == 0
    harm(disk, key, how)
    for command in (forget, show):
        said = invoke(command)
        assert (said.exit_code, f"left out 1 record, unreadable or gone: {key}" in said.stderr) == (3, True)
    assert json.loads(invoke(["--json", *forget]).stdout)["unknown"].keys() == {key}
    assert "children  none" in invoke(show).stdout  # a@1 is one


# --- log and show


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_log_does_not_call_a_snapshot_not_mirrored_whose_record_in_the_mirror_is_unknown(tmp_path, store, how):
    disk, slow = on_disk(tmp_path / "r", store), MemoryStore()
    with opened(disk) as found:
        found.copy(["a@0", "a@1"], to=slow)
        ids = [found.snapshot(f"a@{step}").id for step in range(3)]
    slow = on_disk(tmp_path / "slow", slow)
    command = ["--repo", str(disk.root), "log", "--mirror", str(slow.root)]
    assert invoke(command).exit_code == 0
    harm(slow, max(key for key in keys_of(slow, "snapshots/") if ids[1] in key), how)
    said = invoke(command)
    assert said.exit_code == 3
    assert [line.split()[0] for line in said.stdout.splitlines() if "not mirrored" in line] == ["a@2"]
    assert [line.split()[0] for line in said.stdout.splitlines() if "mirror unknown" in line] == ["a@1"]
    assert f"{slow.root}: 1 record of these snapshots unreadable or gone" in said.stderr
    document = json.loads(invoke(["--json", *command]).stdout)
    assert (document["not_mirrored"], document["mirror_unknown"]) == ([ids[2]], [ids[1]])


# --- fsspec


@HOW
def test_no_path_of_an_unknown_snapshot_is_not_there(store, how, caplog, monkeypatch):
    with harmed(store, "a@1", how) as (found, key):
        files = SnapstoreFileSystem(repository="memory", skip_instance_cache=True)
        monkeypatch.setattr(SnapstoreFileSystem, "repository", found)
        assert files.ls("", detail=False) == ["a@0", "a@2"]
        assert caplog.text.count(f"run 'snapstore check': {key}") == 1
        assert len(files.glob("a@*/all.safetensors")) == 2
        asks = (files.info, files.ls, files.exists, files.isdir, files.isfile, files.glob, files.find, files.cat)
        for path in ("a@1", "a@1/all.safetensors"):
            for ask in asks:
                with pytest.raises(ERRORS[how], match="may be a@1 "):
                    ask(path)
        with pytest.raises(ERRORS[how], match="may be a@1 "):
            files.glob("a@1/*")
        for path in ("a@7", "a@0/none.safetensors", "c@1"):
            assert not any(ask(path) for ask in (files.exists, files.isdir, files.isfile, files.glob, files.find))
        assert files.isfile("a@0/all.safetensors")
        assert files.isdir("a@0")


# --- the error of a damaged snapshot


@HOW
@pytest.mark.parametrize("ref", ["b@1", "b@0"])
def test_the_newest_whole_snapshot_may_be_one_whose_record_is_unknown(store, how, ref):
    with opened(store) as found:
        for step in range(3):
            found.save({"w": np.random.default_rng(step).integers(0, 255, 8192, np.uint8)}, run="b", step=step)
    wound(store, "b@2")
    with harmed(store, ref, how) as (found, _):
        besides = rf"besides {ref}, whose records cannot be read or are gone, is b@{1 - int(ref[-1])} "
        with pytest.raises(IntegrityError, match=f"the newest whole snapshot of run 'b', {besides}"):
            found.restore("id:" + found.snapshot("b@2").id)
    wound(store, "b@1")
    with harmed(store, "b@0", how) as (found, _):
        said = "no older snapshot of run 'b', besides b@0, whose records cannot be read or are gone, is whole"
        with pytest.raises(IntegrityError, match=said):
            found.restore("b@2")
