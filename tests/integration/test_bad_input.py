"""Bad input gets a clear error of the right class, and loses nothing."""

from __future__ import annotations

import copy
import enum
import inspect
import itertools
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import snapstore
from kit.objects import keys_of
from kit.repositories import OPTIONS, check_clean, check_restores, check_whole, index_of, opened, save, snapshot_of
from snapstore import (
    AlreadyExistsError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepLast,
    KeepSteps,
    NotFoundError,
    Repository,
    SaveOptions,
    SnapshotManager,
    SnapstoreError,
    UnsupportedLeafError,
)
from snapstore.format import records
from snapstore.format.records import Config, Mark, RunPolicies
from snapstore.storage.local import LocalStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bad") / "r"
    with Repository.create(root, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(4):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        save(repository, "b", 0, 60, full=True)
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    """Copy the repository, and make its index."""
    with Repository.open(shutil.copytree(made, tmp_path / "r")) as repository:
        repository.view()
    return tmp_path / "r"


@pytest.fixture
def repository(root):
    with opened(root) as repository:
        before = objects_of(root)
        yield repository
        assert objects_of(root) == before, "a refused call has written something"
        check_restores(repository, level="metadata")  # the stored bytes are those of before


def objects_of(root: Path) -> dict[str, bytes]:
    store = LocalStore(root)
    return {key: store.get(key) for key in keys_of(store)}


# --- references, names, numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "error", "message"),
    [
        ("a@9", NotFoundError, "last steps: 0, 1, 2, 3"),
        ("a@nothing", NotFoundError, "tags: good"),
        ("z@0", NotFoundError, "runs: a, b"),
        ("z@latest", NotFoundError, "no run 'z'"),
        ("id:ffffffffffffffffffffffffffffffff", NotFoundError, "no snapshot whose id"),
        ("a@" + "9" * 5000, NotFoundError, "no such step"),
        ("a@-1", NotFoundError, "no such step"),
        ("a@1.0", NotFoundError, "no such step"),
        ("a", InvalidInputError, "expected run@step"),
        ("", InvalidInputError, "expected run@step"),
        ("@3", InvalidInputError, "expected run@step"),
        ("a@", InvalidInputError, "expected run@step"),
        ("id:", InvalidInputError, "hexadecimal"),
        ("id:xyz", InvalidInputError, "hexadecimal"),
        ("../../etc@0", NotFoundError, "no run"),
        (3, InvalidInputError, "expected a str"),
        (None, InvalidInputError, "expected a str"),
        (b"a@0", InvalidInputError, "expected a str"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_references(repository, ref, error, message):
    calls = [repository.snapshot, repository.restore, repository.children, repository.unforget]
    calls.append(lambda ref: repository.tag(ref, "new"))
    calls.append(lambda ref: repository.untag(ref, "good"))
    calls.append(lambda ref: repository.forget_snapshots([ref]))
    calls.append(lambda ref: repository.diff("a@0", ref))
    if ref:
        calls.append(lambda ref: save(repository, "a", 4, 4, bases=[ref]))
        calls.append(lambda ref: save(repository, "a", 4, 4, parent=ref))
    for call in calls:
        with pytest.raises(error, match=message):
            call(ref)


def test_the_error_of_an_unknown_step_names_each_step_once(tmp_path):
    """Here a run has gone back twice: ten saves of its newest steps are not its last ten steps."""
    with Repository.create(tmp_path / "r") as repository:
        for step in [*range(5), *range(2, 8), *range(2, 8)]:
            repository.save({"v": step}, run="a", step=step)
        with pytest.raises(NotFoundError, match=r"last steps: 0, 1, 2, 3, 4, 5, 6, 7; tags: none$"):
            repository.restore("a@9")


def test_ids_are_taken_as_they_are_printed(root):
    """They work with and without `id:`; fewer than 8 digits without it may be meant as a step, and name no snapshot."""
    with opened(root) as repository:
        first = repository.snapshot("a@0")
        for ref in (f"id:{first.id[:12]}", first.id[:8], first.id[:12].upper(), first.id):
            assert repository.snapshot(ref).id == first.id
            assert repository.diff(ref, "a@1").a.id == first.id
        assert save(repository, "b", 1, 9, parent=first.id[:8]).parent == first.id
        with pytest.raises(InvalidInputError, match="or an id"):
            repository.snapshot(first.id[:7])
        with pytest.raises(NotFoundError, match="no snapshot whose id starts with"):
            repository.snapshot(("0" if first.id[0] != "0" else "1") * 8)
        repository.forget_snapshots([first.id[:8]])
        again = save(repository, "a", 0, 8)
        with pytest.raises(InvalidInputError, match="is not forgotten"):
            repository.unforget(again.id[:8])
        assert repository.unforget(first.id[:8]).id == first.id


def test_an_ambiguous_id(root, monkeypatch):
    new_id = records.new_id
    monkeypatch.setattr(records, "new_id", lambda: f"abc{new_id()[3:]}")
    with opened(root) as repository:
        first, second = (save(repository, "b", step, 9).id for step in (1, 2))
        assert first[:3] == second[:3] == "abc"
        with pytest.raises(InvalidInputError, match="ambiguous"):
            repository.snapshot("id:abc")
        assert repository.snapshot(f"id:{first.upper()}").id == first


NAMES = ["a/b", "../a", ".hidden", "-rf", "", " ", "a b", "é", "日本", "a\n", "a\0", "x" * 129, "x" * 300, "a@b"]
NOT_EVEN_STR = [3, None, b"a"]


@pytest.mark.parametrize("name", [*NAMES, *NOT_EVEN_STR], ids=lambda name: repr(name)[:12])
def test_names_of_runs_and_tags(repository, name):
    for call in (
        lambda: repository.save({"n": 1}, run=name, step=0),
        lambda: save(repository, "a", 4, 4, tags=[name]),
        lambda: repository.tag("a@0", name),
        lambda: repository.set_policies(name, [KeepLast(1)]),
    ):
        with pytest.raises(InvalidInputError, match="expected 1 to 128 characters"):
            call()
    with pytest.raises((InvalidInputError, NotFoundError)):
        repository.forget([KeepLast(1)], run=name)


@pytest.mark.parametrize("name", ["a.b", "a..b", "a-1", "0", "x" * 128, "a.0", "A_b.c-d"])
def test_names_that_are_fine(root, name):
    with opened(root) as repository:
        save(repository, name, 0, 5)
        repository.set_policies(name, [KeepLast(7)])
        repository.set_policies("a", [KeepLast(2)])
        assert repository.policies(name) == [KeepLast(7)]
        assert repository.snapshot(f"{name}@latest").run == name
        check_restores(repository)


@pytest.mark.parametrize("tag", ["latest", "0", "123"])
def test_tags_that_a_reference_could_not_tell(repository, tag):
    with pytest.raises(InvalidInputError, match="reads as a step number"):
        repository.tag("a@0", tag)
    with pytest.raises(InvalidInputError, match="reads as a step number"):
        save(repository, "a", 4, 4, tags=[tag])


@pytest.mark.parametrize("given", ["a@1", 5, None])
def test_lists_that_are_one_str_or_no_list(repository, given):
    for name in ("tags", "bases"):
        with pytest.raises(InvalidInputError, match=f"{name} {given!r}: expected a list of str, got"):
            save(repository, "a", 4, 4, **{name: given})
    with pytest.raises(InvalidInputError, match=f"refs {given!r}: expected a list of str, got"):
        repository.forget_snapshots(given)


@pytest.mark.parametrize(
    "step", [-1, 10**12, 10**100, True, False, 1.0, 1.5, float("nan"), "3", None, [1], np.float32(1)]
)
def test_steps(repository, step):
    with pytest.raises(InvalidInputError, match="step"):
        save(repository, "a", step, 0)
    manager = SnapshotManager(repository, run="a", read_only=True)
    with pytest.raises(InvalidInputError, match="step"):  # a program that gets False starts at step 0
        manager.has_step(step)


def test_steps_that_are_fine(root):
    with opened(root) as repository:
        for step in (10**12 - 1, np.int64(7), np.uint8(9)):
            assert save(repository, "c", step, 1).step == int(step)
        assert repository.snapshot(f"c@{10**12 - 1}").step == 10**12 - 1
        assert repository.snapshot("c@007").step == 7
        check_restores(repository)


@pytest.mark.parametrize(
    "metrics", [{"x": "high"}, {"x": None}, {"x": 10**400}, {"x": 1j}, {"x": [1]}, [("x", 1)], "x", {"\ud800": 1.0}]
)
def test_metrics(repository, metrics):
    with pytest.raises(InvalidInputError, match="metric"):
        save(repository, "a", 4, 4, metrics=metrics)


def test_leaves_of_unknown_types_are_named_by_their_paths(repository):
    with pytest.raises(UnsupportedLeafError, match=r"optimizer\.state\.3"):
        repository.save({"optimizer": {"state": [1, 2, 3, object()]}}, run="a", step=4)
    with pytest.raises(UnsupportedLeafError) as raised:
        repository.save({"n": 1}, run="a", step=4, metadata={"n": object(), "x": [object()]})
    assert [line.partition(": object")[0] for line in raised.value.args] == ["metadata: n", "metadata: x.0"]


TAGS = [f"t{number:0127d}" for number in range(8100)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("metrics", {"x" * (65 << 20): 1.0}), ("metrics", dict.fromkeys(range(200_000), 0)), ("tags", TAGS)],
    ids=["a long name", "many metrics", "many tags"],
)
def test_a_record_that_readers_would_refuse_is_not_begun(repository, field, value):
    said = rf"{field}: \d+ bytes, expected at most {records.MAX_FIELD_BYTES}; "
    with pytest.raises(InvalidInputError, match=said):
        save(repository, "a", 4, 4, **{field: value})
    with pytest.raises(InvalidInputError, match="at most"):
        repository.save({"n": 1}, run="a", step=4, metadata=["x" * 3000] * 1000)


def test_a_record_does_not_grow_by_tags_until_readers_refuse_it(root):
    """Each revision has all tags of the one before."""
    with opened(root) as repository:
        fits = save(repository, "a", 4, 4, tags=TAGS[:8065])
        with pytest.raises(InvalidInputError, match=r"^tags: 1048\d+ bytes, .*1048576; remove some"):
            repository.tag("a@4", "z" * 128)
        repository.rebuild_index()  # as another host sees it
        assert repository.snapshot("a@4").tags == fits.tags
        repository.untag("a@4", TAGS[0])
        assert "z" in repository.tag("a@4", "z").tags
        check_restores(repository)


def test_the_same_step_twice(root):
    with opened(root) as repository:
        first = repository.snapshot("a@2")
        second = save(repository, "a", 2, 22)
        assert second.seq > first.seq
        assert repository.snapshot("a@2").id == second.id == repository.snapshot("a@latest").id
        assert repository.restore("a@2")["version"] == 22
        assert repository.restore(f"id:{first.id}")["version"] == 2
        assert repository.view().superseded() == {first.id}
        check_restores(repository)


@pytest.mark.parametrize("keep", [[], [KeepSteps([77])], [KeepBest("unknown")]])
def test_a_policy_that_keeps_nothing(repository, keep):
    with pytest.raises(InvalidInputError, match=r"keep none|no policy"):
        repository.forget(keep, run="a")
    with pytest.raises(InvalidInputError, match="keep none of the steps of run b, which has 1 step; "):
        repository.forget([KeepSteps([77])], run="b")
    assert len(repository.forget(keep, run="a", dry_run=True, force=True).kept) == 2  # the tagged one and the newest


def test_one_policy_is_a_list_of_one(root):
    with opened(root) as repository:
        repository.set_policies("a", KeepLast(2))
        assert repository.policies("a") == [KeepLast(2)]
        assert len(repository.forget(KeepLast(1), run="a").kept) == 2  # the tagged one as well
        with SnapshotManager(repository, run="a", keep=KeepLast(3)) as snapshots:
            assert snapshots.keep == repository.policies("a") == [KeepLast(3)]


@pytest.mark.parametrize("keep", [3, ["KeepLast(1)"], [3], "KeepLast", KeepLast, [KeepLast]])
def test_policies_that_are_none(repository, keep):
    with pytest.raises(InvalidInputError, match="expected"):
        repository.forget(keep, run="a")


def test_forget_and_unforget_of_the_wrong_ones(repository):
    with pytest.raises(InvalidInputError, match="tagged good"):
        repository.forget_snapshots(["a@0", "a@1"])
    with pytest.raises(InvalidInputError, match="not forgotten"):
        repository.unforget("a@0")
    with pytest.raises(NotFoundError, match="no tag 'best'"):
        repository.untag("a@1", "best")
    with pytest.raises(InvalidInputError, match="newest of its run"):
        repository.forget_snapshots(["b@0"])


def test_forget_by_name(root):
    with opened(root) as repository:
        refs = ["a@0", f"id:{repository.snapshot('a@0').id}"]  # one snapshot, which is forgotten once
        for dry_run in (True, False):
            assert [s.step for s in repository.forget_snapshots(refs, dry_run=dry_run).forgotten] == [0]
        with pytest.raises(InvalidInputError, match="unforget"):
            repository.tag("a@0", "x")
        assert repository.restore("a@0")["version"] == 0
        repository.gc()
        with pytest.raises(NotFoundError):
            repository.restore("a@0")
        assert repository.forget_snapshots(["b@0"], force=True).forgotten  # the newest of its run
        assert not repository.snapshots("b")


BAD_COSTS = [{"restore_cost": value} for value in (0.9, 101, float("nan"), "3", True, None)]
NO_INTS = [{"threads": "x"}, {"pack_bytes": "1"}, {"threads": True}]


@pytest.mark.parametrize("options", [*BAD_COSTS, {"pack_bytes": 1}, {"threads": 0}, *NO_INTS])
def test_options(options):
    with pytest.raises(InvalidInputError, match="expected an int" if options in NO_INTS else None):
        SaveOptions(**options)


@pytest.mark.parametrize("chunk_bytes", [0, -16, 17, 48 + 1, 2**40, 1.5, "1024", None, True])
def test_chunk_sizes(tmp_path, chunk_bytes):
    with pytest.raises(InvalidInputError, match="chunk size"):
        Repository.create(tmp_path / "new", chunk_bytes=chunk_bytes)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("like", ["x", "", {}, 1])
def test_a_repository_like_something_else(tmp_path, like):
    for make in (Repository.create, Repository.open_or_create):
        with pytest.raises(InvalidInputError, match=f"like {like!r}: expected an open Repository, got "):
            make(tmp_path / "new", like=like)
    assert not any(tmp_path.iterdir())


ENVIRONMENT = [
    *(("SNAPSTORE_THREADS", value) for value in ("0", "-1", "many", "1.5", "", "99999")),
    *(("SNAPSTORE_CACHE_DIR", value) for value in ("", "relative", "~nobody-here/cache")),
]


@pytest.mark.parametrize(("name", "value"), ENVIRONMENT)
def test_environment(root, tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for call in (partial(Repository.open, root), partial(Repository.create, tmp_path / "new")):
        with pytest.raises(InvalidInputError, match=name):
            call()


# --- places ----------------------------------------------------------------------------------------------------------


def test_places_that_are_no_repository(tmp_path):
    with pytest.raises(NotFoundError, match="found none"):
        Repository.open(tmp_path / "missing")
    with pytest.raises(NotFoundError, match="no snapstore repository"):
        Repository.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="expected a directory"):
        Repository.open(tmp_path / "file")
    with pytest.raises(SnapstoreError):
        Repository.create(tmp_path / "file")
    with pytest.raises(InvalidInputError, match="not empty"):
        Repository.create(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
    with pytest.raises(InvalidInputError, match="unknown scheme"):
        Repository.open("ftp://x/y")


def test_a_folder_with_a_tmp_of_another_program_is_not_taken(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInputError, match="not empty"):
        Repository.create(tmp_path)
    assert (tmp_path / "tmp" / "thesis.tex").exists()


def test_create_twice(root):
    before = keys_of(LocalStore(root))
    with pytest.raises(AlreadyExistsError, match="open it instead"):
        Repository.create(root)
    assert keys_of(LocalStore(root)) == before


def rewrite(root: Path, key: str, data: bytes) -> None:
    (root / key).unlink(missing_ok=True)
    LocalStore(root).put(key, data)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2, "writer": "snapstore 9.0"}, FormatError, r"version 2 .*use snapstore 9\.0 or newer"),
        ({"features": ["erasure"]}, FormatError, "erasure"),
        ({"chunk_bytes": 17}, FormatError, "chunk size"),
        ({"chunk_bytes": 2**50}, FormatError, "chunk size"),
        ({"uuid": "../../../home"}, FormatError, "uuid"),
    ],
)
def test_configs_of_another_kind(root, change, error, message):
    store = LocalStore(root)
    config = records.decode(store.get("config"), Config, "config")
    rewrite(root, "config", records.encode(msgspec.structs.replace(config, **change)))
    with pytest.raises(error, match=message):
        Repository.open(root)
    rewrite(root, "config", records.encode(config))
    check_whole(store)


