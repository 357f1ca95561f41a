"""Every verb works on snapshots that ranks have saved by the code of real jobs.

The states have FSDP tensors, replicas, values of each rank's own, and a large tree of plain values, whose pages belong
to the root manifest. After each verb a restore by one process gives every tensor back to the bit.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from kit import foreign, rank_saves
from kit.objects import flip, keys_of
from kit.rank_saves import sharded
from kit.rank_snapshots import manifests_of
from kit.repositories import opened
from kit.shell import invoke
from snapstore import IntegrityError, InvalidInputError, Repository
from snapstore.convert import ExportOptions, export_snapshot, import_checkpoints
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.state.walk.per_rank import PerRank
from snapstore.state.walk.rng import RngState
from snapstore.storage.memory import MemoryStore

RANKS = 3


def whole(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    drift = torch.randn(50, 40, generator=generator)
    drift[version, :5] += version
    bias = torch.randn(3, 700, generator=generator).to(torch.bfloat16)
    bias[0, version] = version
    return {"drift": drift, "bias": bias, "step": torch.tensor(float(version))}


def losses(version: int) -> list[float]:
    found = np.random.default_rng(2).random(16_000)
    found[1000] = version  # a chunk that no other version has
    return found.tolist()


def states(version: int):
    def make(rank: int):
        def state():
            tensors = whole(version)
            tensors["drift"] = sharded(tensors["drift"], [RANKS], [Shard(0)])
            own = {"seed": rank, "noise": torch.full((2000,), float(rank + version)), "log": list(range(20_000 + rank))}
            return {"model": tensors | {"losses": losses(version)}, "epoch": version, "rng": PerRank(own)}

        return state

    return [make(rank) for rank in range(RANKS)]


@pytest.fixture
def store(monkeypatch):
    """Return a store with r@0, r@1 and r@2; their blobs are in a codec that recode replaces."""
    store = MemoryStore()
    foreign.readable(monkeypatch)
    with Repository.create(store, chunk_bytes=1024) as repository, foreign.written():
        for version in range(3):
            rank_saves.save(repository, states(version), version)
    return store


def require_good(store: MemoryStore, *steps: int) -> None:
    with opened(store) as repository:
        found = repository.check("restore")
        assert [problem.message for problem in found.problems] == []
        assert [s.step for s in repository.snapshots()] == list(steps)
        for step in steps:
            state = repository.restore(f"r@{step}", keys=["model", "epoch"])
            assert state["epoch"] == step
            expected = whole(step)
            assert state["model"].pop("losses") == losses(step)
            assert state["model"].keys() == expected.keys()
            assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())


VERBS = {
    "nothing": lambda r: None,
    "tag": lambda r: r.tag("r@1", "best"),
    "unforget": lambda r: (r.forget_snapshots(["r@0"]), r.unforget("r@0")),
    "recode": lambda r: r.recode(),
    "compact": lambda r: r.compact(),
    "repair": lambda r: r.repair(apply=True, level="restore", drop=True, purge=True),
    "gc": lambda r: r.gc(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", VERBS)
def test_every_tensor_comes_back_after(verb, store):
    with opened(store) as repository:
        VERBS[verb](repository)
    require_good(store, 0, 1, 2)
    with opened(store) as repository:
        repository.gc()
        assert repository.check("restore").unneeded_bytes == 0
        assert repository.stats().logical_bytes == sum(s.logical_bytes for s in repository.snapshots())
    require_good(store, 0, 1, 2)


@pytest.mark.parametrize("verb", ["recode", "copy"])
def test_a_lost_record_is_reconstructed_after(verb, store):
    """Manifests of roots and children say for which revision they were written, and nothing else is needed."""
    with opened(store) as repository:
        if verb == "copy":
            target = MemoryStore()
            assert not repository.copy(to=target).failed
            store = target
        else:
            repository.recode()
            repository.gc()
            assert {s.revision for s in repository.snapshots()} == {1}
    with opened(store) as repository:
        before = repository.snapshots()
        for snapshot in before:
            flip(store, snapshot.key, 60)
    with opened(store) as repository:
        assert repository.repair(apply=True).ok
        repository.gc()
        assert [s.manifests for s in repository.snapshots()] == [s.manifests for s in before]
    require_good(store, *(s.step for s in before))


def test_forgotten_ones_are_collected_and_the_rest_compacted(store):
    with opened(store) as repository:
        repository.forget_snapshots(["r@0", "r@1"])
        repository.gc()
        repository.compact()
        repository.gc()
    require_good(store, 2)
    with opened(store) as repository:
        last = repository.view().resolve("r@2")
        assert set(keys_of(store, "manifests/")) == {ref.key for ref, _ in manifests_of(store, last)}


def test_a_damaged_pack_is_healed_by_the_same_values_saved_again(store):
    with opened(store) as repository:
        (before, last) = (
            {name for _, m in manifests_of(store, repository.view().resolve(ref)) for name in m.header.pack_names}
            for ref in ("r@1", "r@2")
        )
        key = pack_key(min(last - before))
        flip(store, key, 150)
        assert [s.ref for s in repository.check("data").damaged] == ["r@2"]
        healed = repository.repair(apply=True, level="data").healed  # other ranks may have copies
        rank_saves.save(repository, states(2), 3)
        healed += repository.repair(apply=True, level="data").healed
        assert [s.ref for s in healed] == ["r@2"]
        repository.repair(apply=True, purge=True)
        repository.gc()
        found = repository.check("restore")
        assert [problem.message for problem in found.problems] == []
        assert [s.step for s in found.restorable] == [0, 1, 2, 3]
        repository.forget_snapshots(["r@3"], force=True)
        repository.gc()
    require_good(store, 0, 1, 2)


def test_a_damaged_page_is_found_and_healed_by_the_same_tree_saved_again(store):
    with opened(store) as repository:
        last = repository.view().resolve("r@2")
        root = manifest.read(store, last.manifests[1], None)
        own = set(root.own_packs)
        assert own
        for child in root.header.children:
            assert own.isdisjoint(manifest.read(store, child, None).header.pack_names)
        # All three snapshots share pages, so they share the packs of the root, except the newest pack.
        before = manifest.read(store, repository.view().resolve("r@1").manifests[1], None)
        (key,) = map(pack_key, own - set(before.own_packs))
        flip(store, key, 150)
        with pytest.raises(IntegrityError):
            repository.restore("r@2")
        found = repository.check("restore")
        assert [s.ref for s in found.damaged] == ["r@2"]
        assert repository.repair(apply=True, level="data").left[0].ref == "r@2"
        saved, _ = rank_saves.save(repository, states(2), 3)
        assert saved.new_chunks < 10
        assert [s.ref for s in repository.repair(apply=True, level="data").healed] == ["r@2"]
        repository.repair(apply=True, purge=True)
        repository.forget_snapshots(["r@3"], force=True)
        repository.gc()
        assert key not in keys_of(store, "packs/")
        assert repository.check("restore").unneeded_bytes == 0
    require_good(store, 0, 1, 2)


def test_a_root_whose_children_alone_are_rewritten_may_name_its_packs_in_any_order(monkeypatch):
    """The chunks of the root stay where they are; its table must get the new numbers of the packs."""
    encode, reversed_roots = manifest.encode, []

    def encode_reversed(contents):
        table = contents.table
        if not contents.children or not len(table):
            return encode(contents)
        reversed_roots.append(contents.part)
        table = replace(table, ref_packs=np.uint32(len(contents.packs) - 1) - table.ref_packs)
        packs, sizes = contents.packs[::-1], contents.pack_sizes[::-1]
        return encode(replace(contents, table=table, packs=packs, pack_sizes=sizes))

    def changed(make):
        state = make()
        return state | {"model": state["model"] | {"losses": losses(0)}}

    store = MemoryStore()
    foreign.readable(monkeypatch)
    with Repository.create(store, chunk_bytes=1024) as repository:
        rank_saves.save(repository, states(0), 0)
        with monkeypatch.context() as patch, foreign.written():
            patch.setattr(manifest, "encode", encode_reversed)
            last, _ = rank_saves.save(repository, [partial(changed, make) for make in states(1)], 1)
        before = manifest.read(store, last.manifests[1], None)
        assert [s.ref for s in repository.recode().recoded] == ["r@1"]
        after = manifest.read(store, repository.view().resolve("r@1").manifests[1], None)
        assert reversed_roots == ["model"]
        assert after.header.children != before.header.children
        assert after.own_packs == before.own_packs
        assert repository.check("restore").ok
        assert repository.restore("r@1", keys="model.losses")["model"]["losses"] == losses(0)


def test_a_lost_record_is_reconstructed_with_the_pages_of_its_roots(store):
    with opened(store) as repository:
        last = repository.view().resolve("r@2")
    flip(store, last.key, 40)
    with opened(store) as repository:
        repository.repair(apply=True)
        found = repository.view().resolve(f"id:{last.id}")
        assert (found.manifests, found.chunks, found.depth) == (last.manifests, last.chunks, last.depth)
    require_good(store, 0, 1, 2)


def test_show_names_values_of_each_rank(tmp_path):
    root = tmp_path / "repository"
    with Repository.create(root, chunk_bytes=1024) as repository:
        rank_saves.save(repository, states(0), 0)
    for flags in ((), ("--json",)):
        result = invoke(["show", "r@0", "--repo", str(root), *flags])
        assert result.exit_code == 0, result.output
        assert "<each rank's own>" in result.output
    assert json.loads(result.output)["ranks"] == RANKS


@pytest.mark.parametrize("verb", ["restore", "torch", "dcp"])
def test_values_of_each_rank_are_left_out_only_if_that_is_asked_for(tmp_path, verb):
    """They are also at the beginning of a list, whose other members would move up without a word."""

    def make(rank):
        own = {"w": torch.ones(3000), "rng": PerRank(torch.full((3,), float(rank)))}
        return {"o": own, "l": {"states": [PerRank(rank), "second"]}}

    root, out = tmp_path / "repository", tmp_path / ("out" if verb == "dcp" else "out.pt")
    with Repository.create(root) as repository:
        rank_saves.save(repository, [partial(make, rank) for rank in range(2)], 0)
    line = ["restore" if verb == "restore" else "export", "r@0", "--repo", str(root), "-o", str(out), "--json"]
    line += [] if verb == "restore" else ["--to", verb]

    def run(*options, code=0):
        result = invoke([*line, *options])
        assert result.exit_code == code, result.output
        return result

    def exported():
        if verb != "dcp":
            return torch.load(out)
        with Repository.create(MemoryStore()) as repository:
            (one,) = import_checkpoints(repository, [out], run="r")
            return repository.restore(one.snapshot.ref)

    for wrong, code in (("", 2), ("all", 2), ("-1", 2), ("2", 1)):
        run("--per-rank", wrong, code=code)
    assert not out.exists()

    document = json.loads(run().stdout)
    assert (document["dropped"], document["by_rank"]) == ([], ["o.rng", "l.states.0"])
    state = exported()
    first, second = ("0", "1") if verb == "dcp" else (0, 1)  # DCP turns numeric keys into text
    assert state["l"]["states"] == [{first: 0, second: 1}, "second"]
    assert {key: value.tolist() for key, value in state["o"]["rng"].items()} == {first: [0] * 3, second: [1] * 3}
    document = json.loads(run("--per-rank", "1", "--force").stdout)
    assert (document["dropped"], document["by_rank"]) == ([], [])
    state = exported()
    assert state["l"]["states"] == [1, "second"]
    assert state["o"]["rng"].tolist() == [1, 1, 1]
    assert sorted(json.loads(run("--per-rank", "drop", "--force").stdout)["dropped"]) == ["l.states.0", "o.rng"]
    state = exported()
    assert state["l"]["states"] == ["second"]
    assert list(state["o"]) == ["w"]
    line.remove("--json")
    assert "left out 2 values of each rank's own: " in run("--per-rank", "drop", "--force").stderr
    note = "wrote 2 values of each rank's own as a dict by rank: o.rng, l.states.0; --per-rank N takes those of rank N"
    assert note in run("--force").stderr


def test_looks_at_a_snapshot_of_several_ranks(tmp_path):
    """Every verb and method that looks at one copes with values of each rank's own, generators too."""

    def make(step, rank):
        random.seed(rank + step)
        own = PerRank({"at": rank, "order": torch.arange(700) + rank + step})
        return {"model": {"w": torch.full((700,), float(step))}, "own": own, "rng": RngState()}

    root = tmp_path / "repository"
    with Repository.create(root) as repository:
        for step in range(2):
            rank_saves.save(repository, [partial(make, step, rank) for rank in range(2)], step)
        for verb in (["log"], ["show", "r@1"], ["diff", "r@0", "r@1"], ["stats"], ["check", "--read-data"]):
            for flags in ([], ["--json"]):
                result = invoke([*verb, "--repo", str(root), *flags])
                assert result.exit_code == 0, result.output
        assert [(t.path, t.status) for t in repository.diff("r@0", "r@1").tensors] == [("model.w", "changed")]
        assert repository.first_difference("r@0", "r@1").path == "model.w"
        assert list(repository.tensors("r@1")) == ["model.w"]
        assert dict(repository.named_tensors("r@1")).keys() == {"model.w"}
        assert repository.stats().groups["own"].logical_bytes == 2 * 2 * 700 * 8


