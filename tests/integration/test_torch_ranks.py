"""TorchRanks: processes of a gloo job exchange messages, meet within bounded time, and notice a stopped rank 0."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import suppress

import pytest

from kit.forked import Forked, wait_all
from kit.processes import environment, free_port
from snapstore.distributed import torch_ranks

BEGIN = """
    import os, pathlib, signal, sys, time
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from snapstore import InvalidInputError, RanksError, SnapshotManager
    from snapstore.distributed import torch_ranks
    from snapstore.distributed.torch_ranks import TorchRanks

    place, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=timedelta(seconds=100))
"""


def run(program, count, folder, *, codes=None, stopped=(), place=None):
    """Run a program on so many ranks; check their exit codes, which are 0 by default; return their outputs.

    The stopped ranks are killed when the others have ended, and their exit codes are not checked.
    """
    program = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    env = environment(GLOO_SOCKET_IFNAME="lo", SNAPSTORE_THREADS="1")
    place = place or f"file://{folder}/rendezvous"
    processes = [
        Forked("-c", program, place, str(rank), str(count), log=folder / f"log.{rank}", env=env)
        for rank in range(count)
    ]
    wait_all(processes, 110, stopped=stopped)
    said = [process.text() for process in processes]
    for rank, code in enumerate(codes or [0] * count):
        assert rank in stopped or processes[rank].poll() == code, "\n".join(said)
    return said


@pytest.mark.slow
def test_messages_between_processes(tmp_path):
    """A key is set once, can be read on all ranks, and can be removed; each process group has its own channel."""
    program = """
        ranks = TorchRanks()
        assert (ranks.rank, ranks.count, len(ranks.attempt)) == (rank, 3, 32)
        assert ranks.look("nothing") is None and ranks.look_all(["nothing"]) is None and ranks.look_all([]) == []
        ranks.post(f"from/{rank}", bytes([rank, 0, 255]))
        ranks.post(f"from/{rank}", b"again")
        keys = [f"from/{r}" for r in range(3)]
        while (found := ranks.look_all(keys)) is None:
            time.sleep(0.01)
        assert found == [bytes([r, 0, 255]) for r in range(3)]
        assert all(silence < 30 for silence in ranks.silences(range(3)))
        ranks.post("large", bytes(3_000_000)) if rank == 1 else None
        while ranks.look("large") is None:
            time.sleep(0.01)
        assert len(ranks.look("large")) == 3_000_000
        pair = dist.new_group([1, 2])
        if rank:
            two = TorchRanks(pair)
            assert (two.rank, two.count) == (rank - 1, 2) and two.attempt != ranks.attempt
            assert two.look("from/0") is None
            two.post(f"mine/{rank}", b"x")
            while two.look_all(["mine/1", "mine/2"]) is None:
                time.sleep(0.01)
            two.close()
        dist.barrier()
        ranks.remove([f"from/{rank}"])
        assert ranks.look(f"from/{rank}") is None
        ranks.close()
        ranks.close()
        dist.destroy_process_group()
        print("done", rank)
    """
    run(program, 3, tmp_path)


@pytest.mark.slow
def test_messages_that_the_server_of_a_tcp_store_does_not_accept(tmp_path):
    """torch's server drops the connection of a client that sends more than 8 MiB at once."""
    program = """
        from snapstore.distributed import split_values

        ranks = TorchRanks(silent_s=60.0)
        large = {r: bytes([r]) * (9 << 20) + b"end" for r in range(2)}
        ranks.post(f"trees/{rank}", large[rank])
        ranks.post(f"trees/{rank}", large[1 - rank])
        ranks.post(f"small/{rank}", b"x")
        ranks.post(f"odd/{rank}", split_values.MARK)
        keys = ["trees/0", "small/1", "trees/1", "odd/0", "odd/1"]
        while (found := ranks.look_all(keys)) is None:
            time.sleep(0.01)
        assert found == [large[0], b"x", large[1], split_values.MARK, split_values.MARK]
        assert ranks.look(f"trees/{1 - rank}") == large[1 - rank]
        ranks.post("both", large[rank])  # the first one counts, also if both come at once
        assert (both := ranks.look("both")) in large.values()
        dist.barrier()
        assert ranks.look("both") == both
        split_values.MAX_BYTES = 9 << 20
        try:
            ranks.post("too large", large[rank])
        except RanksError as error:
            assert "'too large'" in str(error) and "expected at most 9" in str(error), error
        else:
            raise AssertionError("no error")
        dist.barrier()
        ranks.remove([f"trees/{rank}", f"odd/{rank}", "both"])
        dist.barrier()
        assert ranks.look_all(["small/0", "trees/0"]) is None and ranks.look("trees/1") is None
        count = ranks._messages.call(lambda store: store.num_keys())
        assert count < 10, count  # no piece is left
        dist.barrier()
        ranks.close()
        dist.destroy_process_group()
        print("done", rank)
    """
    run(program, 2, tmp_path)


