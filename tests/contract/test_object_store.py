"""Each store of snapstore passes the suite in `object_store.py`."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from object_store import ObjectStoreContract

from kit.s3_stores import fresh_url, moto_bucket, needs_server
from kit.samples import examples
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.store import S3Store


class TestMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    @pytest.fixture
    def locked_elsewhere(self):
        @contextmanager
        def locked(store: MemoryStore, key: str) -> Iterator[Callable[[], None]]:
            store.lock(key, b"x")
            yield store.drop_locks

        return locked

    def test_the_clock_can_be_set(self, store):
        store.clock = lambda: 1000.0
        store.put("a", b"x")
        store.clock = lambda: 2000.0
        assert (store.stat("a").modified_s, store.now_s()) == (1000.0, 2000.0)
        store.touch("a")
        assert store.stat("a").modified_s == 2000.0


HOLDER = """
import sys
from snapstore.storage.urls import open_store
open_store(sys.argv[1]).lock(sys.argv[2], b"x")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_a_process(store, key: str) -> Iterator[Callable[[], None]]:
    command = [sys.executable, "-c", HOLDER, store.url, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def kill() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()

        try:
            assert process.stdout.readline() == b"held\n"
            yield kill
        finally:
            kill()


class TestLocalStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "repo", create=True)

    @pytest.fixture
    def reopened(self):
        return lambda store: LocalStore(store.url)

    @pytest.fixture
    def locked_elsewhere(self):
        return locked_by_a_process

    def test_racing_processes(self, store):
        """Two processes create the same hundred keys: each key has one winner and the whole bytes of that one."""
        script = (
            "import sys\n"
            "from snapstore.errors import AlreadyExistsError\n"
            "from snapstore.storage.local import LocalStore\n"
            "store, won = LocalStore(sys.argv[1]), 0\n"
            "sys.stdin.readline()\n"
            "for i in range(100):\n"
            "    try:\n"
            "        store.put(f'race/{i}', sys.argv[2].encode() * 1000)\n"
            "        won += 1\n"
            "    except AlreadyExistsError:\n"
            "        pass\n"
            "print(won)\n"
        )
        commands = [[sys.executable, "-c", script, store.url, name] for name in "ab"]
        pipe = subprocess.PIPE
        racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands]
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = [int(racer.communicate()[0]) for racer in racers]
        data = [store.get(f"race/{i}") for i in range(100)]
        assert won == [data.count(name * 1000) for name in (b"a", b"b")]
        assert sum(won) == 100


@pytest.fixture(scope="class")
def moto():
    with pytest.MonkeyPatch.context() as monkeypatch, moto_bucket(monkeypatch) as url:
        yield S3Store(f"{url}/some/prefix")


@pytest.fixture(scope="class")
def server():
    return S3Store(fresh_url())  # one for all, since making a client costs 0.1 s


class TestMoto(ObjectStoreContract):
    programs = examples(25)

    @pytest.fixture
    def store(self, moto, monkeypatch, tmp_path):
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
        with moto.sandbox() as store:
            yield store

    @pytest.fixture
    def reopened(self):
        return lambda store: S3Store(store.url)

    def test_one_of_racing_creators_wins(self):
        pytest.skip("moto is not safe to use from several threads")

    def test_list_beside_writers(self):
        pytest.skip("moto is not safe to use from several threads")


@needs_server
class TestS3Store(ObjectStoreContract):
    programs = examples(25)

    @pytest.fixture
    def store(self, server, monkeypatch, tmp_path):
        monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
        with server.sandbox() as store:
            yield store

    @pytest.fixture
    def reopened(self):
        return lambda store: S3Store(store.url)

    @pytest.fixture
    def locked_elsewhere(self):
        return locked_by_a_process
