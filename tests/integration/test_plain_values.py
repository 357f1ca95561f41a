"""A save of large plain values stores only the pages that changed, and every verb reads pages.

A page is a piece of the encoded plain values of a state; the content decides where one ends.
"""

import random

import numpy as np
import pytest
import torch

from kit.forge import MIB, SIZE, World, digest, full, little_memory, noise
from kit.objects import flip
from kit.ranks import Managers
from kit.samples import some
from kit.states import same
from snapstore import CapabilityError, FormatError, IntegrityError, PerRank, Repository, SaveOptions, SnapshotManager
from snapstore.format import chunking
from snapstore.format.manifests import manifest
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.state.tree.encode import pack
from snapstore.storage.memory import MemoryStore

OPTIONS = SaveOptions(threads=1)


@pytest.fixture
def repo():
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        yield repository


def vocabulary(count=30_000):
    return {f"word {i}": i * 7919 % 100_003 for i in range(count)}


def rows(count=15_000):
    draw = random.Random(0)
    return [{"step": i, "loss": draw.random(), "tags": ["a", str(i % 7)]} for i in range(count)]


def change_a_value(state):
    state["data"]["vocabulary"]["word 10000"] = -1
    state["data"]["rows"][4_321]["loss"] = 0.5


def append(state):
    state["data"]["vocabulary"]["a new word"] = 5
    state["data"]["rows"].append({"step": -1, "loss": 0.25, "tags": ["b"]})


def insert(state):
    state["data"]["rows"].insert(3_333, {"step": -1, "loss": 0.25, "tags": ["b"]})
    words = list(state["data"]["vocabulary"].items())
    state["data"]["vocabulary"] = dict([*words[:5000], ("a new word", 5), *words[5000:]])


def delete(state):
    del state["data"]["rows"][777]
    del state["data"]["vocabulary"]["word 777"]


@pytest.mark.parametrize("edit", some([change_a_value, append, insert, delete], 1))
def test_an_edit_costs_a_few_pages_and_no_edit_nothing(repo, edit):
    state = {"data": {"vocabulary": vocabulary(60_000), "rows": rows(30_000)}, "model": {"w": torch.arange(5000)}}
    first = repo.save(state, run="r", step=0)
    again = repo.save(state, run="r", step=1)
    assert first.logical_bytes > 1_000_000  # log and stats count plain values
    assert again.new_chunks == 0
    assert again.stored_bytes < first.stored_bytes / 50
    edit(state)
    edited = repo.save(state, run="r", step=2)
    assert 0 < edited.new_chunks <= 12
    assert edited.stored_bytes < first.stored_bytes / 2
    for step in (0, 2):
        back = repo.restore(f"r@{step}")
        assert back["data"].keys() == state["data"].keys()
    same(back, state)
    assert repo.check("restore").ok
    changes = {path for path, _, _ in repo.diff("r@1", "r@2").plain}
    assert changes
    groups = repo.stats().groups
    assert groups["data"].logical_bytes > 1_000_000
    assert groups["data"].stored_bytes > 100_000


def test_a_root_of_many_values_and_a_part_that_is_left_out(repo):
    repo.save(vocabulary(), run="root", step=0)
    same(repo.restore("root@0"), vocabulary())
    assert repo.restore("root@0", keys="word 77") == {"word 77": 77 * 7919 % 100_003}
    repo.save({"data": rows(), "model": {"w": torch.ones(3)}}, run="r", step=0)
    assert list(repo.restore("r@0", keys="model")) == ["model"]
    assert repo.restore("r@0", keys="data.17.loss") == {"data": [{"loss": rows(18)[17]["loss"]}]}
    for level in ("metadata", "data", "restore"):
        assert repo.check(level).ok


def test_restore_into(repo):
    state = {"rows": rows(), "words": vocabulary(), "w": torch.ones(3)}
    repo.save(state, run="r", step=0)
    held = {"rows": [], "words": vocabulary(), "w": torch.zeros(3)}
    held["words"]["word 5"] = None
    inner = held["words"]
    repo.restore_into("r@0", held)
    same(held, state)
    assert held["words"] is inner


@pytest.mark.parametrize("async_save", [True, False])
def test_a_manager_saves_what_was_there(tmp_path, async_save):
    state = {"rows": rows(5000), "w": torch.zeros(100_000)}
    with SnapshotManager(tmp_path / "r", run="r", async_save=async_save) as manager:
        for step in range(3):
            saved = manager.save(step, state)
            state["rows"][step]["loss"] = -1.0  # the caller continues to train
            state["w"] += 1
            saved.result()
        for step in range(3):
            back = manager.restore(step)
            assert sum(row["loss"] == -1.0 for row in back["rows"]) == step
            assert back["w"][0] == step