def test_a_config_of_a_newer_envelope(root):
    data = bytearray((root / "config").read_bytes())
    data[5], data[16:24] = 2, b"another!"  # its checksum may be of another kind
    rewrite(root, "config", data)
    for damaged in (False, True):
        with pytest.raises(FormatError, match="version 2"):
            Repository.open(root, damaged=damaged)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "deleted", "record"])
def test_a_damaged_config(root, how):
    data = (root / "config").read_bytes()
    if how == "record":
        (record,) = (root / "snapshots" / "b").iterdir()
        rewrite(root, "config", record.read_bytes())
    else:
        damage(root / "config", how)
    with pytest.raises({"deleted": NotFoundError, "record": FormatError}.get(how, IntegrityError)):
        Repository.open(root)
    rewrite(root, "config", data)
    check_whole(LocalStore(root))


# --- damaged objects -------------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif how.startswith("flipped"):
        at = {"flipped": len(data) // 2, "flipped first": 0, "flipped early": 70, "flipped last": len(data) - 1}[how]
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    else:
        assert how == "deleted"


def own_objects(repository: Repository, ref: str) -> dict[str, list[str]]:
    """Return the manifests and packs that only this snapshot needs."""
    from snapstore.catalog.needed_keys import needed_keys

    mine = needed_keys(repository.context.index, repository.snapshot(ref))
    for other in repository.snapshots():
        if other.ref != ref:
            mine -= needed_keys(repository.context.index, other)
    return {kind: sorted(key for key in mine if key.startswith(kind)) for kind in ("packs/", "manifests/")}


HOWS = ("empty", "cut", "flipped", "flipped early", "deleted")
DAMAGE = [(kind, how) for kind in ("packs/", "manifests/") for how in HOWS]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "how"), [*DAMAGE, ("manifests/", "flipped first")])
def test_damaged_packs_and_manifests(root, kind, how):
    """Only that snapshot is lost, the error names the object, and everything else works."""
    with opened(root) as repository:
        key = own_objects(repository, "b@0")[kind][0]
        damage(root / key, how)
    shutil.rmtree(index_of(root))
    with opened(root) as repository:
        with pytest.raises((IntegrityError, FormatError)) as caught:
            repository.restore("b@0")
        assert key.split("/")[-1][:12] in str(caught.value)
        for step in range(4):
            assert repository.restore(f"a@{step}")["version"] == step
        found = repository.check("restore")
        assert found.problems
        assert {s.ref for s in found.damaged} == {"b@0"}
        assert {i for p in found.problems for i in p.snapshots} == {s.id for s in found.damaged}
        assert [s.ref for s in found.restorable] == [f"a@{step}" for step in range(4)]
        packs = keys_of(repository.store, "packs/")
        if how == "deleted" or (kind == "manifests/" and how in ("empty", "flipped first", "flipped early")):
            with pytest.raises((IntegrityError, FormatError)):
                repository.gc()
            assert set(keys_of(repository.store, "packs/")) == set(packs)
        if kind == "packs/" and how.startswith("flipped"):
            damage(root / key, "deleted")  # as in quarantine: else a save may refer to its chunks without reading them
        save(repository, "b", 1, 61)
        assert repository.restore("b@1")["version"] == 61
        assert [s.key for s in repository.check("restore").damaged] == [s.key for s in found.damaged]
        repository.forget_snapshots(["b@0"])
        repository.gc()
        assert repository.check("restore").ok
    check_clean(repository.store)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "flipped first", "flipped last", "deleted"])
