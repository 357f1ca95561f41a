"""The golden repository of XORs restores to the bit, and mixes all deltas in chains; its feature is refused by name."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from snapstore import Repository, SaveOptions, UnknownFormatError
from snapstore.format import records
from snapstore.format.chunking import DIFFERENCE, FULL, XOR
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest

HERE = Path(__file__).parent
FOLDER = HERE / "v1-xor"
sys.path.insert(0, str(HERE.parents[1] / "tools"))

import reader  # noqa: E402  (tools/ is no package)
from make_golden import KINDS, STATES, XOR_STEPS, describe, summary  # noqa: E402


@pytest.fixture
def golden(tmp_path):
    """A copy of the repository."""
    shutil.copytree(FOLDER, tmp_path / "repo")
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo", options=SaveOptions(threads=2)) as repo:
        yield repo


def require_states(repo):
    for snapshot in repo.snapshots():
        assert describe(repo.restore(f"id:{snapshot.id}")) == describe(STATES[snapshot.run](snapshot.step)), snapshot
    assert repo.check("restore").ok


def test_it_restores_to_the_bit(golden):
    expected = json.loads((FOLDER / "expected.json").read_text())["snapshots"]
    assert len(expected) == len(KINDS) + XOR_STEPS
    for e in expected:
        assert summary(describe(golden.restore(f"id:{e['id']}"))) == e["leaves"]
    require_states(golden)


def test_its_chains_mix_all_kinds_of_deltas(golden):
    found, pairs = set(), set()
    for snapshot in golden.snapshots():
        for ref in snapshot.manifests:
            m = manifest.read(golden.context.store, ref, None)
            kinds = m.table.ref_kinds
            assert (XOR in kinds) == ("xor" in m.header.features)
            for first, end in zip(m.table.starts[:-1], m.table.starts[1:], strict=True):
                names = [m.header.pack_names[number] for number in m.table.ref_packs[first:end]]
                places = zip(names, m.table.ref_offsets[first:end], m.table.ref_lengths[first:end], strict=True)
                blobs = [golden.context.store.get_range(pack_key(p), int(at), int(n)) for p, at, n in places]
                chain = [reader.Blob(data) for data in blobs]
                found |= {(b.transform, b.element, b.layout) for b in chain}
                named = [
                    {FULL: "full", XOR: "xor"}.get(b.transform, "sparse" if b.is_sparse else "planes") for b in chain
                ]
                pairs |= set(zip(named[1:], named[:-1], strict=True))
    assert found >= {(XOR, size, 0) for size in (1, 2, 4, 8)} | {(XOR, size, 1) for size in (2, 4, 8)}
    assert found >= {(DIFFERENCE, size, 0) for size in (1, 2, 4, 8)}
    assert pairs >= {("full", "xor"), ("xor", "xor"), ("xor", "sparse"), ("sparse", "xor")}
    assert pairs >= {("xor", "planes"), ("planes", "xor")}


def test_a_release_without_the_feature_refuses_it_by_name(golden, monkeypatch):
    for module in (records, manifest):
        monkeypatch.setattr(module, "KNOWN_FEATURES", records.KNOWN_FEATURES - {"xor"}, raising=False)
    with pytest.raises(UnknownFormatError, match="xor"):
        golden.restore(f"long@{XOR_STEPS - 1}")


@pytest.mark.parametrize("delta", ["auto", "xor"])
def test_recode_and_compact_keep_every_bit(golden, delta):
    golden.recode()
    require_states(golden)
    golden.forget_snapshots([f"long@{step}" for step in range(3)] + ["kinds@0", "kinds@1"])
    golden.gc(fence_after_s=0)
    with Repository.open(golden.url, options=SaveOptions(threads=2, delta=delta, restore_cost=100.0)) as repo:
        repo.compact()
        require_states(repo)
        saved = repo.save(STATES["long"](XOR_STEPS), run="long", step=XOR_STEPS)
        assert saved.depth > 0
        require_states(repo)


def test_the_reader_reads_it():
    repository = reader.Repository(FOLDER)
    shown = [reader.shown(repository, record) for record in repository.records()]
    assert len(shown) == len(KINDS) + XOR_STEPS
    assert np.all([one is not None for one in shown])