def test_rewrites_keep_pages(repo):
    state = {"rows": rows(), "w": torch.arange(100_000.0)}
    for step in range(3):
        append_to = state["rows"]
        append_to.append({"step": step, "loss": 0.1, "tags": []})
        repo.save(state, run="r", step=step)
    repo.recode()
    repo.forget_snapshots(["r@0"])
    repo.compact()
    repo.gc()
    same(repo.restore("r@2"), state)
    assert repo.check("restore").ok


def state_of_ranks(rank, words):
    """Return a part of only plain values, which has no child manifest; one with a tensor too; and each rank's own."""
    own = {"rank": rank, "seen": [rank + i / 7 for i in range(9_000)]}
    return {"words": words, "data": {"rows": rows(6_000), "w": torch.arange(5000)}, "own": PerRank(own)}


def save_on(managers, step, words):
    saved = managers.all(lambda m, rank: m.save(step, state_of_ranks(rank, words)).result())
    assert not any(isinstance(found, Exception) for found in saved), saved
    return saved[0]


def test_of_several_ranks_too_an_edit_costs_a_few_pages_and_no_edit_nothing():
    store = MemoryStore()
    Repository.create(store, options=OPTIONS).close()
    words, edited = vocabulary(20_000), {**vocabulary(20_000), "word 10000": -1, "a new word": 5}
    managers = Managers(store, 2, async_save=False)
    first, again, changed = (save_on(managers, step, w) for step, w in enumerate((words, words, edited)))
    managers.end()
    managers = Managers(store, 3, async_save=False)  # another process of rank 0, which holds no root in memory
    later = save_on(managers, 3, edited)
    managers.end()
    assert first.logical_bytes > 400_000
    assert again.new_chunks == 0
    assert again.stored_bytes < first.stored_bytes / 20
    assert 0 < changed.new_chunks <= 6
    assert changed.stored_bytes < first.stored_bytes / 2
    for of_2, of_3 in zip(changed.manifests, later.manifests, strict=True):
        assert manifest.read(store, of_2, None).own_packs == manifest.read(store, of_3, None).own_packs
    with Repository.open(store, options=OPTIONS) as repository:
        alone = repository.save(state_of_ranks(0, edited) | {"own": 0}, run="a", step=4, parent="a@3")
        assert alone.new_chunks <= 1  # one process uses the pages of a root manifest again
        assert repository.check("restore").ok
        repository.forget_snapshots(["a@0", "a@1"])
        assert repository.gc().deleted_objects > 0
        repository.compact()
        repository.gc()
        found = repository.check("restore")
        assert found.ok
        assert found.unneeded_bytes == 0
        for step, expected in ((2, edited), (3, edited), (4, edited)):
            back = repository.restore(f"a@{step}", keys=["words", "data"])
            same(back, {name: state_of_ranks(0, expected)[name] for name in ("words", "data")})
        assert repository.restore("a@3", keys="words.word 77") == {"words": {"word 77": 77 * 7919 % 100_003}}
    managers = Managers(store, 3, async_save=False)
    for rank, back in enumerate(managers.all(lambda m, _: m.restore(3))):
        assert back["own"] == state_of_ranks(rank, words)["own"].value
        assert back["words"] == edited
    managers.end()


def test_small_trees_of_several_ranks_put_no_pack():
    store = MemoryStore()
    Repository.create(store, options=OPTIONS).close()
    managers = Managers(store, 2, async_save=False)
    managers.all(lambda m, _: m.save(0, {"words": vocabulary(500)}).result())
    managers.end()
    assert not list(store.list("packs/"))


def test_a_damaged_page_is_found_named_and_no_other_part_suffers():
    store = MemoryStore()
    with Repository.create(store, options=OPTIONS) as repository:
        for step in range(2):
            repository.save({"rows": rows(6_000), "model": {"w": torch.arange(2000)}}, run="r", step=step)
        assert not repository.diff("r@0", "r@1").plain
        name = next(info.key for info in store.list("packs/") if b"rows" in store.get(info.key)[-64:])
        flip(store, name, 5000)
        with pytest.raises(IntegrityError):
            repository.restore("r@0")
        assert torch.equal(repository.restore("r@0", keys="model")["model"]["w"], torch.arange(2000))
        assert repository.check("metadata").ok
        report = repository.check("restore")
        assert not report.ok
        assert any("rows" in problem.message or name in problem.message for problem in report.problems)


