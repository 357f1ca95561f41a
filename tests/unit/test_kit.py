"""The kit's proxies spoil only the requests that they are told to, and its processes do not outlive the tests."""

import os
from random import Random

import pytest

from kit.hostile_s3 import HostileS3
from kit.lying_proxy import LyingProxy, Memory
from kit.objects import flip, keys_of
from kit.processes import run_python
from kit.repositories import check_whole, created, opened, save
from kit.tcp_proxy import Fault, Proxy, answer, lose_answer
from snapstore.errors import NotFoundError, StorageError
from snapstore.storage.s3.store import S3Store


@pytest.fixture
def server(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with HostileS3() as server:
        yield server


def store_at(url, monkeypatch, attempts=2):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    return S3Store("s3://bucket/p", attempts=attempts)


def puts(method, target):
    return method == "PUT"


def gets(method, target):
    return method == "GET" and "list-type" not in target


@pytest.mark.parametrize("kind", [Proxy, LyingProxy])
def test_a_proxy_passes_everything_on(server, monkeypatch, kind):
    with kind(f"127.0.0.1:{server.port}") as proxy:
        store = store_at(proxy.url, monkeypatch)
        store.put("a/b", b"x" * 100_000)
        assert store.get("a/b") == b"x" * 100_000
        assert keys_of(store) == ["a/b"]
        store.delete(["a/b"])
        assert keys_of(store) == []
    assert proxy.connections >= 1


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_proxy_spoils_as_many_requests_as_it_is_told(server, monkeypatch, how):
    with Proxy(f"127.0.0.1:{server.port}") as proxy:
        store = store_at(proxy.url, monkeypatch)
        lost = proxy.fault(puts, lose_answer(how))
        store.put("a", b"1" * 5000)  # stored, but the reply is lost: the client tries again
        cut = proxy.fault(gets, Fault(response_bytes=100, how=how))
        assert store.get("a") == b"1" * 5000
        assert (lost.fired, cut.fired) == (1, 1)
        proxy.fault(gets, answer(403, "AccessDenied"), times=100)
        with pytest.raises(StorageError):
            store.get("a")
        proxy.heal()
        assert store.get("a") == b"1" * 5000
        assert [method for method, _ in proxy.requests].count("PUT") == 2


def test_a_lying_proxy_tells_one_lie(server, monkeypatch):
    told = []
    with LyingProxy(f"127.0.0.1:{server.port}", random=Random(1), memory=Memory(), tell=told.append) as proxy:
        store = store_at(proxy.url, monkeypatch, attempts=1)
        store.put("packs/aa/" + "a" * 64, b"1" * 500)
        proxy.force("GET", "missing")
        with pytest.raises(NotFoundError):
            store.get("packs/aa/" + "a" * 64)
        assert store.get("packs/aa/" + "a" * 64) == b"1" * 500
    assert [(one.verb, one.lie, one.kind) for one in told] == [("GET", "missing", "packs")]


def test_check_whole_notices_a_flipped_bit():
    store = created()
    with opened(store) as repository:
        save(repository, "a", 0, 0)
    check_whole(store)
    flip(store, keys_of(store, "packs/")[0], 150)
    with pytest.raises(Exception, match=r"pack|digest|checksum"):
        check_whole(store)


@pytest.mark.slow
def test_a_stopped_process_does_not_hold_up_the_end_of_the_tests(tmp_path):
    program = """
import signal, sys, time
from pathlib import Path
from kit.forked import Forked
from kit.processes import environment
sleep = "import time; print('begun', flush=True); time.sleep(600)"
process = Forked("-c", sleep, log=Path(sys.argv[1]), env=environment())
while "begun" not in process.text():
    time.sleep(0.01)
process.send_signal(signal.SIGSTOP)
print(process.pid)
"""
    done = run_python("-c", program, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
