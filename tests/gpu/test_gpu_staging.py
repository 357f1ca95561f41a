"""A snapshot holds the values that CUDA tensors had when `save` was called, whatever runs on the device."""

import logging
import time

import pytest
import torch

from kit.gpu_states import MIB, OPTIONS, differing, drift, facts, floats, manager, odd_ones, repository, typed
from snapstore import InvalidInputError, SnapshotManager
from snapstore.storage.memory import MemoryStore

if torch.cuda.is_available():  # they import CuPy
    from snapstore.engine.cuda import staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = pytest.mark.parametrize("mode", ["device", "host", "auto"])
SECOND = 2_000_000_000  # GPU cycles in about one second


@pytest.fixture(params=["device", "host"])
def snapshots(request):
    with manager(request.param) as made:
        yield made


@MODES
@pytest.mark.parametrize("keep_base", [True, False])
def test_changes_right_after_save(mode, keep_base):
    state = {"w": floats(MIB, 1, "cuda"), "small": floats(10, 2, "cuda"),
             "view": floats(40_000, 3, "cuda").view(200, 200).t(),
             "row": floats(30_000, 4, "cuda")[5:9000]}  # fmt: skip
    wanted = []
    with manager(mode, keep_base=keep_base) as made:
        for step in range(7):
            wanted.append(facts(state))
            made.save(step, state)
            for value in state.values():
                value.mul_(1.01).add_(step)
        for step in range(7):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step
            assert differing(facts(made.restore(step, device="cuda")), wanted[step]) == [], step


@MODES
def test_everything_odd_is_staged(mode):
    """Views, conjugates, parameters and tied tensors are saved with their values at the call."""
    state = odd_ones("cuda")
    wanted = facts(state)
    with manager(mode) as made:
        made.save(0, state)
        with torch.no_grad():
            for value in state.values():
                if 0 not in value.stride():
                    value.zero_()
        assert differing(facts(made.restore(0)), wanted) == []