def test_a_damaged_record_loses_no_other(root, how):
    key = snapshot_of(root, "b@0").key
    whole = (root / key).read_bytes()
    damage(root / key, how)
    shutil.rmtree(index_of(root))
    with opened(root) as repository:
        assert list(repository.view().damaged) == ([] if how == "deleted" else [key])
        error, said = (NotFoundError, "no run 'b'") if how == "deleted" else (IntegrityError, "snapstore repair")
        with pytest.raises(error, match=said):
            repository.restore("b@0")
        for step in range(4):
            assert repository.restore(f"a@{step}")["version"] == step
        packs = keys_of(repository.store, "packs/")
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            repository.gc()
        assert keys_of(repository.store, "packs/") == packs
        if how == "deleted":  # its packs are garbage now, but nothing proves it
            repository.gc(unexplained=True)
            assert keys_of(repository.store, "packs/") != packs
        else:
            result = repository.check("restore")
            assert [(p.kind, p.key) for p in result.problems] == [("record", key)]
            assert [s.ref for s in result.restorable] == [f"a@{step}" for step in range(4)]
        save(repository, "b", 1, 61)
        assert repository.restore("b@1")["version"] == 61
        if how != "deleted":
            (root / key).write_bytes(whole)
            repository.gc()
            assert len(check_restores(repository)) == 6


