"""The format is frozen: a committed repository of every version restores to the bit, tiny objects to the byte."""

import hashlib
import json
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.packs import scan
from snapstore import Repository, SaveOptions
from snapstore.catalog.needed_keys import all_manifests
from snapstore.engine.cpu import EncodedChunk, HostEncoded
from snapstore.errors import NotFoundError
from snapstore.format import hashing, records
from snapstore.format.blobs import blob, chain_decode, pack, planes
from snapstore.format.manifests import manifest
from snapstore.format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Wait
from snapstore.retention import KeepEvery, KeepLast
from snapstore.state.values.tensors import TORCH_DTYPES
from snapstore.storage.memory import MemoryStore

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

from make_golden import (  # noqa: E402  (tools/ is no package)
    JOB,
    describe,
    part_of,
    restored_job,
    save_job,
    state,
    summary,
    whole_of_job,
)

#: SHA-256 of each frozen version's golden repository: of its files in the order of their paths, as path, 0, SHA-256.
FROZEN = {
    "v1": "a8f670da52e27fd10417897d8238184554a9b6a805f44bc601977f7fd39acef8",
    "v1-deltas": "062ff03ad92e65130caebc604af17e95501f76c40380072d5ac9a27c9af04bf3",
    "v1-layouts": "a507494637fc7189a3e5562dcb6be73517d95721a1d401ea4802f5f6d88f0dd7",
    "v1-xor": "b28230ef50267e3e693da57dec624150a64bbb66fb626f2ffacb5ffcc3ba0280",
    "v1-pages": "72bc297d7fadf6bdc4cbf35ee280f58a9522ad85effecf88940177ccb1ead0d0",
    "v1-gpu": "866a0a8883d68d79276f16ea3b96af4006b22ba06f71c55d0f620fe0577d02d3",
    "ans-v1": "9eae49d417dacbf0a06988da64b99db0e76bc6a420a70b6d8305c8f0859c565b",
}
EVERY = (COMMITTED, FORGOTTEN, SWEPT, ABORTED)
digest = partial(hashing.digest, seed=0)  # of the objects to the byte below; a blob does not say which seed


@pytest.fixture(params=sorted(path.name for path in HERE.glob("v*") if path.name[1:].isdigit()))
def golden(request, tmp_path):
    """(repository, what to expect) of a copy."""
    shutil.copytree(HERE / request.param, tmp_path / "repo")
    expected = json.loads((tmp_path / "repo" / "expected.json").read_text())
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo", options=SaveOptions(threads=2)) as repo:
        yield repo, expected["snapshots"]


def test_a_frozen_repository_never_changes():
    assert FROZEN.keys() == {path.name for path in HERE.iterdir() if (path / "config").exists()}
    for name, expected in FROZEN.items():
        folder = HERE / name
        found = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            found.update(
                f"{path.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest()
            )
        assert found.hexdigest() == expected, f"{folder} must stay as it is; a new format gets a new version"


def test_the_log_is_right(golden):
    repo, expected = golden
    found = repo.view().snapshots(states=EVERY)
    fields = ("id", "run", "step", "seq", "state", "parent", "tags", "metrics", "depth", "logical_bytes")
    assert [{name: getattr(s, name) for name in fields} for s in found] == [
        {name: e[name] for name in fields} for e in expected
    ]
    assert Counter(s.state for s in found) == {COMMITTED: 19, FORGOTTEN: 1, SWEPT: 2}
    assert {s.depth for s in found} >= {0, 1, 2, 3}
    assert repo.snapshot("main@2").tags == ["again"], "the later save of the step"
    assert repo.snapshot("main@start").step == 0
    assert repo.snapshot(f"id:{repo.snapshot('fork@6').parent}").ref == "main@3"
    assert repo.policies("main") == [KeepLast(3), KeepEvery(steps=2)]


def _tags(node):
    """Yield the tags of all nodes of a tree."""
    if isinstance(node, list):
        if node and isinstance(node[0], str):
            yield node[0]
        for member in node:
            yield from _tags(member)