def test_changes_by_work_that_was_enqueued_before(snapshots):
    """Kernels that have not run yet when `save` is called belong to the snapshot; those enqueued after it do not."""
    w, small = torch.zeros(2 * MIB, device="cuda"), torch.zeros(5, device="cuda")
    for step in range(4):
        torch.cuda._sleep(SECOND // 20)
        w.fill_(step + 1)
        small.fill_(step + 1)
        snapshots.save(step, {"w": w, "small": small})
        w.fill_(-1)
        small.fill_(-1)
    for step in range(4):
        got = snapshots.restore(step)
        assert (got["w"] == step + 1).all()
        assert (got["small"] == step + 1).all()


def test_changes_by_a_replayed_graph(snapshots):
    w, small = torch.zeros(MIB, device="cuda"), torch.zeros(3, device="cuda")
    snapshots.save(0, {"w": w, "small": small}).result(60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.add_(1)
        small.add_(1)
    w.zero_()
    small.zero_()
    for step in range(1, 6):
        graph.replay()
        snapshots.save(step, {"w": w, "small": small})
        graph.replay()
        graph.replay()
    for step in range(1, 6):
        got = snapshots.restore(step)
        assert (got["w"] == 3 * step - 2).all(), step
        assert (got["small"] == 3 * step - 2).all(), step


def test_training_on_another_stream(snapshots):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        w, small, view = (torch.zeros(n, device="cuda") for n in (MIB, 7, 50_000))
        for step in range(5):
            torch.cuda._sleep(SECOND // 40)
            for value in (w, small, view):
                value.fill_(step)
            snapshots.save(step, {"w": w, "small": small, "view": view.view(500, 100).t()})
            for value in (w, small, view):
                value.fill_(-1)
    for step in range(5):
        assert all((value == step).all() for value in snapshots.restore(step).values()), step


def test_streams_may_change_between_saves(snapshots):
    w = torch.zeros(MIB, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda._sleep(SECOND // 100)
            w.fill_(step)
            snapshots.save(step, {"w": w})
            w.fill_(-1)
    for step in range(6):
        assert (snapshots.restore(step)["w"] == step).all(), step


def test_a_tensor_that_is_freed_right_after(snapshots):
    for step in range(4):
        torch.cuda._sleep(SECOND // 50)
        state = {"w": torch.full((MIB,), float(step), device="cuda"), "s": torch.full((9,), float(step), device="cuda")}
        state["t"] = torch.full((300, 200), float(step), device="cuda").t()
        snapshots.save(step, state)
        del state
        for _ in range(3):
            torch.full((MIB,), -1.0, device="cuda")
    for step in range(4):
        assert all((value == step).all() for value in snapshots.restore(step).values()), step


def test_a_tensor_of_another_stream_that_is_freed_right_after(snapshots):
    """A snapshot holds the values of a tensor even if another one overwrites its freed memory.

    torch gives the memory at once to the next tensor of its stream, which does not wait for the training's stream.
    """
    side = torch.cuda.Stream()
    for step in range(3):
        with torch.cuda.stream(side):
            state = {"w": torch.full((3 * MIB,), float(step), device="cuda")}
        torch.cuda.synchronize()
        torch.cuda._sleep(SECOND // 10)
        snapshots.save(step, state)
        del state
        with torch.cuda.stream(side):
            torch.full((3 * MIB,), -1.0, device="cuda")
        assert (snapshots.restore(step)["w"] == step).all(), step


@pytest.mark.parametrize("mode", ["device", "host"])
def test_save_waits_for_nothing_on_the_device(mode):
    state = {
        "w": floats(4 * MIB, 1, "cuda"),
        "small": floats(9, 2, "cuda"),
        "t": floats(60_000, 3, "cuda").view(300, 200).t(),
    }
    with manager(mode, chunk_bytes=MIB) as made:
        for step in range(4):  # after these, buffers, kernels and streams exist
            made.save(step, state).result(60)
            drift(state, step)
        made.wait_until_finished()
        torch.cuda.synchronize()
        torch.cuda._sleep(SECOND)
        began = time.monotonic()
        handle = made.save(4, state)
        took = time.monotonic() - began
        busy = torch.cuda.Event()
        busy.record()
        assert not busy.query(), f"save took {took:.3f} s"
        wanted = facts(state)
        handle.result(60)
        assert differing(facts(made.restore(4)), wanted) == []


def test_auto_looks_at_free_memory(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "snapstore")
    state = {"w": floats(MIB, 1, "cuda")}
    _, total = torch.cuda.mem_get_info()
    for free, mode in ((10**11, "device"), (MIB, "host")):
        torch.cuda.empty_cache()
        caplog.clear()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None, free=free: (free, total))
        with manager("auto") as made:
            for step in range(3):
                made.save(step, state).result(60)
                drift(state, step)
            said = [record.getMessage() for record in caplog.records if "staging=" in record.getMessage()]
            assert len(said) == 1, said
            assert said[0].startswith(f"staging={mode} on cuda:0"), said
            wanted = facts(state)
            made.save(3, state)
            assert differing(facts(made.restore(3)), wanted) == []


def test_auto_decides_again_when_the_state_grows(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "snapstore")
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    # room for the work and for 2 x 40 MB, not for 2 x 400 MB
    free = int((staging.WORK_BYTES + 400 * 10**6) / staging.AUTO_SHARE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, total))
    with manager("auto", chunk_bytes=MIB) as made:
        made.save(0, {"w": floats(10_000_000, 1, "cuda")}).result(60)
        state = {"w": torch.zeros(100_000_000, device="cuda")}
        torch.cuda.empty_cache()
        made.save(1, state).result(60)
        assert not made.restore(1, device="cuda")["w"].any()
    said = [record.getMessage().split()[0] for record in caplog.records if record.getMessage().startswith("staging=")]
    assert said == ["staging=device", "staging=host"]


def test_bases_across_changes_of_mode(monkeypatch):
    """Copies may lie on the device, then in host memory, and on the device again: deltas use the right bases."""
    modes = ["device", "device", "host", "host", "device", "host", "device", "device"]

    def mode(self, sources, layout, spare, base):
        self._state_bytes[sources.device] = int(sources.nbytes.sum())
        self._modes[sources.device] = modes[step]
        return modes[step]

    monkeypatch.setattr(staging.DeviceStaging, "_mode", mode)
    state, wanted = {"a": floats(200_000, 1, "cuda"), "b": typed("bfloat16", (90_001,), 2, "cuda", "floats")}, []
    with manager("auto") as made:
        for step in range(len(modes)):  # `mode` reads `step`
            wanted.append(facts(state))
            snapshot = made.save(step, state).result(60)
            assert snapshot.depth == step or step > 5, "a delta to the snapshot before"
            drift(state, step)
        for step in range(len(modes)):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step
        assert made.repository.check("restore").ok


def test_tensors_that_move_between_host_and_device():
    a = floats(100_000, 1)
    with manager("device") as made:
        for step in range(6):
            wanted = facts({"a": a})
            made.save(step, {"a": a.cuda() if step % 3 else a}).result(60)
            assert differing(facts(made.restore(step)), wanted) == []
            drift(a, step)


def test_tensors_that_come_go_and_change_their_size(snapshots):
    for step, sizes in enumerate([(50_000, 9), (50_000, 60_000), (10, 60_000), (50_001,), (), (50_001, 7000, 7000)]):
        state = {str(i): floats(size, step + i, "cuda") for i, size in enumerate(sizes)}
        wanted = facts(state)
        snapshots.save(step, state)
        assert differing(facts(snapshots.restore(step)), wanted) == [], step


def test_only_small_tensors(snapshots):
    for step in range(3):
        state = {str(i): floats(i + 1, step + i, "cuda") for i in range(100)}
        wanted = facts(state)
        snapshots.save(step, state)
        for value in state.values():
            value.zero_()
        assert differing(facts(snapshots.restore(step)), wanted) == []


def test_many_tensors(snapshots):
    state = {str(i): floats(1100 + i, i, "cuda") for i in range(1500)}
    wanted = facts(state)
    snapshots.save(0, state)
    torch._foreach_zero_(list(state.values()))
    assert differing(facts(snapshots.restore(0)), wanted) == []


@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_synchronous_manager(mode):
    state = {"a": floats(100_000, 1, "cuda"), "s": floats(5, 2, "cuda"), "c": floats(5000, 3)}
    with manager(mode, async_save=False) as made:
        for step in range(4):
            assert made.save(step, state).result().depth == step
            assert differing(facts(made.restore(step)), facts(state)) == []
            drift(state, step)


def test_a_save_while_a_graph_is_captured_is_refused(snapshots):
    w = torch.zeros(MIB, device="cuda")
    snapshots.save(0, {"w": w}).result(60)
    snapshots.wait_until_finished()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.add_(1)
        with pytest.raises(InvalidInputError, match="captured"):
            snapshots.save(1, {"w": w})
        w.add_(1)
    graph.replay()
    assert (w == 2).all(), "the capture goes on"
    snapshots.save(2, {"w": w})
    assert (snapshots.restore(2)["w"] == 2).all()
    assert snapshots.all_steps() == [0, 2]


def test_a_failed_save_is_no_base(monkeypatch, snapshots):
    from snapstore import StorageError

    state = {"a": floats(200_000, 1, "cuda")}
    snapshots.save(0, state).result(60)
    drift(state, 0)
    with monkeypatch.context() as patch:

        def put(self, key, data):
            raise StorageError("on purpose")

        patch.setattr(MemoryStore, "put", put)
        with pytest.raises(StorageError):
            snapshots.save(1, state).result(60)
        with pytest.raises(StorageError):
            snapshots.wait_until_finished()
    drift(state, 1)
    wanted = facts(state)
    assert snapshots.save(2, state).result(60).depth == 1
    assert differing(facts(snapshots.restore(2)), wanted) == []


def test_several_managers_in_one_process():
    """Managers of two repositories, and two of one repository, all work at once."""
    shared = repository()
    states = [{"w": floats(300_000, i, "cuda"), "s": floats(9, i, "cuda")} for i in range(4)]
    makers = [manager("device"), manager("host"), SnapshotManager(shared, run="x", staging="device"),
              SnapshotManager(shared, run="y", staging="host")]  # fmt: skip
    wanted = []
    try:
        for step in range(5):
            wanted.append([facts(state) for state in states])
            for made, state in zip(makers, states, strict=True):
                made.save(step, state)
                drift(state, step)
        for step in range(5):
            for made, want in zip(makers, wanted[step], strict=True):
                assert differing(facts(made.restore(step, device="cuda")), want) == []
    finally:
        for made in makers:
            made.close()
        shared.close()


def test_restores_while_a_save_runs():
    state = {"w": floats(2 * MIB, 1, "cuda")}
    with repository(chunk_bytes=65_536) as shared, SnapshotManager(shared, run="r", staging="device") as made:
        wanted = facts(state)
        made.save(0, state).result(60)
        for step in range(1, 5):
            drift(state, step)
            made.save(step, state)
            assert differing(facts(shared.restore("r@0", device="cuda")), wanted) == []


def test_streams_are_not_used_up():
    """Later saves take no streams of torch's pool: it has 32 streams, and soon gives out those of the user again."""
    state = {"w": floats(300_000, 1, "cuda")}
    with manager("device", options=OPTIONS) as made:
        for step in range(3):
            made.save(step, state).result(60)
            drift(state, step)
        made.wait_until_finished()
        before = torch.cuda.Stream().cuda_stream
        taken = [torch.cuda.Stream().cuda_stream for _ in range(31)]
        assert before not in taken
        for step in range(3, 8):
            made.save(step, state).result(60)
            drift(state, step)
        assert torch.cuda.Stream().cuda_stream == before, "the saves took streams of the pool"


@MODES
def test_metrics_on_the_device(mode):
    """A metric has the value of the work enqueued before the call; later work does not change it.

    A metric must be one real number.
    """
    w, loss = floats(MIB, 1, "cuda"), torch.zeros(1, device="cuda", requires_grad=True)
    with manager(mode) as made:
        for step, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.int64]):
            value = (loss * 2).detach().to(dtype)
            torch.cuda._sleep(SECOND // 20)
            value.add_(step)
            made.save(step, {"w": w}, metrics={"loss": value, "graph": (loss + step).sum(), "plain": 0.5})
            value.fill_(99)
        made.wait_until_finished()
        for step in range(4):
            found = made.repository.snapshot(f"{made.run}@{step}").metrics
            assert found == {"loss": step, "graph": step, "plain": 0.5}
        packed = torch.ones(1, device="cuda", dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # two numbers
        for wrong in (torch.ones(2, device="cuda"), torch.ones(1, device="cuda", dtype=torch.complex64), packed):
            with pytest.raises(InvalidInputError, match="metric 'loss': expected"):
                made.save(9, {"w": w}, metrics={"loss": wrong})


def test_a_metric_does_not_stall_a_save():
    w, loss = floats(10 * MIB, 1, "cuda"), torch.zeros(1, device="cuda")
    with manager("device") as made:
        for step in range(3):
            made.save(step, {"w": w}, metrics={"loss": loss})
            made.wait_until_finished()
            w += 1  # for digests of tensors that may be unchanged, a save waits
        torch.cuda.synchronize()
        computed = torch.cuda.Event()
        torch.cuda._sleep(5 * SECOND)
        loss.fill_(5)
        computed.record()
        began = time.monotonic()
        handle = made.save(3, {"w": w}, metrics={"loss": loss})
        took = time.monotonic() - began
        assert not computed.query(), f"save took {took:.3f} s"
        assert handle.result().metrics == {"loss": 5}
