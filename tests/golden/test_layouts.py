"""The golden repository of layouts has every kind of dimension order and optimizer, and restores to the bit."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from snapstore import Repository, SaveOptions, SnapshotManager
from snapstore.catalog.needed_keys import all_manifests
from snapstore.errors import InvalidInputError
from snapstore.format.manifests import manifest
from snapstore.format.records import PARAMETER_SHAPES, RANKS, STRIDES

FOLDER = Path(__file__).with_name("v1-layouts")
sys.path.insert(0, str(FOLDER.parents[2] / "tools"))

from make_golden import (  # noqa: E402  (tools/ is no package)
    LAYOUT_STEPS,
    SHARES,
    Momentum,
    describe,
    layouts,
    layouts_of_rank,
    restored_of_rank,
    summary,
)


@pytest.fixture
def golden(tmp_path):
    """A copy of the repository."""
    shutil.copytree(FOLDER, tmp_path / "repo")
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo", options=SaveOptions(threads=2)) as repo:
        yield repo


def test_it_restores_to_the_bit_and_the_layout(golden):
    expected = json.loads((FOLDER / "expected.json").read_text())["snapshots"]
    assert Counter(e["run"] for e in expected) == {"layouts": LAYOUT_STEPS, "shares": 1}
    for e in expected:
        if e["run"] == "layouts":
            found = summary(describe(golden.restore(f"id:{e['id']}")))
            assert found == e["leaves"] == summary(describe(layouts(e["step"])))
            continue
        with SnapshotManager(golden, run="shares", read_only=True) as manager:
            ranks = [describe(manager.restore(0, per_rank=rank)) for rank in range(SHARES)]
        assert ranks == [describe(restored_of_rank(rank)) for rank in range(SHARES)]
        assert list(map(summary, ranks)) == e["ranks"]


def test_check_finds_nothing(golden):
    result = golden.check("restore")
    assert result.ok, result.problems
    assert len(result.restorable) == LAYOUT_STEPS + 1


def test_saving_on_top_makes_deltas(golden):
    saved = golden.save(layouts(LAYOUT_STEPS), run="layouts", step=LAYOUT_STEPS)
    assert saved.depth > 0
    assert describe(golden.restore("layouts@latest")) == describe(layouts(LAYOUT_STEPS))


def test_its_optimizers_are_checked(golden):
    target = layouts(0)
    golden.restore_into("layouts@2", target)
    assert describe(target) == describe(layouts(2))
    target["optimizer"] = target["nested"]["optimizers"][0] = Momentum([torch.nn.Parameter(torch.ones(24, 16, 3, 2))])
    before = describe(target["model"])
    with pytest.raises(InvalidInputError, match="groups"):
        golden.restore_into("layouts@1", target)
    assert describe(target["model"]) == before


def test_it_has_every_kind(golden):
    """As docs/design/freeze.md lists them."""
    orders, features, roots, own = set(), Counter(), 0, 0
    for snapshot in golden.snapshots():
        for _, m in all_manifests(snapshot, lambda ref: manifest.read(golden.store, ref, None)):
            features.update({tuple(sorted(m.header.features)): 1})
            orders |= {
                (m.tensors[number].kind, bool(m.tensors[number].inline), order)
                for number, order in m.dim_orders.items()
            }
            roots += bool(m.header.children and "optimizer" in str(m.tree))
            own += bool(m.header.world_size and not m.header.children and "optimizer" in str(m.tree))
    assert {order for *_, order in orders} >= {(0, 2, 3, 1), (1, 0), (1, 2, 0), (2, 0, 1)}
    assert {(kind, inline) for kind, inline, _ in orders} >= {
        (kind, inline) for kind in ("tensor", "array") for inline in (False, True)
    } | {("parameter", False)}
    every = set(features)
    assert every >= {(), (STRIDES,), (PARAMETER_SHAPES, STRIDES), (RANKS, STRIDES)}
    assert every >= {(PARAMETER_SHAPES, RANKS), (PARAMETER_SHAPES, RANKS, STRIDES)}
    assert roots
    assert own
    assert layouts_of_rank(0)["own"].value["optimizer"].param_groups[0]["params"][0].shape == (4, 2)
