"""Two ranks with Hugging Face's packages resume to the bit: the Trainer with DDP, Accelerate with FSDP2."""

import socket
import subprocess
import sys

import pytest

from kit.processes import environment
from kit.samples import THOROUGH


@pytest.mark.skipif(not THOROUGH, reason="takes 20 s of CPU: SNAPSTORE_TEST_THOROUGH=1 runs it")
def test_two_ranks_resume_to_the_bit(tmp_path):
    pytest.importorskip("transformers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "kit.hugging_face_ranks", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(**place, RANK=rank, LOCAL_RANK=rank, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("train_")] == [
            "train_ddp same", "train_fsdp2 same",
        ], text  # fmt: skip