def test_it_has_every_kind(golden):
    """As docs/design/freeze.md lists them; columns are decoded to nodes by the reader's tests."""
    repo, _ = golden
    found, tags, dtypes = set(), set(), set()
    for snapshot in repo.view().snapshots(states=(COMMITTED, FORGOTTEN)):
        found |= {"list"} if snapshot.manifest_list else set()
        found |= {"compacted"} if snapshot.run == "compacted" and snapshot.revision else set()
        for ref, m in all_manifests(snapshot, lambda ref: manifest.read(repo.store, ref, None)):
            found |= {"shared"} if m.header.snapshot.hex() != snapshot.id else set()
            found |= {"children"} if m.header.children else set()
            found |= {entry.kind for entry in m.tensors} | {"tie" for entry in m.tensors if entry.tie}
            found |= {"inline" for entry in m.tensors if entry.inline} | {"box map" if m.header.box_map else "none"}
            dtypes |= {entry.dtype for entry in m.tensors}
            tags |= set(_tags(m.tree)) if m.tree and m.tree[0] != "pages" else {"pages"}
            assert ref.part == m.header.part
    kinds = {"list", "compacted", "shared", "children", "tie", "inline", "box map"}
    kinds |= {"page", "parameter", "array", "bytes"}
    assert kinds <= found
    tags_wanted = {"columns", "values", "mixed", "lists", "tuples", "dicts", "list rows", "tuple rows", "dict rows"}
    tags_wanted |= {"enum", "object", "path", "date", "time", "datetime", "timedelta", "timezone"}
    assert tags_wanted | {"rank", "own", "pages"} <= tags
    assert dtypes >= {name for name in TORCH_DTYPES if hasattr(torch, name)}
    assert repo.stats().codecs.keys() == {"raw", "zstd", "deflate", "sparse"}


def test_every_state_restores_to_the_bit(golden):
    repo, expected = golden
    for e in expected:
        if e["run"] == "job":
            ranks = [summary(describe(restored_job(repo, e["step"], rank))) for rank in range(JOB[e["step"]])]
            assert ranks == e["ranks"]
        elif e["state"] in (COMMITTED, FORGOTTEN):
            assert summary(describe(repo.restore(f"id:{e['id']}"))) == e["leaves"]
        else:
            with pytest.raises(NotFoundError):
                repo.restore(f"id:{e['id']}")


def test_ties_are_tied(golden):
    repo, _ = golden
    restored = repo.restore("main@4")
    model = restored["model"]
    assert model["tied"] is model["w"]
    ref = restored["optimizer"]["state"][0]["ref"]
    assert ref.data_ptr() == model["w"].data_ptr()


def test_it_restores_into_a_state(golden):
    repo, _ = golden
    target = state(4)
    with torch.no_grad():
        target["model"]["w"].zero_()
    repo.restore_into("main@4", target)
    assert describe(target) == describe(state(4))


@pytest.mark.parametrize("step", JOB)
def test_a_snapshot_of_several_ranks_restores_into_other_shards(golden, step):
    """Ties are tied; a tensor that was cut along one dimension is put together along the other."""
    repo, _ = golden
    restored = repo.restore(f"job@{step}", keys=["model", "optimizer"])
    tied = [restored["model"]["w"], restored["model"]["tied"], restored["optimizer"]["ref"]]
    assert len({tensor.data_ptr() for tensor in tied}) == 1
    whole = whole_of_job(step)["model"]
    for rank in range(4):
        expected = {name: part_of(value, int(name != "h"), rank, 4).data for name, value in whole.items()}
        target = {name: part_of(torch.zeros_like(value), int(name != "h"), rank, 4) for name, value in whole.items()}
        repo.restore_into(f"job@{step}", {"model": target}, keys="model")
        assert all(torch.equal(target[name].data, data) for name, data in expected.items())