def test_safetensors_name_or_hold_values_of_each_rank(tmp_path):
    def make(rank):
        return {"model": {"w": torch.ones(3), "own": PerRank(torch.full((3,), float(rank)))}}

    with Repository.create(MemoryStore()) as repository:
        rank_saves.save(repository, [partial(make, rank) for rank in range(2)], 0)
        for to in ("safetensors", "hf"):
            out = tmp_path / to
            with pytest.raises(InvalidInputError, match=r"own would be lost"):
                export_snapshot(repository, "r@0", out, to=to)
            options = ExportOptions(tensors_only=True)
            assert export_snapshot(repository, "r@0", out, to=to, options=options).dropped[-1:] == [
                "own" if to == "hf" else "model.own"
            ]
            options = ExportOptions(per_rank=1, force=True)
            assert export_snapshot(repository, "r@0", out, to=to, options=options).dropped == []
            file = out / "model.safetensors" if to == "hf" else out
            assert load_file(file)["own" if to == "hf" else "model.own"].tolist() == [1, 1, 1]


def test_diff_sees_what_has_changed(store):
    with opened(store) as repository:
        found = repository.diff("r@0", "r@2")
        changed = {t.path for t in found.tensors if t.status != "same"}
        assert changed == {"model.drift", "model.bias", "model.step"}
        assert ("epoch", "0", "2") in found.plain
        assert ("model.losses.1000", "0.0", "2.0") in found.plain
        assert {t.status for t in repository.diff("r@1", "r@1").tensors} == {"same"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["rng", "model"])
