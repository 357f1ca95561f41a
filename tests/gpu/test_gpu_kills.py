"""Jobs on GPUs whose ranks are killed at any moment go on with the very bits that were saved, on any number of ranks.

`tools/train_ranks.py` is the job: FSDP2 with NCCL, under torchrun, with a larger model than the demo's.
`tests/integration/test_killed_jobs.py` runs the same jobs on CPUs.
"""

from __future__ import annotations

import pytest
import torch

from kit.killed_jobs import run_jobs
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(900),  # of a hang: eight jobs, each of which starts several times
]


@pytest.mark.parametrize("seed", range(SEED, SEED + EXAMPLES))
def test_jobs_that_lose_ranks_go_on_with_the_bits_that_were_saved(tmp_path, seed):
    counts = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
    run_jobs(tmp_path, seed, 8 if THOROUGH else 3, counts, model=(512, 8, 4))
    log = (tmp_path / "job-0.log").read_text()
    assert " on cuda:0" in log, log