def test_things_that_do_not_belong_there(root):
    """Foreign files between the objects disturb no verb, and no verb deletes them."""
    places = ["packs/README", "packs/ab/notes.txt", "manifests/x", "snapshots/old/readme.txt", "snapshots/list",
              "policies/a", "policies/a.b", "gc/notes", "gc/x.txt", "gc/water.mark", "gc/notes.wait", "gc/x.done",
              f"gc/{'0' * 31}.mark", "sessions/desktop.ini", f"sessions/{'2' * 32}.sync-conflict"]  # fmt: skip
    for place in places:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("hello")
    with opened(root) as repository:
        repository.forget_snapshots(["a@0"])
        assert repository.gc(dry_run=True).deleted_objects > 0
        done = repository.gc()
        assert (done.deleted_objects > 0, done.waiting_for) == (True, [])
        assert save(repository, "a", 4, 3).new_chunks == 0, "the base is used"
        repository.set_policies("a", [KeepLast(3)])
        assert [s.step for s in repository.snapshots("a")] == [1, 2, 3, 4]
        for snapshot in repository.snapshots():
            repository.restore(f"id:{snapshot.id}")
        assert {problem.command for problem in repository.check("restore").problems if problem.kind == "gc"} == {""}
        repository.repair(apply=True)
    assert all((root / place).exists() for place in places)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "flipped first"])
