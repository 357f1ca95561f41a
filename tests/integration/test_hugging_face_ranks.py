"""Two ranks with Hugging Face's packages resume to the bit: the Trainer with DDP, Accelerate with FSDP2."""

import pytest

from kit.forked import Forked, wait_all
from kit.processes import environment, free_port
from kit.samples import THOROUGH


@pytest.mark.skipif(not THOROUGH, reason="takes 20 s of CPU: SNAPSTORE_TEST_THOROUGH=1 runs it")
def test_two_ranks_resume_to_the_bit(tmp_path):
    pytest.importorskip("transformers")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    ranks = [
        Forked(
            "-m", "kit.hugging_face_ranks", str(tmp_path), log=tmp_path / f"log.{rank}",
            env=environment(**place, RANK=rank, LOCAL_RANK=rank, ACCELERATE_USE_CPU="true"),
        )
        for rank in "01"
    ]  # fmt: skip
    wait_all(ranks, 300)
    for text in (rank.text() for rank in ranks):
        assert [line for line in text.splitlines() if line.startswith("train_")] == [
            "train_ddp same", "train_fsdp2 same",
        ], text  # fmt: skip
