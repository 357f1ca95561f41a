"""The golden repositories of deltas, by CPU and by GPU, have every kind of delta, and restore to the bit."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from snapstore import Repository, SaveOptions
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

import reader  # noqa: E402  (tools/ is no package)
from make_golden import KINDS, LONG_STEPS, STATES, describe, summary  # noqa: E402


@pytest.fixture(params=["v1-deltas", "v1-gpu"])
def folder(request):
    """The repository."""
    return HERE / request.param


@pytest.fixture
def golden(folder, tmp_path):
    """A copy of the repository."""
    shutil.copytree(folder, tmp_path / "repo")
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo", options=SaveOptions(threads=2)) as repo:
        yield repo


def chains_of(repo, snapshot):
    """Yield (dtype, chain) of each chunk of a snapshot; a chain is its references, (pack, offset, length)."""
    for ref in snapshot.manifests:
        m = manifest.read(repo.context.store, ref, None)
        table = m.table
        names = [m.header.pack_names[number] for number in table.ref_packs]
        refs = list(zip(names, table.ref_offsets.tolist(), table.ref_lengths.tolist(), strict=True))
        for entry in m.tensors:
            for box in entry.boxes:
                for row in range(box.first_chunk, box.first_chunk + box.chunks):
                    yield entry.dtype, refs[table.starts[row] : table.starts[row + 1]]


def test_it_restores_to_the_bit(golden, folder):
    expected = json.loads((folder / "expected.json").read_text())["snapshots"]
    assert Counter(e["run"] for e in expected) == {"kinds": len(KINDS), "long": LONG_STEPS}
    found = golden.snapshots()
    assert [(s.id, s.run, s.step, s.depth) for s in found] == [
        (e["id"], e["run"], e["step"], e["depth"]) for e in expected
    ]
    for e in expected:
        assert summary(describe(golden.restore(f"id:{e['id']}"))) == e["leaves"]
        assert summary(describe(STATES[e["run"]](e["step"]))) == e["leaves"]


def test_check_finds_nothing(golden):
    result = golden.check("restore")
    assert result.ok, result.problems
    assert len(result.restorable) == len(KINDS) + LONG_STEPS


def test_saving_on_top_makes_deltas(golden):
    saved = golden.save(STATES["long"](LONG_STEPS), run="long", step=LONG_STEPS)
    assert saved.depth > 0
    assert golden.check("restore").ok
    assert describe(golden.restore(f"long@{LONG_STEPS}")) == describe(STATES["long"](LONG_STEPS))


def test_it_has_every_kind_of_delta(golden):
    """As docs/design/freeze.md lists them."""
    dtypes, links, lengths = set(), set(), set()
    for snapshot in golden.snapshots():
        for dtype, chain in chains_of(golden, snapshot):
            blobs = [reader.Blob(golden.context.store.get_range(pack_key(p), at, n)) for p, at, n in chain]
            kinds = ["sparse" if b.is_sparse else "planes" for b in blobs[:-1]]
            lengths.add(len(chain))
            dtypes |= {(kind, dtype) for kind in kinds}
            links |= {(kind, b.element, b.layout) for kind, b in zip(kinds, blobs, strict=False)}
            links |= {"sparse on planes on sparse"} if "sparse planes sparse" in " ".join(kinds) else set()
    names = {"bool", "int8", "float8_e4m3fn", "int16", "bfloat16", "int32", "float32", "complex64", "int64", "float64"}
    assert dtypes >= {("sparse", name) for name in names | {">i4"}}
    assert dtypes >= {("planes", name) for name in names - {"bool"}}
    assert links >= {("sparse", size, 0) for size in (1, 2, 4, 8)} | {("sparse", size, 1) for size in (2, 4, 8)}
    assert links >= {("planes", size, 0) for size in (1, 2, 4, 8)} | {"sparse on planes on sparse"}
    assert lengths >= set(range(1, 11))


def test_it_has_every_form_of_a_sparse_delta(folder, monkeypatch):
    """The reader decodes each group: gaps and values, with and without shifts and escapes, and dense ones."""
    found, changes = set(), reader.Blob._changes

    def seen(self, shift, value_shift, symbols, values, size):
        layout, gaps = self.layout, [symbol // 3 for symbol in symbols]
        found.update({(layout, "dense") if shift == 255 else (layout, "gap shift", shift > 0)} if size else ())
        found.update((layout, "gap escape", gap == 84) for gap in gaps)
        found.update((layout, "value shift", value_shift > 0, value == 255) for value in values)
        return changes(self, shift, value_shift, symbols, values, size)

    monkeypatch.setattr(reader.Blob, "_changes", seen)
    repository = reader.Repository(folder)
    for record in repository.records():
        reader.shown(repository, record)
    both, forms = (False, True), set()
    for layout in (0, 1):
        forms |= {(layout, "gap escape", escapes) for escapes in both} | {
            (layout, "gap shift", shift) for shift in both
        }
        forms |= {(layout, "value shift", shift, escapes) for shift in both for escapes in both}
    assert found >= forms | {(1, "dense")}, forms - found


def test_it_has_skips(golden):
    """A delta whose base is an older chunk of the chain than the newest one, at least four links older."""
    skips, before = Counter(), {}
    for step in range(LONG_STEPS):
        for number, (_, chain) in enumerate(chains_of(golden, golden.snapshot(f"long@{step}"))):
            old, base = before.get(number, []), chain[1:]
            if base and old[-len(base) :] == base and len(old) - len(base) >= 4:
                skips[number] += 1
            before[number] = chain
    assert len(skips) == 2
    np.testing.assert_array_less(0, list(skips.values()))
