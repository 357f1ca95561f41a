"""The golden repository of nvCOMP's ANS, which only a GPU can read: it is listed anywhere, and restored on a GPU."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from snapstore import CapabilityError, Repository
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

import reader  # noqa: E402  (tools/ is no package)
from make_golden import ANS_STEPS, STATES, describe, summary  # noqa: E402

ANS = 70


@pytest.fixture
def golden(tmp_path):
    """A copy of the repository."""
    shutil.copytree(HERE / "ans-v1", tmp_path / "repo")
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo") as repo:
        yield repo


def test_it_has_full_chunks_and_differences(golden):
    """Some of each are in ANS; a header at a fixed place says so."""
    found = set()
    for snapshot in golden.snapshots():
        for ref in snapshot.manifests:
            m = manifest.read(golden.context.store, ref, None)
            names = [m.header.pack_names[number] for number in m.table.ref_packs]
            for name, at in zip(names, m.table.ref_offsets.tolist(), strict=True):
                header = golden.context.store.get_range(pack_key(name), at, 80)
                found |= {(header[16], codec) for codec in header[32:40]}
    assert found >= {(0, ANS), (1, ANS)}, "full chunks and differences"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(golden):
    """All is listed; a restore is refused with advice, and so is the independent reader's."""
    assert [s.step for s in golden.snapshots()] == list(range(ANS_STEPS))
    with pytest.raises(CapabilityError, match="recode"):
        golden.restore("ans@1")
    repository = reader.Repository(HERE / "ans-v1")
    record = next(iter(repository.records()))
    with pytest.raises(reader.UnknownError, match="codec 70"):
        reader.shown(repository, record)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recoded", [False, True])
def test_restored_by_a_gpu(golden, device, recoded):
    """To the bit, to both memories, and once more after a conversion to codecs that every machine reads."""
    expected = json.loads((HERE / "ans-v1" / "expected.json").read_text())["snapshots"]
    if recoded:
        golden.recode([f"ans@{step}" for step in range(ANS_STEPS)], codec="portable")
        assert golden.gc().deleted_objects
    assert golden.check("restore").ok
    for e in expected:
        found = golden.restore(f"ans@{e['step']}", device=device)["model"]
        leaves = summary(describe({"model": {name: tensor.cpu() for name, tensor in found.items()}}))
        assert leaves == summary(describe(STATES["ans"](e["step"]))) == e["leaves"]
