"""nvCOMP's ANS round-trips on a GPU; without a GPU, a restore is refused with a hint to recode."""

import json
import subprocess
import sys

import pytest
import torch

from kit.gpu_states import (
    DTYPES,
    blobs_of,
    codecs_in_use,
    codecs_of,
    differing,
    drift,
    exhaust,
    facts,
    floats,
    headroom,
    manager,
    moved,
    python,
    repository,
    reseal,
    typed,
)
from kit.objects import change, keys_of
from kit.processes import environment
from snapstore import CapabilityError, FormatError, IntegrityError, Repository, SaveOptions
from snapstore.format.blobs import codecs
from snapstore.storage.memory import MemoryStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DAMAGE = (FormatError, IntegrityError)
ANS = SaveOptions(codec="ans", threads=4, verify_writes="full")


def state_of(device="cuda"):
    state = {name: typed(name, (9001,), i, device, "sparse") for i, name in enumerate(DTYPES)}
    return state | {"large": floats(700_001, 1, device), "small": floats(9, 2, device)}


@pytest.mark.parametrize("chunk_bytes", [1024, 4096, 1024 * 1024])
def test_there_and_back(chunk_bytes):
    """Each step that is saved in ANS restores to the bit, to device memory and to host memory."""
    state, store = state_of(), MemoryStore()
    with repository(chunk_bytes, store, codec="ans", verify_writes="full") as repo:
        for step in range(3):
            saved = repo.save(state, run="r", step=step)
            wanted = facts(state)
            assert differing(facts(repo.restore(f"r@{step}", device="cuda")), wanted) == []
            assert differing(facts(repo.restore(f"r@{step}")), wanted) == [], "restored to host memory by the GPU"
            drift(state, step)
        assert saved.depth == 2 or chunk_bytes == 1024
        assert repo.check("restore").ok
    assert 70 in codecs_of(store) or chunk_bytes == 1024


def test_chains_of_both_codecs():
    """A run may change its codec at every step, and save one step from host memory: each step restores to the bit."""
    store, state, wanted = MemoryStore(), state_of(), []
    Repository.create(store, chunk_bytes=4096).close()
    for step in range(6):
        options = ANS if step % 2 else SaveOptions(threads=4)
        source = {key: moved(value, "cpu") for key, value in state.items()} if step == 4 else state
        with manager("device", store=store, options=options) as made:
            made.save(step, source).result(60)
        wanted.append(facts(state))
        drift(state, step)
    with Repository.open(store) as opened:
        for step in range(6):
            assert differing(facts(opened.restore(f"r@{step}", device="cuda")), wanted[step]) == []
            assert differing(facts(opened.restore(f"r@{step}")), wanted[step]) == []


def test_a_background_save():
    state = state_of()
    with manager("device", options=ANS) as made:
        for step in range(4):
            wanted = facts(state)
            made.save(step, state)
            drift(state, step)
            assert differing(facts(made.restore(step)), wanted) == []


@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_recode_there_and_back(source):
    """A recode to ANS, and one back to portable codecs, keep every step to the bit. Sparse deltas stay sparse.

    Either engine may have written the chains.
    """
    state, store, wanted = state_of(source), MemoryStore(), []
    with repository(4096, store) as repo:
        for step in range(4):
            repo.save(state, run="r", step=step)
            wanted.append(facts(state))
            drift(state, step)

        def whole():
            for step in range(4):
                for device in ("cuda", "cpu"):
                    assert differing(facts(repo.restore(f"r@{step}", device=device)), wanted[step]) == []
            return repo.check("restore").ok

        assert codecs.SPARSE in codecs_of(store)
        result = repo.recode(codec="ans")
        assert (len(result.recoded), result.failed) == (4, [])
        repo.gc()
        assert codecs_in_use(repo, store) == {0, codecs.SPARSE, 70}
        assert whole()
        result = repo.recode()
        assert (len(result.recoded), result.failed) == (4, [])
        repo.gc()
        assert 70 not in codecs_of(store)
        assert whole()


SHELL_RECODE = """
import json, sys
import torch
from snapstore import Repository
from snapstore.cli import main
state = {"w": torch.randn(300_000, device="cuda"), "m": torch.randn(70_001) * 1e-4}
with Repository.create(sys.argv[1]) as repository:
    for step in range(2):
        repository.save(state, run="r", step=step)
        state["w"] += 1e-3
sys.argv = ["snapstore", "recode", "--repo", sys.argv[1], "--all", "--codec", "ans", "--json"]
main()
"""


def test_recode_by_the_shell(tmp_path):
    """The command `snapstore recode --codec ans` recodes all snapshots, and they pass check."""
    path = tmp_path / "repo"
    said = subprocess.run(
        [sys.executable, "-c", SHELL_RECODE, str(path)], capture_output=True, text=True, timeout=110,
        env=environment(),
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-3000:]
    assert len(json.loads(said.stdout)["recoded"]) == 2
    with Repository.open(path) as repo:
        assert repo.check("restore").ok
        assert "nvCOMP 6 ANS" in repo.stats().codecs


