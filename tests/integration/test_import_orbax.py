"""An import of Orbax's checkpoints gives the bits of the arrays that were saved there."""

import warnings

import numpy as np
import pytest
import torch

from kit.repositories import OPTIONS, same
from snapstore import InvalidInputError, Repository
from snapstore.convert import import_checkpoints, orbax_folder
from snapstore.convert.sources import format_of
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's event loops
ocp = pytest.importorskip("orbax.checkpoint")
#: A layer without parameters is an empty tuple in stax.
EMPTY = {"batch_stats": {}, "layers": [[1, 2], (), [3, 4], ()], "list": []}


def state(step):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((40, 50)).astype(np.float32)
    weight[0, step] = step
    half = rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    eight = rng.standard_normal(7).astype(ml_dtypes.float8_e4m3fn)
    return {
        "params": {"w": weight, "half": half, "eight": eight},
        "opt": [{"mu": weight * 2}, {"count": np.array([step])}],
    }


def tensor(array):
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def expected(step):
    source = state(step)
    optimizer = [{name: tensor(array) for name, array in part.items()} for part in source["opt"]]
    return {"opt": optimizer, "params": {name: tensor(source["params"][name]) for name in sorted(source["params"])}}


def test_steps_of_a_manager_become_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_folder, "GROUP_BYTES", 8100)  # several groups
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (5, 12):
            plain = {"name": "x", "none": None, "n": step, "empty": EMPTY}
            ocp.PyTreeCheckpointer().save(tmp_path / "one" / str(step), {**state(step), **plain})
        with ocp.CheckpointManager(tmp_path / "manager") as manager:
            items = ocp.args.Composite(state=ocp.args.PyTreeSave(state(7)), about=ocp.args.JsonSave({"a": [1]}))
            manager.save(7, args=items)
            manager.wait_until_finished()
    with Repository.create(MemoryStore(), chunk_bytes=1024, options=OPTIONS) as repository:
        sources = sorted((tmp_path / "one").iterdir())
        found = list(import_checkpoints(repository, sources, run="r"))
        assert [one.snapshot.step for one in found] == [5, 12]
        assert found[1].snapshot.stored_bytes < found[0].snapshot.stored_bytes / 2
        for step in (5, 12):
            restored = repository.restore(f"r@{step}")
            assert (restored.pop("name"), restored.pop("none"), restored.pop("n")) == ("x", None, step)
            assert restored.pop("empty") == EMPTY
            assert same({key: restored[key] for key in sorted(restored)}, expected(step))
        list(import_checkpoints(repository, [tmp_path / "manager" / "7"], run="m"))
        restored = repository.restore("m@7")
        assert same(restored["state"], expected(7))
        assert restored["about"] == {"a": [1]}
        with pytest.raises(InvalidInputError, match=r"holds checkpoints \(7\)"):
            format_of(tmp_path / "manager")
        (next((tmp_path / "one" / "5").glob("d/*"))).write_bytes(b"nonsense")
        (tmp_path / "one" / "5" / "manifest.ocdbt").write_bytes(b"nonsense")
        with pytest.raises(InvalidInputError, match="Orbax cannot read it"):
            list(import_checkpoints(repository, [tmp_path / "one" / "5"], run="broken"))
        assert repository.snapshots("broken") == []
