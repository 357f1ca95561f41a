"""The layout of tensors in memory is state: what torch.save keeps of it, every way out of a snapshot gives back."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from kit import rank_saves
from kit.states import through_torch
from snapstore import KeepLast, PerRank, Repository, SaveOptions, SnapshotManager
from snapstore.convert import export_snapshot
from snapstore.distributed.local import local_ranks
from snapstore.restore.streaming import TensorReader
from snapstore.state.values.tensors import dim_order_of, inverse

OPTIONS = SaveOptions(threads=2)


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layouts():
    """Return tensors and arrays of every layout without gaps, in chunks and inline."""
    return {
        "channels_last": noise(4, 8, 5, 5).to(memory_format=torch.channels_last),
        "1x1": noise(8, 16, 1, 1).to(memory_format=torch.channels_last),
        "1x1, one channel": noise(8, 1, 1, 1).to(memory_format=torch.channels_last),
        "channels_last_3d": noise(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "transposed": noise(300, 20, dtype=torch.bfloat16).t(),
        "inline": noise(3, 2).t(),
        "permuted": noise(4, 5, 6, dtype=torch.float64).permute(2, 0, 1),
        "conjugated": torch.complex(noise(6, 4), noise(4, 6).t()).t().conj(),
        "fortran": np.asfortranarray(np.arange(2000.0).reshape(40, 50)),
        "fortran, inline": np.asfortranarray(np.arange(6, dtype="i4").reshape(2, 3)),
        "parameter": torch.nn.Parameter(noise(30, 40).t()),
        "in order": noise(30, 40),
        "empty": torch.empty(0, 3).t(),
    }


def form(value):
    """Return all that must be equal: type, dtype, shape, strides and bits."""
    strides = value.strides if isinstance(value, np.ndarray) else value.stride() if value.numel() else None
    bits = value.tobytes() if isinstance(value, np.ndarray) else value.detach().resolve_conj().reshape(-1).tolist()
    return type(value), str(value.dtype), tuple(value.shape), strides, bits


def forms(state):
    return {name: form(value) for name, value in state.items()}


def detached(state):
    """Return a state with tensors in place of parameters."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@pytest.fixture
def saved(tmp_path):
    """A repository with one snapshot of all layouts in small chunks, and the state."""
    state = layouts()
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        repo.save(state, run="r", step=1)
        yield repo, state


def test_restore_gives_the_layouts_of_torch(saved):
    repo, state = saved
    expected = forms(through_torch(state))
    assert forms(repo.restore("r@1")) == expected
    assert dim_order_of(repo.restore("r@1")["1x1"]) == (0, 2, 3, 1), (
        "a convolution chooses the layout of its output by these strides"
    )


def test_views_with_gaps_keep_their_order_on_every_way_out(tmp_path):
    """The first singular vectors are such a view; GaLore keeps them, and products with them round by their layout."""
    state = {"vectors": noise(40, 40).t()[:3], "inline": noise(3, 3).t()[:2], "half": noise(2, 8, 4, 4)[:, :3]}
    state["channels_last"] = noise(2, 8, 4, 4).to(memory_format=torch.channels_last)[:, :3]
    dense = {name: value.permute(o).contiguous().permute(inverse(o)) for name, value in state.items()
             for o in [dim_order_of(value) or tuple(range(value.ndim))]}  # fmt: skip
    assert dense["vectors"].stride() == (1, 3)
    assert dense["channels_last"].stride() == (48, 1, 12, 3)
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        repo.save(state, run="r", step=1)
        assert forms(repo.restore("r@1")) == forms(dense)
        assert forms({name: handle.read() for name, handle in repo.tensors("r@1").items()}) == forms(dense)
        export_snapshot(repo, "r@1", tmp_path / "e.pt", to="torch")
        assert forms(torch.load(tmp_path / "e.pt", weights_only=True)) == forms(dense)
        with SnapshotManager(repo, run="m") as snapshots:
            for step in range(3):  # the second save knows the state
                state["vectors"].add_(1.0)
                snapshots.save(step, state)
            snapshots.wait_until_finished()
            assert torch.equal(snapshots.restore()["vectors"], state["vectors"])
            assert snapshots.restore()["vectors"].stride() == (1, 3)
        repo.restore_into("r@1", state)
        assert state["vectors"].stride() == (1, 40)
        assert torch.equal(state["vectors"], dense["vectors"])


def test_lazy_and_streamed_tensors_have_them(saved):
    repo, state = saved
    expected = forms(detached(through_torch(state)))
    assert forms({name: handle.read() for name, handle in repo.tensors("r@1").items()}) == expected
    handle = repo.tensors("r@1")["channels_last"]
    assert form(handle[1:3, ..., ::2]) == form(state["channels_last"][1:3, ..., ::2].clone())
    assert form(handle[1]) == form(state["channels_last"][1].contiguous())
    streamed = dict(TensorReader(repo.context, "r@1"))
    assert forms(detached(streamed)) == expected


