"""A wrong answer of an S3 server to one request loses no committed snapshot (the lies: tests/kit/lying_proxy.py).

Workers save, forget, collect, compact, check and repair through proxies that lie; then a client without a
proxy must find every snapshot that was reported as committed. `SNAPSTORE_TEST_EXAMPLES` multiplies the seconds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from random import Random

import pytest

from kit.chaos import KINDS, Chaos, judge
from kit.lying_proxy import DRAGGING, LIES, LyingProxy, Told
from kit.s3_stores import fresh_url, impatient, needs_server
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES
from snapstore.errors import SnapstoreError
from snapstore.storage.s3.store import S3Store

pytestmark = needs_server
SECONDS = 8.0


@pytest.mark.slow
@pytest.mark.timeout(1200 + 20 * EXAMPLES)
@pytest.mark.parametrize("kind", ["lies about reads", "lies about writes", "slow lies"] if THOROUGH else ["lies"])
def test_one_lie_costs_no_snapshot(tmp_path, monkeypatch, kind):
    """The workers raise only errors of snapstore, and none of them hangs."""
    url = fresh_url()
    with Chaos(tmp_path / "chaos", url, KINDS[kind], SEED, fence_s=3.0, workers=5) as chaos:
        chaos.run(SECONDS * EXAMPLES)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "fresh"))
    judge(chaos, S3Store(url))


def test_every_lie_is_told(monkeypatch):
    """The proxy can tell every lie of its table but the slow ones; the test above judges how clients react."""
    url, told = fresh_url(), list[Told]()
    straight = S3Store(url)
    with LyingProxy(os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://"), random=Random(SEED)) as proxy:
        proxy.tell = told.append
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        store = impatient(url, attempts=2)
        table = [(verb, lie) for verb, lies in LIES.items() for lie in lies if lie not in DRAGGING]
        for number, (verb, lie) in enumerate(table):
            keys = [f"packs/{number}-{i}" for i in range(4)]
            for key in keys[:3]:
                straight.put(key, key.encode() * 10)
                store.get(key)
            list(store.list("packs/"))
            straight.put(keys[3], b"later")
            if lie == "still there":
                straight.delete(keys[:1])
            proxy.force(verb, lie)
            with suppress(SnapstoreError):
                {
                    "GET": lambda keys=keys: store.get(keys[0]), "HEAD": lambda keys=keys: store.stat(keys[0]),
                    "LIST": lambda: list(store.list("packs/")), "COPY": lambda keys=keys: store.touch(keys[0]),
                    "PUT": lambda number=number: store.put(f"packs/{number}", b"new"),
                    "DELETE": lambda keys=keys: store.delete(keys[:1]),
                    "BATCH": lambda keys=keys: store.delete(keys[:2]),
                }[verb]()  # fmt: skip
            proxy._forced = None
            assert [(one.verb, one.lie) for one in told] == [(verb, lie)]
            told.clear()
            straight.delete([*keys, f"packs/{number}"])