@pytest.mark.slow
def test_times_without_an_end_and_groups_that_are_none(tmp_path):
    program = f"""
        for group in ("all", [0, 1], 0, True):
            try:
                TorchRanks(group)
            except InvalidInputError as error:
                assert f"group {{group!r}}: expected a process group of this job" in str(error), error
            else:
                raise AssertionError(group)
        for limit_s in (float("inf"), 10**400):
            ranks = TorchRanks(silent_s=limit_s, total_s=limit_s)
            with SnapshotManager({str(tmp_path / "repository")!r}, run="a", ranks=ranks) as snapshots:
                snapshots.save(1, {{"a": torch.ones(3000)}}).result()
                assert snapshots.restore()["a"].sum() == 3000
        dist.barrier()
    """
    run(program, 2, tmp_path)


def test_groups_of_many_ranks_have_names_of_their_own():
    """Ranks of groups with one name would take the messages of each other while they meet."""
    groups = [range(64), [0, 63], [0, *range(31, 64)], [0, *range(32, 64)], range(4096), [*range(4094), 4095]]
    names = [torch_ranks._name_of(list(ranks)) for ranks in groups]
    assert len(set(names)) == len(groups)
    assert max(map(len, names)) < 80


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_ranks_that_do_not_come_are_named(tmp_path, absent):
    program = f"""
        torch_ranks.COME_S = torch_ranks.WORD_S = 1.0
        if rank != {absent}:
            try:
                TorchRanks()
            except RanksError as error:
                assert "rank {absent} of 3: did not come within 1 s" in str(error), error
                assert "ranks=False" in str(error) and error.ranks == ({absent},)
                print("named")
        dist.barrier()
    """
    said = run(program, 3, tmp_path)
    assert sum("named" in text for text in said) == 2, "\n".join(said)


@pytest.mark.slow
def test_ranks_meet_after_some_did_not_come_and_rank_0_closes_last(tmp_path):
    """First rank 1 comes alone, then rank 0. A channel that is given to a manager has no other owner."""
    program = f"""
        torch_ranks.COME_S, torch_ranks.WORD_S = 0.6, 0.2
        for alone in (1, 0, 0):
            if rank == alone:
                try:
                    TorchRanks()
                except RanksError as error:
                    assert error.ranks == (1 - alone,), error
                    print("missed")
            dist.barrier()
        torch_ranks.COME_S = 60.0
        if rank:
            time.sleep(0.3)  # rank 0 must not take an earlier call of this one for the next
        began = time.monotonic()
        for step in range(2):
            with SnapshotManager({str(tmp_path / "repository")!r}, run="a", ranks=TorchRanks()) as snapshots:
                snapshots.save(step, {{"a": torch.ones(3)}}).result()
                if rank:
                    time.sleep(0.5)
                assert snapshots.restore_into({{"a": torch.zeros(3)}}).step == step
        assert time.monotonic() - began < 40
        dist.barrier()
    """
    said = run(program, 2, tmp_path)
    assert [text.count("missed") for text in said] == [2, 1], "\n".join(said)


@pytest.mark.slow
def test_ranks_meet_in_a_store_that_an_earlier_attempt_has_used(tmp_path):
    """torchrun keeps the store when it starts killed processes again, also if there are more or fewer of them."""
    program = """
        groups = [dist.new_group(list(range(size))) for size in (2, 3)]
        torch_ranks._name_of = lambda ranks: "one name"

        def killed(look, limit_s):
            look()
            raise SystemExit(9)

        for early in range(3):  # this rank is killed while it waits for the others
            if rank == early:
                polled, torch_ranks._polled = torch_ranks._polled, killed
                try:
                    TorchRanks(groups[1])
                except SystemExit:
                    print("killed")
                torch_ranks._polled = polled
            dist.barrier()
            for size in (3, 2, 3):
                if rank == 2:
                    time.sleep(0.3)
                if rank < size:
                    began = time.monotonic()
                    ranks = TorchRanks(groups[size - 2])
                    ranks.post(f"from/{rank}", b"")
                    while ranks.look_all([f"from/{r}" for r in range(size)]) is None:
                        assert time.monotonic() - began < 20
                        time.sleep(0.01)
                    ranks.close()
                dist.barrier()
    """
    said = run(program, 3, tmp_path)
    assert [text.count("killed") for text in said] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