def test_a_large_tree_of_several_ranks_lies_in_pages_of_its_root(golden):
    """The pages of a step that are as they were are known chunks: their packs are those of the step before."""
    repo, _ = golden
    packs = []
    for step in JOB:
        roots = [manifest.read(repo.context.store, ref, None) for ref in repo.snapshot(f"job@{step}").manifests]
        (root,) = (root for root in roots if root.header.chunks)
        assert root.tree[0] == "pages"
        packs.append(set(root.own_packs))
    assert all(packs[0] & later for later in packs)
    assert not packs[0] >= packs[-1]


def test_ranks_save_on_top(golden, tmp_path):
    repo, _ = golden
    (saved,) = save_job(tmp_path / "repo", 3, 1, 3)
    assert saved.parent == repo.snapshot("job@2").id
    assert saved.new_chunks < saved.chunks
    assert saved.depth > 0
    repo.forget([KeepLast(1)], run="job")
    repo.gc()
    assert repo.check("restore").ok
    assert describe(repo.restore("job@3", keys="model.*")["model"]) == describe(whole_of_job(3)["model"])


def test_check_finds_nothing(golden):
    repo, expected = golden
    result = repo.check("restore")
    assert result.ok, result.problems
    assert len(result.restorable) == sum(e["state"] in (COMMITTED, FORGOTTEN) for e in expected)


def test_saving_on_top_deltas_and_dedups(golden):
    repo, _ = golden
    saved = repo.save(state(5), run="main", step=5)
    assert saved.parent == repo.snapshot("main@2").id, "the newest save of the run"
    assert saved.new_chunks < saved.chunks
    assert describe(repo.restore("main@5")) == describe(state(5))
    repo.unforget("main@1")
    repo.forget([KeepLast(2)], run="main")
    repo.gc()
    assert repo.check("restore").ok
    assert describe(repo.restore("main@5")) == describe(state(5))


# --- to the byte: a change here is a new format version ---

EIGHT = np.arange(8, dtype=np.uint8)
FULL = bytes.fromhex(
    "534e424c" "0100" "0000" "1837e46ae92aecef"  # magic, version, zero, XXH3-64
    "00" "04" "00" "00" "08000000" "08000000" "00000100"  # full, e, layout, zero, raw, payload and block size
    "0000000000000000" "00000000" "00000000"  # codecs, block lengths, zero
    "e1e4432a62217fe4cfd50c61c8bb98c1" "00000000000000000000000000000000"  # digest, base
    "0004" "0105" "0206" "0307"
)  # fmt: skip
DIFFERENCE = bytes.fromhex(
    "534e424c" "0100" "0000" "f05a27542c1d9ebb" "01" "02" "00" "00" "08000000" "08000000" "00000100"
    "0000000000000000" "00000000" "00000000"
    "68984fb78cbfabfd69607a4363cb9348" "e1e4432a62217fe4cfd50c61c8bb98c1" "0003070b" "7d860a0e"
)  # fmt: skip
ZEROS_ZSTD = bytes.fromhex(
    "534e424c010000003dcb69030a0c0231000100000001000013000000000001000100000000000000"
    "0100000000000000bb039d71e9630a91a68dfbb1d75c6e8d0000000000000000000000000000000013000000"
    "28b52ffd6000004d000010000001007b0a6001"
)
ZEROS_DEFLATE = bytes.fromhex(
    "534e424c0100000039d9f159e2da8506000101000001000005000000000001000200000000000000"
    "0100000000000000bb039d71e9630a91a68dfbb1d75c6e8d00000000000000000000000000000000050000006318e10000"
)
PACK = (
    bytes.fromhex("534e41505041434b" "0100" "0000" "01000000" "000102030405060708090a0b0c0d0e0f" "0200000000000000")
    + bytes.fromhex("000102030405060708090a0b0c0d0e0f" "00000000" "00000000")
    + FULL
    + bytes.fromhex("4000000000000000" "58000000" "08000000" "00" "04" "000000000000" "0000000000000000")
    + bytes.fromhex("e1e4432a62217fe4cfd50c61c8bb98c1" "00000000000000000000000000000000")
    + bytes.fromhex("02000000" "02000000" "02000000" "02000000" "00000000" "00000000" "00000000" "00000000")
    + b"m"
    + bytes.fromhex("9800000000000000" "01000000" "01000000" "7408499184f57f4d" "534e4150464f4f54")
)  # fmt: skip
ENVELOPE = bytes.fromhex(
    "534e4150" "06" "01" "0000" "1400000000000000" "401fa1ceb12cb080"  # magic, kind, version, zero, length, XXH3-64
    "82" "a26964" "a26162" "a873657373696f6e73" "91" "a26364"  # {"id": "ab", "sessions": ["cd"]}
)  # fmt: skip