def test_a_damaged_mark_stops_neither_saves_nor_gc(root, how):
    store = LocalStore(root)
    mark = Mark(id="1" * 32, started=0.0, packs=b"", manifests=b"")
    store.put(f"gc/{mark.id}.mark", records.encode(mark))
    damage(root / f"gc/{mark.id}.mark", how)
    with opened(root) as repository:
        snapshot = save(repository, "a", 4, 4)
        assert snapshot.bases == []  # nobody knows what the mark named
        repository.gc()
        assert save(repository, "a", 5, 5).bases
    check_clean(store)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped"])
def test_damaged_policies(root, how):
    with opened(root) as repository:
        repository.set_policies("a", [KeepLast(3)])
        damage(root / "policies" / "a.0", how)
        with pytest.raises(IntegrityError, match=r"policies/a\.0"):
            repository.policies("a")
        repository.set_policies("a", [KeepLast(3)])
        assert repository.policies("a") == [KeepLast(3)]


def test_policies_of_a_later_release(root):
    policy = RunPolicies(run="a", revision=0, policies=[{"kind": "KeepWhatever"}])
    LocalStore(root).put("policies/a.0", records.encode(policy))
    with opened(root) as repository, pytest.raises(FormatError, match="KeepWhatever"):
        repository.policies("a")