def test_a_rank_0_that_does_not_answer_is_an_error_in_bounded_time(tmp_path, sent):
    """The calls of a TCPStore block without a limit if its server is stopped."""
    program = f"""
        ranks = TorchRanks(silent_s=4.0)
        ranks.post(f"pid/{{rank}}", str(os.getpid()).encode())
        keys = [f"pid/{{r}}" for r in range(2)]
        while (pids := ranks.look_all(keys)) is None:
            time.sleep(0.01)
        if rank == 0:
            time.sleep(600)
        time.sleep(0.3)
        os.kill(int(pids[0]), signal.{sent})
        def stands(pid):  # a thread may answer one more request before it notices the signal
            try:
                tasks = list(pathlib.Path("/proc", pid, "task").iterdir())
                return all((t / "stat").read_text().rpartition(")")[2].split()[0] in "TZX" for t in tasks)
            except OSError:  # a thread has ended, or the process has
                return not pathlib.Path("/proc", pid).exists()
        while not stands(pids[0].decode()):
            time.sleep(0.01)
        began = time.monotonic()
        for call in (lambda: ranks.look("x"), lambda: ranks.post("x", b""), lambda: ranks.silences([0])):
            try:
                call()
            except RanksError as error:
                assert "rank 0" in str(error) and "start the job again" in str(error), error
                assert error.ranks == (0,)
            else:
                raise AssertionError("no error")
        assert time.monotonic() - began < 300
        ranks.close()
        print("done")
    """
    run(program, 2, tmp_path, stopped=[0])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
