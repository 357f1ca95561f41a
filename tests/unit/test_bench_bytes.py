"""`tools/bench bytes` measures its peers without programs, but for xdelta3, and names a peer that it leaves out."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def codings(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    from benchmarks import bytes as codings

    return codings


@pytest.fixture
def states():
    """Return two states of a tensor; one element in 64 differs."""
    noise = np.random.default_rng(1)
    before = noise.integers(0, 1 << 16, 1 << 17, np.uint16)
    after = before.copy()
    after[::64] += 1
    return [before], [after]


def test_zstd_with_a_prefix_needs_no_program(codings, monkeypatch, states):
    monkeypatch.setenv("PATH", "")
    found = codings.by_tool(*states)
    assert set(found) == {"zstd -19 --patch-from"}
    assert codings.missing_tools() == {"xdelta3 -9": "xdelta3 is not on the PATH"}
    whole = codings.patch([np.zeros(0, np.uint16)], states[1])
    assert 0 < found["zstd -19 --patch-from"] < whole / 8


def test_a_program_that_is_there_is_measured(codings, monkeypatch, tmp_path, states):
    program = tmp_path / "xdelta3"
    program.write_text('#!/bin/sh\nfor file; do last=$file; done\nprintf "four" > "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert codings.by_tool(*states)["xdelta3 -9"] == 4
    assert codings.missing_tools() == {}


def test_the_shares_of_a_run_need_no_program(codings, monkeypatch, states):
    from benchmarks import bytes_runs

    monkeypatch.setenv("PATH", "")
    shares = bytes_runs.peer_shares(*states)
    assert set(shares) == {"positions and values, zstd", "zstd -19 --patch-from"}
    assert all(0 < share < 1 / 8 for share in shares.values())