def test_gc_waits_for_a_damaged_session(root):
    store = LocalStore(root)
    store.put("sessions/" + "2" * 32, b"\xff" * 100)
    with opened(root) as repository:
        repository.forget_snapshots(["a@0"])
        packs = keys_of(store, "packs/")
        assert repository.gc(dry_run=True).waiting_for == ["2" * 32]
        assert repository.gc().waiting_for == ["2" * 32]  # nobody knows whose it is, and its save may live
        assert keys_of(store, "packs/") == packs
        save(repository, "a", 4, 4)
        found = repository.check("restore")
        assert [(p.kind, p.key, p.snapshots) for p in found.problems] == [("session", "sessions/" + "2" * 32, ())]
        store.delete(["sessions/" + "2" * 32])
        check_restores(repository)


def test_check_levels_and_shares(repository):
    wrong = {
        "level": ["deep", None],
        "share": [0.0, -1, 1.1, float("nan"), True, "0.5", None],
        "subset": [(0, 1), (2, 1), (1.5, 2), (True, 1), (1,), "12", 1],
        "max_decoded_bytes": [-1, 1.5, True, "1G"],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidInputError, match=name):
                repository.check(**{"level": "restore", name: value})
    assert repository.check("data", share=0.2).ok


class Word(str, enum.Enum):  # noqa: UP042 - its text is not its value
    A = "a"
    LOSS = "loss"
    BEST = "good"


