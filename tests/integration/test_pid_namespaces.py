"""Two containers with one host name, disk and cache, each with a pid 1, share the index and collect no live save."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from kit.processes import environment
from kit.repositories import OPTIONS, check_clean, opened
from snapstore import Repository
from snapstore.storage.local import LocalStore

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
SCRIPT = """
import logging, os, sys, threading
from kit.hosts import OPTIONS, save
from snapstore import Repository
from snapstore.storage.local import LocalStore

assert os.getpid() == 1
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)

def wait():
    print("waits", flush=True)
    sys.stdin.readline()

root, verb = sys.argv[1:]
put = LocalStore.put
with Repository.open(root, options=OPTIONS) as repository:
    if verb == "save":
        save(repository, "a", 0)
        wait()
        save(repository, "a", 1)
    if verb == "stop":
        first = threading.Lock()  # of several threads that put packs, one waits

        def stop(self, key, data):
            put(self, key, data)
            if key.startswith("packs/") and first.acquire(blocking=False):
                wait()
        LocalStore.put = stop
        save(repository, "b", 0)
    if verb == "gc":
        result = repository.gc()
        print(len(result.waiting_for), len(result.fenced), flush=True)
"""

pytestmark = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode != 0,
    reason="pid namespaces need the right to unshare",
)


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Returns a function that starts SCRIPT in its own pid namespace and returns the process."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    root, started = tmp_path / "repository", []
    Repository.create(root, chunk_bytes=1024, options=OPTIONS).close()

    def start(verb):
        command = [*UNSHARE, sys.executable, "-c", SCRIPT, str(root), verb]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        started.append(one)
        return one

    start.root = root
    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdin.close()
        one.stdout.close()


def test_both_use_the_index(container):
    """LMDB keys its locks by pid: with them the second process would read every record from the store."""
    first = container("save")
    assert first.stdout.readline() == "waits\n"
    second = container("save")
    assert second.stdout.readline() == "waits\n"
    for one in (second, first):
        said = one.communicate("\n")[0].splitlines()
        assert all("another process has put" in line for line in said), "no word of the index"
        assert one.returncode == 0
    with opened(container.root) as repository:
        assert len(repository.snapshots("a")) == 4


def test_a_session_of_another_namespace_is_alive_until_its_process_ends(container):
    """Its pid, 1, is also the pid of the process that runs gc, so gc must not judge by it."""
    saving = container("stop")
    assert saving.stdout.readline() == "waits\n"
    assert container("gc").communicate()[0] == "1 0\n"
    saving.kill()
    saving.wait()
    assert container("gc").communicate()[0] == "0 1\n"
    check_clean(LocalStore(container.root))