def test_a_rank_ends_in_time_after_rank_0_has_ended_or_stopped(tmp_path, sent):
    """Each call waits up to `silent_s`, which is ten minutes here, for a rank 0 that is stopped."""
    program = f"""
        from snapstore.distributed import preemption
        from snapstore import SnapstoreError

        preemption.LATE_S = 2.0
        snapshots = SnapshotManager({str(tmp_path / "repository")!r}, run="a", save_interval_steps=1000)
        snapshots.handle_preemption(timeout=3)
        assert not snapshots.should_save(1)
        pids = [None] * 2
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            time.sleep(600)
        os.kill(pids[0], signal.{sent})
        time.sleep(6)  # the heart calls the channel each second
        print("quiet", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        began, step = time.monotonic(), 2
        while not snapshots.should_save(step):
            assert time.monotonic() - began < 60
            time.sleep(0.1)
            step += 1
        try:
            snapshots.save(step, {{"a": torch.ones(3)}})
        except (TimeoutError, SnapstoreError) as error:
            print("ended:", type(error).__name__, str(error)[:300], flush=True)
        assert time.monotonic() - began < 60, time.monotonic() - began
        os._exit(7)
    """
    said = run(program, 2, tmp_path, codes=[None, 7], stopped=[0])
    assert "ended:" in said[1], said[1]
    assert "ends by itself" in said[1], said[1]
    assert said[1].count("TCPStore.cpp") <= 3, said[1]  # torch prints a trace for each connection, not for each call


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("when", ["before its call", "after its answer"])
def test_a_rank_0_that_does_not_answer_while_the_ranks_meet(tmp_path, sent, when):
    """Rank 0 keeps the job's store too. The error names it, in bounded time."""
    program = f"""
        def strike(*_):
            os.kill(os.getpid(), signal.{sent})
            time.sleep(600)

        torch_ranks.ANSWER_S = 3.0
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            if {when == "before its call"}:
                strike()
            TorchRanks._connect = strike
        else:
            time.sleep(0.5)
        try:
            TorchRanks()
        except RanksError as error:
            assert str(error).startswith("rank "), error
            assert "rank 0" in str(error) and error.ranks == (0,), (error, error.ranks)
            assert time.monotonic() - began < 80
            print("named")
        os._exit(0)
    """
    said = run(program, 2, tmp_path, stopped=[0], place=f"tcp://127.0.0.1:{free_port()}")
    assert "named" in said[1], said[1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a save", "between saves"])
def test_the_others_notice_a_killed_rank_within_seconds(tmp_path, when):
    """Not after ten minutes without a heartbeat; also if the killed process has a child, as a DataLoader's worker."""
    program = f"""
        from snapstore.save.ranks.writer import RankWriter

        def die(*_):
            child = os.fork()
            if not child:
                time.sleep(100)
                os._exit(0)
            pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)

        snapshots = SnapshotManager({str(tmp_path / "repository")!r}, run="a", save_interval_steps=1)
        assert snapshots._job.ranks.silent_s == 600
        snapshots.save(1, {{"a": torch.ones(3000)}}).result()
        if rank == 1 and {when == "in a save"}:
            RankWriter.write = die
        elif rank == 0 and {when == "in a save"}:
            def write_for_long(writer, session, begin):
                for _ in range(600):
                    session.watch()
                    time.sleep(0.1)
            RankWriter.write = write_for_long
        elif rank == 1:
            die()
        began = time.monotonic()
        try:
            snapshots.save(2, {{"a": torch.ones(3000)}}).result()
        except RanksError as error:
            said = str(error)
            assert error.ranks == (1,) and "rank 1 of 3: its process has ended" in said, error
            assert "save a@2: " in said and "nothing was committed" in said, error
        else:
            raise AssertionError("no error")
        assert time.monotonic() - began < 20, time.monotonic() - began
        with_error = ValueError("the job ends")
        snapshots.__exit__(ValueError, with_error, None)
        assert time.monotonic() - began < 40, time.monotonic() - began
        print("done", flush=True)
        os._exit(0)  # gloo would wait for the killed rank
    """
    try:
        said = run(program, 3, tmp_path, codes=[0, -signal.SIGKILL, 0])
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert all("done" in said[rank] for rank in (0, 2)), "\n".join(said)


@pytest.mark.slow
def test_ranks_that_close_or_lose_only_a_connection_have_not_ended(tmp_path):
    """A proxy may close a connection: a living rank connects again. A stranger at the port changes nothing."""
    program = """
        from snapstore.distributed.base import ended_processes

        ranks = TorchRanks()

        def wait_until(expected):
            end = time.monotonic() + 20
            while ended_processes(ranks) != expected:
                assert time.monotonic() < end, ended_processes(ranks)
                time.sleep(0.05)

        def meet(name):
            ranks.post(f"{name}/{rank}", b"")
            while ranks.look_all([f"{name}/{r}" for r in range(3)]) is None:
                time.sleep(0.02)

        if rank == 1:
            import socket
            for said in (b"", b"GET / HTTP/1.0\\r\\n", b"x" * 99, ranks.attempt.encode() + (7).to_bytes(4, "big")):
                with socket.create_connection(ranks._tie._place, 10) as stranger:
                    stranger.sendall(said)
            ranks._tie._sock.shutdown(socket.SHUT_RDWR)
        wait_until({1})
        meet("cut")
        if rank == 1:
            ranks.beat()
        wait_until(set())
        meet("tied again")
        if rank == 2:
            ranks.close()
        else:
            time.sleep(2)
            assert ended_processes(ranks) == set()
            ranks.close()
    """
    run(program, 3, tmp_path)


@pytest.mark.slow
def test_ddp_with_batch_norm(tmp_path):
    """DDP broadcasts rank 0's buffers before a forward pass, which then changes them: at every save they differ."""
    program = f"""
        from torch.nn.parallel import DistributedDataParallel
        from snapstore import InvalidInputError

        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 70_000), torch.nn.BatchNorm1d(70_000), torch.nn.Linear(70_000, 1)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.01)
        state = {{"model": model, "optimizer": optimizer}}
        torch.manual_seed(rank)

        def saved(snapshots, step):
            "Save and restore a step; return this rank's values before, rank 0's, and those restored."
            snapshots.save(step, state)
            snapshots.wait_until_finished()
            own = {{key: value.clone() for key, value in model.state_dict().items()}}
            first = [own]
            dist.broadcast_object_list(first, 0)
            snapshots.restore_into(state)
            return own, first[0], model.state_dict()

        def unlike(a, b):
            return {{key.removeprefix("module.") for key in a if not torch.equal(a[key], b[key])}}

        with SnapshotManager({str(tmp_path / "repository")!r}, run="a") as snapshots:
            for step in range(3):
                optimizer.zero_grad()
                model(torch.randn(16, 4)).sum().backward()
                optimizer.step()
                own, first, restored = saved(snapshots, step)
                assert unlike(own, first) == ({{"1.running_mean", "1.running_var"}} if rank else set())
                assert unlike(restored, first) == set()
            with torch.no_grad():
                model.module[0].weight += rank
            try:
                snapshots.save(3, state)
                snapshots.wait_until_finished()
            except InvalidInputError as error:
                assert "rank 1: model.module.0.weight: differ from the replicas on rank 0" in str(error), error
                print("named")
        with SnapshotManager({str(tmp_path / "repository")!r}, run="a", replicas="rank0") as snapshots:
            own, first, restored = saved(snapshots, 3)
            assert unlike(own, first) == ({{"0.weight"}} if rank else set())
            assert unlike(restored, first) == set()
        dist.barrier()
    """
    said = run(program, 2, tmp_path)
    assert all("named" in text for text in said), "\n".join(said)
    assert [text.count("buffers on rank 1 differ from those on rank 0") for text in said] == [1, 0], "\n".join(said)
    assert "model.module.1.running_mean, model.module.1.running_var;" in said[0]


@pytest.mark.slow
def test_meshes_of_a_job_whose_ranks_save_in_a_group(tmp_path):
    """Meshes have the numbers of the job's ranks. Plain tensors, and messages, have those of the group."""
    program = f"""
        from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

        group = dist.new_group([1, 2, 3])
        meshes = DeviceMesh("cpu", [1, 2, 3], _init_backend=False), DeviceMesh("cpu", [1, 2], _init_backend=False)
        whole = torch.arange(36, dtype=torch.float32).reshape(6, 6)

        def of_mesh(mesh, local, placement):
            form = dict(shape=torch.Size((6, 6)), stride=(6, 1))
            return DTensor.from_local(local, mesh, [placement], run_check=False, **form)

        if rank:
            channel = TorchRanks(group)
            with SnapshotManager({str(tmp_path / "repository")!r}, run="a", ranks=channel) as snapshots:
                state = {{"rows": of_mesh(meshes[0], whole.chunk(3)[rank - 1], Shard(0)), "plain": whole + 1}}
                state["copy"] = of_mesh(meshes[0], whole, Replicate())
                snapshots.save(1, state)
                snapshots.wait_until_finished()
                # copies on the job's ranks 1 and 2, and a plain tensor on ranks 1 and 2 of the group
                state = {{"copy": of_mesh(meshes[1], whole + 2, Replicate())}} if rank in (1, 2) else {{}}
                state |= {{"other": whole + 3}} if rank in (2, 3) else {{}}
                snapshots.save(2, state)
                snapshots.wait_until_finished()
                first, second = snapshots.restore(1), snapshots.restore(2)
                assert all(torch.equal(first[name], whole + (name == "plain")) for name in ("rows", "copy", "plain"))
                assert torch.equal(second["copy"], whole + 2) and torch.equal(second["other"], whole + 3)
            channel.close()
        dist.barrier()
    """
    run(program, 4, tmp_path)


@pytest.mark.slow
def test_a_master_copy_that_is_the_memory_of_the_model(tmp_path):
    """`.float()` of a float32 parameter is its own memory: a plain tensor of each rank, and its rows of a DTensor."""
    program = f"""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(model.weight)
        fully_shard(model, mesh=mesh)
        rows = torch.arange(4.0) + 10 * rank
        for run, is_async in (("a", False), ("b", True)):
            with SnapshotManager({str(tmp_path / "repository")!r}, run=run, async_save=is_async) as snapshots:
                for step in (1, 2, 3):
                    master = {{key: value.to_local().detach().float() for key, value in model.named_parameters()}}
                    buffers = {{"running_mean": rows, "running_var": rows.clone()}}
                    buffers["w"] = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
                    snapshots.save(step, {{"model": model.state_dict(), "master": master, "m": buffers}})
                    snapshots.wait_until_finished()
                    found = snapshots.restore(step)
                    assert found["m"]["w"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13], found
                    assert found["m"]["running_mean"].tolist() == [0, 1, 2, 3], found
                    assert torch.equal(found["model"]["weight"], torch.zeros(4, 4)), found
                    assert torch.equal(found["master"]["weight"], torch.zeros(2, 4)), found
        dist.barrier()
    """
    run(program, 2, tmp_path)
