"""An S3 server that answers one request of an operation wrongly, once: see tests/lying_proxy.py for the table of lies.

Workers save, forget, collect, compact, check and repair through proxies that lie; then an honest client, straight at
the server, must find every snapshot that was called committed. `SNAPSTORE_TEST_EXAMPLES` multiplies the seconds.
"""

from __future__ import annotations

import pytest
from chaos import KINDS, Chaos, judge
from faults import SEED, THOROUGH
from s3_stores import fresh_url, needs_server
from tally import EXAMPLES

from snapstore.storage.s3 import S3Store

pytestmark = needs_server
SECONDS = 12.0


@pytest.mark.slow
@pytest.mark.timeout(1200 + 20 * EXAMPLES)
@pytest.mark.parametrize("kind", ["lies about reads", "lies about writes", "slow lies"] if THOROUGH else ["lies"])
def test_one_lie_costs_no_snapshot(tmp_path, monkeypatch, kind):
    """Nor is anything raised that is not ours, and nobody hangs."""
    url = fresh_url()
    with Chaos(tmp_path / "chaos", url, KINDS[kind], SEED, fence_s=3.0, workers=5) as chaos:
        chaos.run(SECONDS * EXAMPLES)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "fresh"))
    judge(chaos, S3Store(url))
