"""A load through DCP fills a shard of several runs of rows, of which DCP's own plan has one.

No case of `kit/dcp_ranks.py` has such a shard: a wrong row in the plan of its second run was not found.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from kit import rank_saves
from kit.rank_saves import as_rank
from kit.repositories import created, opened
from snapstore.dcp import SnapstoreReader, load

WHOLE = torch.arange(24.0).reshape(12, 2)


@pytest.mark.parametrize("rank", range(4))
def test_each_run_of_a_strided_shard_is_loaded_into_its_rows(rank):
    store = created()
    with opened(store) as repository:
        rank_saves.save(repository, [lambda: {"w": WHOLE}] * 4, 1, "r")
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            rows = torch.cat([piece.chunk(2)[rank // 2] for piece in WHOLE.chunk(2)])
            local, placements = torch.zeros_like(rows), [_StridedShard(0, split_factor=2), Replicate()]
            target = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
            )
            load({"w": target}, SnapstoreReader(repository, run="r"), 1)
            assert torch.equal(local, rows)