REFUSED = """
import json, sys
import torch
from snapstore import CapabilityError, Repository
with Repository.open(sys.argv[1]) as repository:
    try:
        repository.restore("r@0")
        said = "nothing"
    except CapabilityError as error:
        said = str(error)
    beside = repository.restore("r@0", keys="plain")
    names = [s.ref for s in repository.snapshots()]
print(json.dumps([said, names, beside["plain"]]))
"""


def test_refused_where_there_is_no_gpu(tmp_path):
    """Without a GPU, a restore of ANS blobs fails and names recode; other keys and the list of snapshots work."""
    with Repository.create(tmp_path / "repo", options=ANS) as repo:
        repo.save({"w": floats(300_000, 1, "cuda"), "plain": 5}, run="r", step=0)
    said, names, plain = python(REFUSED, tmp_path / "repo", gpu=False)
    assert "recode" in said
    assert "GPU" in said
    assert "nvCOMP 6" in said
    assert names == ["r@0"]
    assert plain == 5


@pytest.mark.parametrize("device", ["cuda", None])
def test_another_major_is_refused(device):
    """A restore refuses ANS blobs of another major release of nvCOMP."""
    with repository(codec="ans") as repo:
        repo.save({"w": floats(30_000, 1, "cuda")}, run="r", step=0)
        for key in keys_of(repo.store, "packs/"):

            def patch(edited):
                for offset, header in blobs_of(edited):
                    edited[offset + 32 : offset + 40] = header.codecs.replace(b"\x46", b"\x47")
                    reseal(edited, offset, header.payload_start + header.payload_bytes)

            change(repo.store, key, patch)
        with pytest.raises(FormatError, match="nvCOMP 7"):
            repo.restore("r@0", device=device)


@pytest.fixture
def no_packages(monkeypatch):
    """Act as if CuPy and nvCOMP were not installed."""

    def require():
        raise CapabilityError("the GPU engine needs CuPy and nvCOMP 6: no module; pip install 'snapstore[cuda13]'")

    monkeypatch.setattr("snapstore.engine.cuda.require", require)


def test_without_packages_ans_is_refused_for_cuda_tensors_alone(no_packages):
    """Without the packages, codec="ans" saves host tensors in portable codecs, and refuses CUDA tensors."""
    with repository(codec="ans") as repo:
        state = {"w": floats(30_000, 1), "s": floats(9, 2)}
        repo.save(state, run="r", step=0)
        assert codecs_of(repo.store) <= {0, 1, 2}
        assert differing(facts(repo.restore("r@0")), facts(state)) == []
        with pytest.raises(CapabilityError, match="pip install"):
            repo.save({"w": state["w"].cuda()}, run="r", step=1)
        assert [s.step for s in repo.snapshots()] == [0]


@pytest.mark.parametrize("mode", ["auto", "device"])
def test_without_packages_portable_goes_through_host_memory(no_packages, caplog, mode):
    """Without the packages, staging="auto" saves CUDA tensors through host memory, and "device" is refused."""
    state = {"w": floats(30_000, 1, "cuda"), "s": floats(9, 2, "cuda"), "t": floats(6000, 3, "cuda").view(60, 100).t()}
    with manager(mode) as made:
        if mode == "device":
            with pytest.raises(CapabilityError, match="pip install"):
                made.save(0, state)
            return
        for step in range(3):
            wanted = facts(state)
            made.save(step, state)
            drift(state, step)
            assert differing(facts(made.restore(step, device="cuda")), wanted) == []
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        made.restore_into(into, 2)
        assert differing(facts(into), wanted) == []
    said = [r.getMessage() for r in caplog.records if "compressed on the CPU" in r.getMessage()]
    assert len(said) == 1, said


def test_ans_blobs_without_packages(no_packages, monkeypatch):
    """Without the packages, a restore of ANS blobs names recode, and a save does not use them as bases."""
    with repository(codec="ans") as repo:
        with monkeypatch.context() as patch:
            patch.setattr("snapstore.engine.cuda.require", lambda: None)
            repo.save({"w": floats(30_000, 1, "cuda")}, run="r", step=0)
        store = repo.store
    with Repository.open(store) as opened:
        with pytest.raises(CapabilityError, match="recode"):
            opened.restore("r@0")
        other = {"w": floats(30_000, 1)}
        drift(other, 1)
        assert opened.save(other, run="r", step=1).depth == 0, "a base that cannot be read is not used"
        assert differing(facts(opened.restore("r@1")), facts(other)) == []


def test_device_memory_that_runs_out_is_no_damage():
    """If device memory runs out while a restore to host memory decodes ANS, the error does not report damage."""
    state = {"w": floats(300_000, 1, "cuda")}
    with repository(chunk_bytes=65_536, codec="ans") as repo:
        repo.save(state, run="r", step=0)
        with headroom(0):
            taken = exhaust()
            failure = None
            try:
                repo.restore("r@0")
            except Exception as error:  # noqa: BLE001
                failure = error
            del taken
        assert not isinstance(failure, DAMAGE), f"reported as damage: {failure}"
        assert failure is None or "memory" in str(failure)
        assert differing(facts(repo.restore("r@0")), facts(state)) == []


def test_the_packages_are_there():
    """CuPy and nvCOMP are installed. Without them, the tests of this folder would not test the GPU engine."""
    from snapstore.engine import cuda

    cuda.require()
    assert "cupy" in sys.modules