#: By length, one a class of lengths: of bytes i * 167 % 251, under the seed 0x0123456789abcdef.
DIGESTS = {
    0: "a4cb05dbbf09907aaaa287af24a9bb3a",
    3: "076689fa1ccf4c074c9782bff34d61cc",
    8: "cf9596c5491b7e9ce60d36db0dddbd5a",
    16: "1bca377c60c1a2e678535e07a773c926",
    100: "e0346c4c651fe918a25ee1d6aea3372c",
    240: "6d2b1478dd7590f0d6c4a20b04121a57",
    241: "6fa5f2aff7e6b591ae22a15433de05a9",
    1025: "41ca7c2014dabef4b93837ea5b629eb4",
    2000: "7e05447d1175107f934ab81bb2d46e55",
}


def decode(blobs, wanted):
    out = np.empty_like(wanted)
    chain_decode.decode_chain([memoryview(b) for b in blobs], ["x"] * len(blobs), digest(wanted), out, seed=0)
    return out


def encode(source, element_size, layout, chunk_digest, base):
    statistics = planes.statistics(planes.histograms(planes.sample(source, element_size, layout)))
    out = np.empty(blob.bound(source.size, element_size), np.uint8)
    return bytes(blob.encode(source, element_size, layout, statistics, (chunk_digest, base), out))


def test_blobs():
    chunk = np.array([0x80, 0x3F, 0, 0xC0, 0, 0, 0, 0], np.uint8)
    zeros, difference = np.zeros(256, np.uint8), np.empty(8, np.uint8)
    planes.difference(chunk, EIGHT, 2, difference)
    assert encode(EIGHT, 4, planes.BYTES, digest(EIGHT), None) == FULL
    assert encode(difference, 2, planes.ROTATED, digest(chunk), digest(EIGHT)) == DIFFERENCE
    np.testing.assert_array_equal(decode([FULL], EIGHT), EIGHT)
    np.testing.assert_array_equal(decode([DIFFERENCE, FULL], chunk), chunk)
    np.testing.assert_array_equal(decode([ZEROS_ZSTD], zeros), zeros)  # what encoders make of it may change
    np.testing.assert_array_equal(decode([ZEROS_DEFLATE], zeros), zeros)


def test_pack():
    writer = pack.PackWriter(bytes(range(16)), 1, 2, "m")
    encoded = HostEncoded.of([EncodedChunk(memoryview(bytearray(FULL)), False, np.empty(0, np.uint8))])
    assert writer.extend(encoded, 0, 1).tolist() == [64]
    assert writer.size_bytes == 64 + 88
    assert writer.seal() == PACK
    store = MemoryStore()
    store.put("packs/00/x", PACK)
    listing = pack.read_listing(store, "packs/00/x", len(PACK))
    save_id = bytes(range(16))
    assert listing.header == pack.PackHeader(1, save_id, 2, records.MadeFor(save_id, 0))
    assert listing.part == "m"
    assert [(at, header.digest) for at, header in scan(memoryview(PACK), "x")] == [(64, digest(EIGHT))]


def test_envelope():
    assert records.encode(Wait(id="ab", sessions=["cd"])) == ENVELOPE
    assert records.unpack(ENVELOPE, Wait, "x") == Wait(id="ab", sessions=["cd"])


def test_digests():
    data = np.array([i * 167 % 251 for i in range(max(DIGESTS))], np.uint8)
    assert {n: hashing.digest(data[:n], 0x0123456789ABCDEF).hex() for n in DIGESTS} == DIGESTS
