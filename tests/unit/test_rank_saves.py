"""Several ranks that do not communicate store every byte of every tensor once, however the tensor is sharded."""

import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kit import rank_saves
from kit.rank_saves import opaque, sharded
from kit.samples import some
from snapstore import PerRank, Repository, RngState, SaveOptions, SnapshotManager
from snapstore.format.blobs.pack import DEFAULT_PACK_BYTES
from snapstore.save.inputs import SaveRequest
from snapstore.save.ranks.merged_trees import digests_by_path, held_bytes
from snapstore.save.ranks.writer import request_digests
from snapstore.save.replicas import group_digests

CHUNK = 1024
A = torch.arange(64 * 40, dtype=torch.float32).reshape(64, 40).sin()
B = torch.arange(7 * 33 * 5, dtype=torch.float32).reshape(7, 33, 5).to(torch.bfloat16)
C = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def repository(tmp_path):
    with Repository.create(tmp_path / "repo", chunk_bytes=CHUNK) as found:
        yield found


def check(repository, snapshot, wholes):
    result = repository.check("data")
    assert (result.problems, result.unneeded_bytes) == ([], 0)
    got = rank_saves.read(repository, snapshot)
    assert set(got) == set(wholes)
    for name, whole in wholes.items():
        np.testing.assert_array_equal(got[name], opaque(whole), err_msg=name)


def fsdp(count):
    """Return the states of ranks that hold Shard(0) DTensors and plain tensors."""

    def make():
        model = {"a": sharded(A, [count], [Shard(0)]), "b": sharded(B, [count], [Shard(0)]), "c": C.clone()}
        return {"model": model, "step": torch.tensor(3.5), "epoch": 4}

    return [make] * count


WHOLES = {"model: model.a": A, "model: model.b": B, "model: model.c": C, ": step": torch.tensor(3.5)}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_byte_is_stored_once(repository, count):
    snapshot, _ = rank_saves.save(repository, fsdp(count), 1)
    check(repository, snapshot, WHOLES)
    assert snapshot.logical_bytes == sum(whole.nbytes for whole in WHOLES.values())
    assert len(snapshot.manifests) == 2
    again, _ = rank_saves.save(repository, fsdp(count), 2)
    check(repository, again, WHOLES)
    assert again.new_chunks == 0


