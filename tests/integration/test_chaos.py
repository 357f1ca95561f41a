"""Processes that run every verb lose nothing when they are killed and stopped at random (tests/kit/chaos.py).

Each test runs for some seconds, by seed.

`SNAPSTORE_TEST_EXAMPLES` multiplies the seconds; `tools/torture --only chaos` runs each class for minutes.
"""

from __future__ import annotations

import pytest

from kit.chaos import KINDS, Chaos, judge, may_mount
from kit.s3_stores import fresh_url, needs_server
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES
from snapstore.storage.local import LocalStore
from snapstore.storage.s3.store import S3Store

#: Seconds of each class, in CI.
SECONDS = 5.0
ROUGH = ["links", "mounts", "renames", "everything"]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.timeout(1200 + 20 * EXAMPLES)
@pytest.mark.parametrize("kind", ["processes", *(ROUGH if THOROUGH else [ROUGH[SEED % len(ROUGH)]])])
def test_chaos_on_disk(tmp_path, monkeypatch, kind):
    """Whatever happens to processes, links and the volume: snapshots that were reported as committed restore."""
    if kind == "mounts" and not may_mount(tmp_path):
        pytest.skip("mounts of one's own need the right to unshare")
    with Chaos(tmp_path / "chaos", str(tmp_path / "repository"), KINDS[kind], SEED) as chaos:
        chaos.run(SECONDS * EXAMPLES)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "fresh"))
    judge(chaos, LocalStore(chaos.truth))


@needs_server
@pytest.mark.slow
@pytest.mark.timeout(1200 + 20 * EXAMPLES)
def test_chaos_on_s3(tmp_path, monkeypatch):
    """If a host's cache is lost, a gc there may fence a live save, which then fails."""
    url = fresh_url()
    with Chaos(tmp_path / "chaos", url, KINDS["processes"], SEED) as chaos:
        chaos.run(SECONDS * EXAMPLES)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "fresh"))
    judge(chaos, S3Store(url))