def test_a_tree_needs_memory(repo, monkeypatch):
    repo.save({"rows": rows(30_000), "model": {"w": torch.ones(3)}}, run="r", step=0)
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "4M")
    with pytest.raises(CapabilityError, match="plain values"):
        repo.restore("r@0")
    assert repo.restore("r@0", keys="model")["model"]["w"].sum() == 3
    assert repo.check("restore").ok  # a lack of memory is not damage


# --- pages ------------------------------------------------------------------------------------------------------------


def test_cuts_follow_the_content():
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, 3_000_000, np.uint8)
    ends = chunking.page_ends(data)
    sizes = np.diff([0, *ends])
    assert ends[-1] == data.size
    assert sizes.min() >= chunking.MIN_PAGE_BYTES
    assert sizes.max() <= chunking.MAX_PAGE_BYTES + chunking.MIN_PAGE_BYTES
    assert 40_000 < sizes.mean() < 100_000
    more = np.concatenate([data[:1_000_000], np.zeros(7, np.uint8), data[1_000_000:]])
    moved = {end + 7 for end in ends if end > 1_000_000}
    assert len(moved - set(chunking.page_ends(more))) <= 3
    assert chunking.page_ends(data) == ends


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 65_536, 1_000_000])
def test_cuts_of_data_that_has_none(size):
    ends = chunking.page_ends(np.zeros(size, np.uint8))
    assert ends[-1] == size
    assert ends == sorted(set(ends))
    assert max(np.diff([0, *ends])) <= chunking.MAX_PAGE_BYTES + chunking.MIN_PAGE_BYTES


def page_entry(first, count, chunk_bytes, kind="page"):
    size = [count * chunk_bytes]
    return TensorEntry((), kind, "bytes", size, False, None, (Box((0,), size, first, count),) if count else (), None)


HOSTILE = {
    "no numbers": ["pages"],
    "texts": ["pages", "0", "1"],
    "below 0": ["pages", -1, 1],
    "none": ["pages", 0, 0],
    "too many": ["pages", 0, 2],
    "behind the end": ["pages", 1, 1],
    "true": ["pages", False, True],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pages(what):
    hostile_tree(HOSTILE[what], page_entry(0, 1, SIZE))


def test_pages_of_another_kind_or_without_chunks():
    hostile_tree(["pages", 0, 1], page_entry(0, 1, SIZE, "bytes"))
    hostile_tree(["dict", ["w"], [["bytes", 0]]], page_entry(0, 1, SIZE))
    hostile_tree(["dict", ["w"], [["pages", 0, 1]]], page_entry(0, 1, SIZE))


def hostile_tree(tree, entry, chunk=None):
    chunk = noise(1) if chunk is None else chunk
    world = World()
    (blob,) = world.pack(full(chunk))
    world.commit(world.manifest([(digest(chunk), [blob])], tree=tree, tensors=[entry]))
    with little_memory(64 * MIB), pytest.raises(FormatError):
        world.restore()
    with world.open() as repository:
        assert not repository.check("restore").ok


def packed_page(node):
    """Return a page of one chunk that holds a list of a node and a text that fills it."""
    short = len(pack(["list", [node, ""]]))
    packed = pack(["list", [node, "x" * (SIZE - short - 2)]])
    return np.frombuffer(packed, np.uint8)


def test_the_forge_makes_good_pages():
    world, chunk = World(), packed_page(7)
    (blob,) = world.pack(full(chunk))
    world.commit(world.manifest([(digest(chunk), [blob])], tree=["pages", 0, 1], tensors=[page_entry(0, 1, SIZE)]))
    assert world.restore()[0] == 7


@pytest.mark.parametrize(
    "node", [["pages", 0, 1], ["bytes", 0], ["part", ""], ["columns", ["values", b"\xdd\x7f\xff\xff\xff"]], {"a": 1}]
)
def test_pages_that_hold_no_tree(node):
    hostile_tree(["pages", 0, 1], page_entry(0, 1, SIZE), packed_page(node))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("byte", "count", "limit"),
    [(0x00, 50_000, "64M"), (0x00, 50_000, "300M"), (0x90, 12_500, "512M"), (0xE0, 12_500, "512M")],
)
def test_pages_that_repeat_a_chunk_many_times(monkeypatch, byte, count, limit):
    """References to one chunk claim many MB of nodes; the values would need far more memory, and are not built."""
    chunk = np.full(SIZE, byte, np.uint8)
    world = World()
    (blob,) = world.pack(full(chunk))
    entry = page_entry(0, count, SIZE)
    world.commit(world.manifest([(digest(chunk), [blob])] * count, tree=["pages", 0, 1], tensors=[entry]))
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", limit)
    with (
        little_memory((150 if limit == "512M" else 100) * MIB, 60.0),
        pytest.raises(CapabilityError, match="plain values"),
    ):
        world.restore()