def test_a_job_of_many_packs_has_larger_ones(repository, monkeypatch):
    """The bytes of all ranks together decide the size of a pack. A `pack_bytes` that is not the default is kept."""
    monkeypatch.setattr("snapstore.options.MANY_PACKS", 1)
    assert SaveOptions().pack_bytes_of(DEFAULT_PACK_BYTES) == DEFAULT_PACK_BYTES
    assert SaveOptions().pack_bytes_of(DEFAULT_PACK_BYTES + 1) == 4 * DEFAULT_PACK_BYTES
    assert SaveOptions(pack_bytes=4096).pack_bytes_of(2 * DEFAULT_PACK_BYTES) == 4096
    held = 4 * math.ceil(sum(whole.nbytes for whole in WHOLES.values()) / 4)
    monkeypatch.setattr("snapstore.options.DEFAULT_PACK_BYTES", DEFAULT_PACK_BYTES)
    monkeypatch.setattr("snapstore.options.LARGE_PACK_BYTES", 4096)
    monkeypatch.setattr("snapstore.protocol.session.MOST_MANIFESTS", 0)  # else the second run shares the chunks
    packs = []
    for limit in (held // DEFAULT_PACK_BYTES + 1, -1):
        monkeypatch.setattr("snapstore.options.MANY_PACKS", limit)
        _, ranks = rank_saves.save(repository, fsdp(2), len(packs), run=f"r{limit + 1}")
        packs.append(max(len(m.header.pack_names) for one in ranks for m in one.written.in_memory))
    assert packs == [1, 3]


# -- shardings


def big(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


W = {
    "embed": big(1, 512, 64),
    "wq": big(2, 96, 64),
    "odd": big(3, 97, 24),
    "half": big(4, 128, 40, dtype=torch.bfloat16),
    "norm": big(5, 64),
    "tiny": big(6, 3),
    "scalar": torch.tensor(7.5),
    "none": torch.zeros(0, 8),
}


def on_mesh(shape, placements):
    """Return a function that makes a state. Its tensors of two or more dimensions lie on a mesh; others are plain."""

    def make():
        model = {
            name: sharded(whole, shape, placements) if whole.dim() > 1 and whole.numel() else whole.clone()
            for name, whole in W.items()
        }
        moments = {name: {"step": torch.tensor(3.0), "exp_avg": value * 1} for name, value in model.items()}
        return {"model": {**model, "head": model["embed"]}, "optimizer": {"state": moments}, "lr": 0.5}

    return make


KINDS = {
    "DDP": ([4], [Replicate()]),
    "FSDP": ([4], [Shard(0)]),
    "HSDP": ([2, 2], [Replicate(), Shard(0)]),
    "TP": ([4], [Shard(1)]),
    "FSDP and TP": ([2, 2], [Shard(0), Shard(1)]),
    "DDP and TP": ([2, 2], [Replicate(), Shard(1)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sharding(repository, kind):
    shape, placements = KINDS[kind]
    snapshot, ranks = rank_saves.save(repository, [on_mesh(shape, placements)] * 4, 1)
    wholes = {f"model: model.{name}": whole for name, whole in W.items()}
    for name, whole in W.items():
        wholes[f"optimizer: optimizer.state.{name}.step"] = torch.tensor(3.0)
        wholes[f"optimizer: optimizer.state.{name}.exp_avg"] = whole
    check(repository, snapshot, wholes)
    (model,) = [root for root, _ in rank_saves.children_of(repository, snapshot) if root.header.part == "model"]
    tree = dict(zip(*model.tree[1:], strict=True))
    assert tree["head"] == tree["embed"], "the tensors are tied"
    held = [one.written.logical_bytes for one in ranks]
    assert max(held) < 1.35 * sum(held) / 4, "the bytes must be balanced over the ranks"
    again, _ = rank_saves.save(repository, [on_mesh(shape, placements)] * 4, 2)
    assert again.new_chunks == 0


def test_a_part_that_a_rank_holds_nothing_of_has_no_child(repository):
    snapshot, ranks = rank_saves.save(repository, [lambda: {"m": {"w": torch.ones(4)}, "n": {"v": [1]}}] * 5, 1)
    roots = {root.header.part: children for root, children in rank_saves.children_of(repository, snapshot)}
    assert [len(roots[part]) for part in ("", "m", "n")] == [0, 1, 0]
    assert sorted(len(one.written.manifests) for one in ranks) == [0, 0, 0, 0, 1]


def test_own_values_lie_behind_the_boxes(repository):
    """Arrays of a rank's own values are entries of its child manifest. The child's tree has indices into the child."""

    def rank(number):
        def make():
            return {
                "m": {"w": A.clone(), "b": C.clone(), "own": PerRank({"x": torch.full((700,), number), "n": number})},
                "rng": RngState(),
                "large": PerRank([[i + 10**6 * number, str(i)] for i in range(9000)]),
            }

        return make

    snapshot, _ = rank_saves.save(repository, [rank(i) for i in range(3)], 1)
    check(repository, snapshot, {"m: m.w": A, "m: m.b": C})
    roots = {root.header.part: (root, children) for root, children in rank_saves.children_of(repository, snapshot)}
    root, children = roots["m"]
    assert root.tree[2][2] == ["rank", 0]
    assert len(children) == 3
    for child in children:
        (tag, ((_, keys, (array, number)),)) = child.tree
        assert (tag, keys, number) == ("own", ["x", "n"], child.header.rank)
        entry = child.tensors[array[1]]
        assert entry.path == ("m", "own", "x")
        assert array[1] == len(child.tensors) - 1
        assert entry.inline is None or entry.inline[1] == 700 * 8
    root, children = roots["rng"]
    assert root.tree == ["rank", 0]
    assert [len(child.tensors) for child in children] == [3, 3, 3]
    root, children = roots["large"]
    assert [child.tree[0] for child in children] == ["pages"] * 3


def test_entries_of_one_path_lie_on_several_ranks(repository):
    """A rank that stores the second tensor of a path has an entry without bytes for the first, to keep its number."""
    keys = {1.0: torch.ones(3), "1.0": C, 2.0: torch.arange(3), "2.0": C[0]}
    snapshot, _ = rank_saves.save(repository, [lambda: {"m": dict(keys)}] * 3, 1)
    assert repository.check("data").ok
    restored = repository.restore(f"id:{snapshot.id}")["m"]
    assert list(restored) == list(keys)
    assert all(torch.equal(restored[key], value) for key, value in keys.items())


def test_own_values_may_have_the_same_path_as_a_common_tensor(repository):
    """A rank that does not store the common tensor has an entry without bytes for it."""

    def rank(number):
        return lambda: {"m": {"1.0": torch.arange(3), 1.0: PerRank(torch.full((3,), number)), "own": PerRank(number)}}

    snapshot, _ = rank_saves.save(repository, [rank(i) for i in range(3)], 1)
    check(repository, snapshot, {"m: m.1.0": torch.arange(3)})
    with SnapshotManager(repository, run="r", read_only=True) as manager:
        for number in range(3):
            restored = manager.restore(1, per_rank=number)["m"]
            assert torch.equal(restored["1.0"], torch.arange(3))
            assert torch.equal(restored[1.0], torch.full((3,), number))
            assert restored["own"] == number


def test_own_values_are_known_at_the_next_save(repository):
    """Each rank reads its own child manifest of a base, also for a part of which it stores no box."""

    def states(version):
        def make(rank):
            loader = {"seen": torch.arange(2000) * rank, "log": [i + 10**6 * rank for i in range(9000)], "at": version}
            return lambda: {"m": {"w": A.clone()}, "loader": PerRank(loader)}

        return [make(rank) for rank in range(3)]

    first, second = (rank_saves.save(repository, states(version), version)[0] for version in range(2))
    assert first.new_chunks > 0
    assert second.new_chunks == 0


# -- another number of ranks


def llama(shape, placements):
    """Return a function that makes the state of a small transformer and its optimizer, sharded on a mesh."""
    wholes = {f"l{i}.{name}": big(10 * i + j, *size) for i in range(3) for j, (name, size) in enumerate(SIZES.items())}

    def make():
        model = {name: sharded(whole, shape, placements) for name, whole in wholes.items()}
        state = {name: {"step": torch.tensor(1.0), "m": value * 0.5, "v": value * 2} for name, value in model.items()}
        return {"model": model, "optimizer": {"state": state}}

    return make


SIZES = {"wq": (128, 128), "wk": (32, 128), "wo": (128, 128), "w1": (352, 128), "w2": (128, 352), "norm": (128,)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_few_chunks_are_new_on_another_number_of_ranks(tmp_path, placement):
    for count, most in some([(2, 0.1), (1, 0.1), (3, 0.14)], 1):
        with Repository.create(tmp_path / str(count), chunk_bytes=1024) as repository:
            first, _ = rank_saves.save(repository, [llama([4], [placement])] * 4, 1)
            assert first.new_chunks == first.chunks
            second, _ = rank_saves.save(repository, [llama([count], [placement])] * count, 2)
            assert second.new_chunks <= most * second.chunks, f"{second.new_chunks} of {second.chunks}"
            one = repository.save(llama_of_one(), run="r", step=3)
            assert one.new_chunks <= 0.1 * one.chunks
            back, _ = rank_saves.save(repository, [llama([4], [placement])] * 4, 4)
            assert back.new_chunks <= 0.1 * back.chunks


def llama_of_one():
    with rank_saves.as_rank(0, 1):
        state = llama([1], [Replicate()])()
    model = {name: value.to_local() for name, value in state["model"].items()}
    moments = {
        name: {key: value.to_local() if hasattr(value, "to_local") else value for key, value in of.items()}
        for name, of in state["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {"state": moments}}


def test_deltas_go_on_over_another_number_of_ranks(repository):
    def drifted(count, version):
        def make():
            whole = big(1, 256, 64) + 1e-6 * version
            return {"m": {"w": sharded(whole, [count], [Shard(0)])}}

        return [make] * count

    depths = [rank_saves.save(repository, drifted(count, i), i)[0].depth for i, count in enumerate((4, 2, 3, 1))]
    assert depths == [0, 1, 2, 3]


# -- replicas


def replicated(change=None):
    """Return the states of four ranks. A tensor has one, two or four replicas; `change` changes rank 3."""

    def rank(number):
        def make():
            model = {name: whole.clone() for name, whole in W.items()}
            model["pair"] = sharded(A, [2, 2], [Replicate(), Shard(0)])
            model["own"] = sharded(A, [4], [Shard(0)])
            if change and number == 3:
                change(model)
            return {"model": model, "step": torch.tensor(1.0), "rng": RngState()}

        return make

    return [rank(number) for number in range(4)]


def by_group(ranks, part="model"):
    """Return {id of a group: {rank: digest of its replicas}}."""
    found = {}
    for number, one in enumerate(ranks):
        for group, digest in group_digests(one.replicas(part)).items():
            found.setdefault(group, {})[number] = digest
    return found


def test_equal_replicas_have_equal_digests(repository):
    _, ranks = rank_saves.save(repository, replicated(), 1)
    found = by_group(ranks)
    assert sorted(sorted(told) for told in found.values()) == [[0, 1, 2, 3], [0, 2], [1, 3]]
    assert all(len(set(told.values())) == 1 for told in found.values())
    assert sum(held_bytes(one.inputs)["model"] for one in ranks) == sum(w.nbytes for w in [*W.values(), A, A])


@pytest.mark.parametrize("name", ["embed", "norm", "scalar", "pair"])
def test_a_replica_that_differs_in_one_bit_is_named(repository, name):
    def flip(model):
        local = model[name].to_local() if name == "pair" else model[name]
        local.view(-1)[-1:].view(torch.int32)[-1] ^= 1

    _, ranks = rank_saves.save(repository, replicated(flip), 1)
    (group,) = [group for group, told in by_group(ranks).items() if len(set(told.values())) > 1]
    odd = digests_by_path(ranks[3].replicas("model"), group)
    sound = digests_by_path(ranks[1].replicas("model"), group)
    assert [path for path, _ in odd] == [path for path, _ in sound]
    assert [path for (path, a), (_, b) in zip(odd, sound, strict=True) if a != b] == [f"model.{name}"]


# -- a real model


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.middle = torch.nn.Linear(16, 37)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(300.0))


def trained(size):
    """Return a model and its AdamW after one step: sharded over `size` ranks by FSDP2, or whole if `size` is 0."""
    torch.manual_seed(0)
    net = Tied()
    if size:
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "rng": RngState(), "step": 1}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_fsdp2_and_adamw(repository, size):
    snapshot, _ = rank_saves.save(repository, [lambda: trained(size)] * size, 1)
    whole = trained(0)
    model, state = whole["model"].state_dict(), whole["optimizer"].state_dict()["state"]
    wholes = {f"model: model.{name}": value for name, value in model.items() if name != "head.weight"}
    for number, of in state.items():
        wholes |= {f"optimizer: optimizer.state.{number}.{name}": value for name, value in of.items()}
    check(repository, snapshot, wholes)
    roots = {root.header.part: root.tree for root, _ in rank_saves.children_of(repository, snapshot)}
    nodes = dict(zip(*roots["model"][1:3], strict=True))
    assert nodes["head.weight"] == nodes["embed.weight"]
    assert nodes["table"][0] == "tensor"


def test_stages_of_a_pipeline(repository):
    """Two stages of two ranks each store every tensor once: tensors of one stage, and tensors of both stages."""

    def rank(number):
        def make():
            stage = number // 2
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
            whole = big(stage, 40, 33)
            local = whole.chunk(2)[number % 2].clone()
            weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(33, 1))
            model = {f"layers.{stage}": weight, f"buffer.{stage}": big(10 + stage, 3000), "both": big(20, 900)}
            steps = {f"layers.{stage}": {"step": torch.tensor(float(stage)), "exp": big(30 + stage, 1500)}}
            return {"model": model, "optimizer": steps, "epoch": 3}

        return make

    wholes = {"model: model.both": big(20, 900)}
    for i in range(2):
        wholes |= {f"model: model.layers.{i}": big(i, 40, 33), f"model: model.buffer.{i}": big(10 + i, 3000)}
        wholes[f"optimizer: optimizer.layers.{i}.step"] = torch.tensor(float(i))
        wholes[f"optimizer: optimizer.layers.{i}.exp"] = big(30 + i, 1500)
    snapshot, ranks = rank_saves.save(repository, [rank(i) for i in range(4)], 1, unlike=True)
    check(repository, snapshot, wholes)
    held = sum(sum(held_bytes(one.inputs).values()) for one in ranks)
    assert held == sum(whole.nbytes for whole in wholes.values())
    again, _ = rank_saves.save(repository, [rank(i) for i in range(4)], 2, unlike=True)
    assert again.new_chunks == 0


def unlike_dtensor(ranks, value, placements):
    """Return a DTensor on a mesh of the given ranks. Each rank holds different values: `value` plus its number."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    at = mesh.get_coordinate()
    local = value
    for place, (placement, count) in zip(at, zip(placements, mesh.shape, strict=True), strict=True):
        local = local.chunk(count, placement.dim)[place] if isinstance(placement, Shard) else local
    options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(local + dist.get_rank(), mesh, placements, **options)


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[0, 3], [2, 1]], [[3, 2], [1, 0]]])
def test_the_replica_of_a_dtensor_at_coordinate_0_is_stored(repository, ranks):
    """If replicas differ, every stored shard is from the replica at coordinate 0, whatever the order of the ranks."""
    wide, small = torch.arange(40_000.0).reshape(400, 100), torch.zeros(2, 3)
    pair = [Replicate(), Shard(0)]
    shapes = {"wide": (wide, pair), "small": (small, pair), "columns": (wide, [Shard(1), Replicate()])}

    def make():
        return {"model": {name: unlike_dtensor(ranks, *of) for name, of in shapes.items()}}

    snapshot, written = rank_saves.save(repository, [make] * 4, 1, replicas="rank0")
    assert not any(part.replicas for one in written for part in one.inputs)
    (a, b), (c, _) = ranks
    rows = {}
    for name in ("wide", "small"):
        upper, lower = shapes[name][0].chunk(2)
        rows[name] = torch.cat([upper + a, lower + b])
    expected = rows | {"columns": torch.cat([wide[:, :50] + a, wide[:, 50:] + c], 1)}
    check(repository, snapshot, {f"model: model.{name}": value for name, value in expected.items()})


def test_replicas_of_a_smaller_mesh_are_those_at_coordinate_0_of_the_whole(repository):
    """A tensor on mesh["b"] alone is replicated along mesh["a"]: the first row of the mesh stores it."""

    def make():
        whole = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("a", "b"))
        local = torch.zeros(3000, 2) + dist.get_rank()
        return {"model": {"w": DTensor.from_local(local, whole["b"], [Shard(0)], run_check=False)}}

    snapshot, _ = rank_saves.save(repository, [make] * 4, 1, replicas="rank0")
    expected = torch.cat([torch.zeros(3000, 2) + 3, torch.zeros(3000, 2) + 1])
    check(repository, snapshot, {"model: model.w": expected})


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ({"a": 1, "b": [{"c": 2, 3: 4}]}, {"b": [{3: 4, "c": 2}], "a": 1}, True),
        (Counter(a=1, b=2), Counter(b=2, a=1), True),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}, False),
        ({"a": 1, "b": 2}, OrderedDict(a=1, b=2), False),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), False),
        ([1, 2], [2, 1], False),
        (["dict", "ab", "cd"], ["dict", "ba", "dc"], False),
        ({1: "x"}, {"1": "x"}, False),
        (None, {}, False),
    ],
)
def test_metadata_is_compared_without_the_order_of_keys(first, second, is_equal):
    found = [request_digests(SaveRequest("a", 1, metadata=metadata)) for metadata in (first, second)]
    assert (found[0] == found[1]) == is_equal