@pytest.mark.parametrize(
    ("run", "metric", "tag"),
    [(Word.A, Word.LOSS, Word.BEST), tuple(map(np.str_, ("a", "loss", "good"))), ("a", "loss", "good")],
)
def test_names_that_are_more_than_a_str(tmp_path, run, metric, tag):
    """Members of an enum, or strings of NumPy: run, metric and tag get the names that they are equal to."""
    keep = [KeepBest(metric), KeepLast(1)]
    with Repository.create(tmp_path / "r") as repository:
        with SnapshotManager(repository, run=run, keep=keep, async_save=False) as manager:
            for step in range(4):
                manager.save(step, {"step": step}, metrics={metric: step})
            assert (manager.all_steps(), manager.best_step()) == ([0, 3], 0)
        assert repository.policies("a") == [KeepBest("loss"), KeepLast(1)]
        repository.save({}, run=run, step=4, tags=[tag])
        assert repository.snapshot("a@good").step == 4
        repository.tag("a@3", tag)
        assert repository.snapshot("a@good").step == 3
        assert repository.untag("a@3", tag).tags == []
        repository.set_policies(run, KeepLast(2))
        assert repository.policies(run) == [KeepLast(2)]
        assert [s.step for s in repository.forget(KeepLast(1), run=run).forgotten] == [0, 3]
        assert repository.check("restore").ok


def test_a_metric_that_is_nan_is_no_damage(root):
    with opened(root) as repository:
        values: dict[str, Any] = {"loss": float("nan"), "inf": float("inf")}
        save(repository, "a", 4, 4, metrics=values)
    with opened(root) as repository:
        assert repository.check().problems == []


@pytest.mark.parametrize("options", [{}, {"restore_cost": 2.0}, 2, SaveOptions])
def test_options_that_are_none(tmp_path, options):
    for make in (Repository.create, Repository.open_or_create, partial(SnapshotManager, run="r")):
        with pytest.raises(InvalidInputError, match=r"^options: expected SaveOptions\(\.\.\.\), got (dict|int|type)$"):
            make(tmp_path / "new", options=options)
        assert not (tmp_path / "new").exists()
    with Repository.create(tmp_path / "repo"), pytest.raises(InvalidInputError, match="options: expected SaveOptions"):
        Repository.open(tmp_path / "repo", options=options)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_pickle_and_no_copy(tmp_path, how):
    with SnapshotManager(tmp_path / "repo", run="r") as snapshots:
        with pytest.raises(TypeError, match=r"^a SnapshotManager cannot be pickled or copied; make another one"):
            how(snapshots)
        with pytest.raises(TypeError, match=r"^a Repository cannot be pickled or copied; open another one by its URL"):
            how(snapshots.repository)
        handle = snapshots.save(0, {"w": np.arange(9)})
        with pytest.raises(TypeError, match=r"^a SaveHandle cannot be pickled or copied; use the snapshot"):
            how(handle)
        assert how(handle.result())
        tensors = snapshots.repository.tensors("r@0")
        for lazy in (tensors, tensors["w"]):
            if how is copy.copy:
                assert how(lazy)["w" if lazy is tensors else 3] is not None
                continue
            with pytest.raises(TypeError, match=r"^lazy tensors of r@0 cannot be pickled .* tensors\('r@0'\)"):
                how(lazy)


def test_arguments_of_other_types(tmp_path):
    with Repository.create(tmp_path / "repo", options=OPTIONS) as repository:
        save(repository, "a", 1, 1)
        for call in (
            lambda: repository.restore("a@1", keys=3),
            lambda: repository.restore("a@1", keys=["w", 3]),
            lambda: repository.gc(fence_after_s="x"),
            lambda: repository.gc(fence_after_s=-1),
            lambda: Repository.open(b"/x"),
            lambda: Repository.create(3),
        ):
            with pytest.raises(InvalidInputError):
                call()


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", "~/cache")
    Repository.create(kind("~/repo")).close()
    with Repository.open(kind("~/repo")) as repository:
        assert repository.url == str(tmp_path / "repo")
        assert repository.context.index.folder.is_relative_to(tmp_path / "cache")
    with SnapshotManager(kind("~/made"), run="a") as snapshots:
        snapshots.save(0, {"n": 1})
    assert (tmp_path / "made" / "config").exists()
    with pytest.raises(InvalidInputError, match=r"~nobody-here.*no such home"):
        Repository.create(kind("~nobody-here/repo"))