@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_one_that_lacks_a_manifest_is_healed_elsewhere_and_dropped(store, is_root, is_cached, part):
    """A part without its root or a child gets no new root; repair heals the chunks of the other parts."""
    with opened(store) as repository:
        before, last = (repository.view().resolve(ref) for ref in ("r@1", "r@2"))
        if is_cached:  # so the headers of the manifests are in memory
            repository.stats()
        packs = {name for ref, m in manifests_of(store, last) if ref.part == "model" for name in m.header.pack_names}
        packs -= {name for _, m in manifests_of(store, before) for name in m.header.pack_names}
        refs = [ref for ref, m in manifests_of(store, last) if ref.part == part and bool(m.header.children) == is_root]
        flip(store, refs[0].key, 30)
        flip(store, pack_key(min(packs)), 150)
        report = repository.repair(apply=True, level="restore")
        assert [s.ref for s in report.left] == ["r@2"]
        assert all("run 'snapstore gc'" in text for text in report.open), report.open  # a pack that only the part needs
        rank_saves.save(repository, states(2), 3)
        planned = repository.repair(level="restore", drop=True)
        report = repository.repair(apply=True, level="restore", drop=True)
        assert [action.kind for action in planned.actions] == [action.kind for action in report.actions]
        assert any(action.kind == "heal" for action in report.actions) == (part == "rng")
        assert ([s.ref for s in report.dropped], report.left) == (["r@2"], [])
        assert all("run 'snapstore gc'" in text for text in report.open), report.open
        repository.forget_snapshots(["r@3"], force=True)
        repository.gc()
        assert repository.repair(apply=True, purge=True).ok
        repository.gc()
    require_good(store, 0, 1)