def test_exports_have_them(saved, tmp_path):
    repo, state = saved
    export_snapshot(repo, "r@1", tmp_path / "x.pt", to="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, value in through_torch(state).items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
        assert form(found[name])[1:] == form(value)[1:], name
    export_snapshot(repo, "r@1", tmp_path / "x.safetensors", to="safetensors")
    from safetensors.torch import load_file

    for name, value in load_file(tmp_path / "x.safetensors").items():
        assert value.tolist() == state[name].tolist()
    export_snapshot(repo, "r@1", tmp_path / "dcp", to="dcp")
    target = {name: torch.zeros_like(v) for name, v in state.items() if isinstance(v, torch.Tensor)}
    with pytest.warns(match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(value, state[name]) for name, value in target.items())


def test_a_nested_value_of_dcp_has_them(saved, tmp_path):
    """DCP pickles a tuple as one value; its tensors are written through the ones that have no values yet."""
    repo, state = saved
    repo.save({"pair": (state["channels_last"], state["transposed"])}, run="t", step=1)
    export_snapshot(repo, "t@1", tmp_path / "dcp", to="dcp")
    target = {"pair": None}
    with pytest.warns(match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert [form(one) for one in target["pair"]] == [form(state[name]) for name in ("channels_last", "transposed")]


def test_a_stream_of_tensors_keeps_them(tmp_path):
    state = {name: value for name, value in layouts().items() if name != "parameter"}
    with Repository.create(tmp_path / "r", options=OPTIONS) as repo:
        repo.save(iter(state.items()), run="r", step=1)
        assert forms(repo.restore("r@1")) == forms(through_torch(state))


class Holder:
    """An object that takes the arrays of its state as they are, as optimizers do."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_gets_arrays_of_the_stored_layout(saved):
    """torch.load and load_state_dict would give it these; its own arrays may have another layout."""
    repo, state = saved
    repo.save({"o": Holder(state)}, run="o", step=1)
    held = {
        name: value.copy("C") if isinstance(value, np.ndarray) else torch.zeros_like(value).contiguous()
        for name, value in state.items()
    }
    target = Holder(held)
    repo.restore_into("o@1", {"o": target})
    assert forms(target.state) == forms(through_torch(state))
    again = Holder({name: value.copy("K") if isinstance(value, np.ndarray) else value for name, value in held.items()})
    repo.save({"o": again}, run="c", step=1)  # and the other way round
    target = Holder(layouts())
    repo.restore_into("c@1", {"o": target})
    assert forms(target.state) == forms(through_torch(held))


def test_a_target_of_another_layout_is_filled_in_place(saved):
    repo, state = saved
    target = {
        name: np.zeros_like(value, order="C") if isinstance(value, np.ndarray) else torch.zeros_like(value).contiguous()
        for name, value in state.items()
    }
    before = dict(target)
    repo.restore_into("r@1", target)
    for name, value in target.items():
        assert value is before[name]
        assert (value == state[name]).all()


def test_a_module_keeps_its_layout(tmp_path):
    """A module copies values, as torch's load_state_dict does."""
    net = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    with Repository.create(tmp_path / "r", options=OPTIONS) as repo:
        repo.save({"net": net}, run="r", step=1)
        target = torch.nn.Conv2d(3, 8, 3)
        weight = target.weight
        repo.restore_into("r@1", {"net": target})
        assert target.weight is weight
        assert weight.is_contiguous()
        assert torch.equal(weight, net.weight)


class Recorder(torch.nn.Module):
    """A module with extra state, and a buffer that its own loader replaces."""

    def __init__(self, value):
        super().__init__()
        self.extra = value
        self.register_buffer("queue", value)

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]

    def _load_from_state_dict(self, state, prefix, *args):
        self.queue = state[f"{prefix}queue"]


def test_what_a_module_loads_itself_has_the_stored_layout(tmp_path):
    module = Recorder(torch.arange(12.0).view(4, 3).t())
    by_torch, target = Recorder(torch.zeros(3, 4)), Recorder(torch.zeros(3, 4))
    by_torch.load_state_dict(through_torch(module.state_dict()))
    with Repository.create(tmp_path / "r", options=OPTIONS) as repo:
        repo.save({"m": module}, run="r", step=1)
        repo.restore_into("r@1", {"m": target})
    assert forms(target.state_dict()["_extra_state"]) == forms(by_torch.state_dict()["_extra_state"])
    assert target.queue.stride() == by_torch.queue.stride() == (1, 3)
    assert torch.equal(target.queue, module.queue)


@pytest.mark.parametrize("staged", [True, False])
def test_a_layout_that_changes_between_saves_is_noticed(tmp_path, staged):
    """The second save of a manager recognises the state, and only compares it."""
    states = [layouts(), layouts(), layouts(), layouts()]
    states[1]["transposed"] = states[1]["transposed"].contiguous()
    states[1]["1x1"] = states[1]["1x1"].contiguous()
    states[1]["fortran"] = np.ascontiguousarray(states[1]["fortran"])
    states[3]["in order"] = states[3]["in order"].t().contiguous().t()
    with SnapshotManager(tmp_path / "r", run="r", async_save=staged, options=OPTIONS) as manager:
        for step, state in enumerate(states):
            manager.save(step, state).result()
        for step, state in enumerate(states):
            assert forms(manager.restore(step)) == forms(through_torch(state)), step


def test_equal_bytes_in_another_layout_are_another_manifest(saved):
    repo, state = saved
    other = repo.save({**state, "transposed": state["transposed"].contiguous()}, run="r", step=2)
    assert other.new_chunks == 0, "bytes are stored in logical order"
    assert [ref.sha256 for ref in other.manifests] != [ref.sha256 for ref in repo.snapshot("r@1").manifests]
    same = repo.save({**state, "transposed": state["transposed"].contiguous()}, run="r", step=3)
    assert [ref.sha256 for ref in same.manifests] == [ref.sha256 for ref in other.manifests]
    assert repo.restore("r@1")["transposed"].stride() == state["transposed"].stride()
    assert repo.restore("r@2")["transposed"].is_contiguous()


def test_verbs_that_rewrite_keep_them(tmp_path):
    state = layouts()
    expected = forms(through_torch(state))
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        for step, seed in ((1, 1), (2, 2), (3, 2)):
            waste = torch.randn(60_000, generator=torch.Generator().manual_seed(seed))
            repo.save({"kept": state | {"waste": waste}}, run="r", step=step)
        repo.tag("r@2", "first")
        repo.forget([KeepLast(1)], run="r")
        repo.gc()
        assert repo.compact().rewritten
        repo.copy(to=tmp_path / "copy")
    for folder in (tmp_path / "r", tmp_path / "copy"):
        with Repository.open(folder) as there:
            for ref in ("r@first", "r@3"):
                found = forms(there.restore(ref)["kept"])
                assert {name: found[name] for name in expected} == expected
            assert not there.check("restore").problems


def test_an_optimizer_trains_on_as_after_torch_load(tmp_path):
    """Fused kernels walk the memory of parameters, gradients and moments together."""

    def made():
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)]
        net = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

    def losses(net, optimizer, steps):
        found = []
        for step in steps:
            torch.manual_seed(step)
            loss = (net(torch.randn(2, 3, 8, 8)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    net, optimizer = made()
    losses(net, optimizer, range(4))
    by_torch = through_torch({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    with Repository.create(tmp_path / "r", options=OPTIONS) as repo:
        repo.save({"net": net, "optimizer": optimizer}, run="r", step=4)
        expected = losses(net, optimizer, range(4, 8))
        for way in ("torch", "restore", "restore_into", "a rollback"):
            if way != "a rollback":
                net, optimizer = made()
            if way.startswith("restore_into") or way == "a rollback":
                repo.restore_into("r@4", {"net": net, "optimizer": optimizer})
            else:
                state = by_torch if way == "torch" else repo.restore("r@4")
                net.load_state_dict(state["net"])
                optimizer.load_state_dict(state["optimizer"])
            assert losses(net, optimizer, range(4, 8)) == expected, way


def part(data, first):
    """Return rows of a tensor of (600, 24) as Megatron's sharded tensor."""
    return SimpleNamespace(key="", data=data, global_shape=(600, 24), global_offset=(first, 0), replica_id=0)


def of_rank(whole, rank):
    rows = whole[300 * rank : 300 * (rank + 1)]
    column_major = rows.t().contiguous().t()
    return {
        "both": part(column_major, 300 * rank),
        "one": part(column_major.clone() if rank else rows.clone(), 300 * rank),
        "plain": layouts()["channels_last"],
        "small": layouts()["inline"],
        "own": PerRank({"mine": own_of(rank)}),
    }


def own_of(rank):
    return noise(4 + rank, 6).t()


def test_ranks_agree_or_the_array_is_in_c_order(tmp_path):
    """Each rank's manifest has the layout of what it holds; what all ranks wrote in one layout comes back in it."""
    whole, folder = noise(600, 24), tmp_path / "r"
    Repository.create(folder, chunk_bytes=4096, options=OPTIONS).close()
    ranks = local_ranks(2)

    def on_all(call):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, range(2)))

    managers = on_all(lambda rank: SnapshotManager(folder, run="r", ranks=ranks[rank], options=OPTIONS))
    for step in range(3):  # from the second on the state is known
        on_all(lambda rank, step=step: managers[rank].save(step, of_rank(whole, rank)).result())
    on_all(lambda rank: managers[rank].close())
    with SnapshotManager(folder, run="r", read_only=True) as manager:
        for step in range(3):
            found = manager.restore(step, per_rank=1)
            assert form(found["both"]) == form(whole.t().contiguous().t())
            assert form(found["one"]) == form(whole)
            assert form(found["plain"]) == form(layouts()["channels_last"])
            assert form(found["small"]) == form(layouts()["inline"])
            assert form(found["own"]["mine"]) == form(own_of(1))


def test_columns_of_dtensors_come_back_in_their_order(tmp_path):
    whole = noise(64, 48).t().contiguous().t()
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        states = [lambda: {"w": rank_saves.sharded(whole, (2,), [Shard(1)])}] * 2
        snapshot, _ = rank_saves.save(repo, states, 1)
        assert form(repo.restore(snapshot.ref)["w"]) == form(whole)