def test_a_place_that_lost_its_config_is_not_called_a_stranger(root, tmp_path):
    """A user who reads only 'choose an empty place' would start from zero elsewhere."""
    (root / "config").unlink()
    with pytest.raises(InvalidInputError, match=r"not empty.*its config is lost: run 'snapstore repair'$"):
        SnapshotManager(root, run="a")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"not empty and not a repository; choose an empty or a new place$"):
        SnapshotManager(tmp_path, run="a")


def test_swapped_arguments_of_save_do_not_print_the_state(root):
    state = {"w": np.arange(5000.0)}
    with SnapshotManager(root, run="a") as snapshots:
        with pytest.raises(InvalidInputError) as caught:
            snapshots.save(state, 5)
        assert str(caught.value).endswith("got dict; the step comes before the state")
        assert len(str(caught.value)) < 200
        with pytest.raises(InvalidInputError, match=r"^step 'five': expected an integer"):
            snapshots.save("five", state)


class Huge:
    """An object with a state whose repr is long."""

    def __repr__(self):
        return "r" * 100_000

    def state_dict(self):
        return {"w": np.arange(3.0)}

    def load_state_dict(self, state): ...


HUGE = [{f"w{i}": np.arange(900.0) for i in range(40)}, Huge(), [b"y" * 100_000], 10**300, "x" * 100_000]
#: Arguments of which errors speak in full: places, and a target, whose differences are listed.
IN_FULL = {"to", "url", "repository", "mirror", "path", "target", "state", "metadata"}
#: Methods that end or wait, and one that takes results of another.
LEFT_OUT = {"close", "handle_preemption", "in_need_of_quarantined", "wait_until_finished"}
NEEDED = {"ref": "a@0", "refs": ["a@0"], "run": "a", "a": "a", "b": "b", "name": "good", "policies": (), "step": 1}
NEEDED |= {"state": {"n": 1}, "target": {"n": 0}}


def parameters_of(function):
    """Yield the names of a function's parameters, and of those of its `**options`, and whether each is needed."""
    for one in inspect.signature(function).parameters.values():
        text = str(one.annotation)
        if text.startswith("Unpack["):
            yield from ((name, False) for name in getattr(snapstore, text[7:-1]).__annotations__)
        elif one.name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD:
            yield one.name, one.default is one.empty


@pytest.mark.parametrize("kind", [Repository, SnapshotManager])
def test_no_error_quotes_a_long_argument(root, kind):
    """Whichever argument of whichever method is a state, a long text or a long number: the error is short."""
    refused = set()
    with Repository.open(root) as repository, SnapshotManager(repository, run="a") as manager:
        made = repository if kind is Repository else manager
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            found = dict(parameters_of(method))
            needed = {one: NEEDED[one] for one, is_needed in found.items() if is_needed and one in NEEDED}
            for one, value in itertools.product(found.keys() - IN_FULL, HUGE):
                if name.startswith("_") or name in LEFT_OUT:
                    continue
                text = ""
                try:
                    list(getattr(made, name)(**needed | {one: value}) or ())
                except (SnapstoreError, TypeError) as error:
                    text = str(error)
                    refused.add((name, one))
                assert len(text) < 800, f"{name}({one}={type(value).__name__}): {text[:300]}"
    assert {("restore", "keys"), ("restore_into", "per_rank")} <= refused
    assert len(refused) > 20


def test_swapped_arguments_of_restore_into(repository):
    state = {"w": np.arange(5000.0)}
    for target in (state, Huge()):
        with pytest.raises(InvalidInputError, match=r"^reference: expected a str, .* takes the reference first$"):
            repository.restore_into(target, "a@1")
        with SnapshotManager(repository, run="a", read_only=True) as snapshots:
            for step in (1, "good"):
                with pytest.raises(InvalidInputError, match=r"^step: expected an integer .* takes the target first$"):
                    snapshots.restore_into(step, target)
