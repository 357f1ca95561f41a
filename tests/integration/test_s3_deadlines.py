"""Every wait for a bucket ends, and no transfer above the lowest allowed rate is cut.

Most time limits of the stores are under a second. The tests call a minute a hang.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from kit.hostile_s3 import HostileS3, answer, before_body, etag, first, says
from kit.socket_server import SocketServer
from kit.waits import until
from snapstore.errors import AlreadyExistsError, SnapstoreError, StorageError
from snapstore.storage.s3 import deadline as s3_deadline
from snapstore.storage.s3.deadline import Deadline, run_with_timeout
from snapstore.storage.s3.store import S3Store

HANGS_S = 60.0


@pytest.fixture
def server(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "slow")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "slow")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with HostileS3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        yield server


def store(**options) -> S3Store:
    """Return a store with short time limits and two attempts."""
    return S3Store("s3://bucket/p", **{"connect_timeout_s": 0.3, "read_timeout_s": 0.3, "attempts": 2} | options)


def patient() -> S3Store:
    """Return a store with one attempt, which waits as long as a busy machine needs."""
    return store(connect_timeout_s=HANGS_S, read_timeout_s=HANGS_S, attempts=1)


@contextmanager
def listener(speak):
    """Listen on a port, and call `speak` for each connection."""

    class Listener(SocketServer):
        def serve(self, client: socket.socket) -> None:
            with self.connected(client):
                speak(client, self.over)

    with Listener() as server:
        yield server.port


def stalls(sock, over):
    over.wait()


def trickles(data: bytes):
    def speak(sock, over):
        with_bytes = iter(data * 1000)
        try:
            while not over.wait(0.1):
                sock.sendall(bytes([next(with_bytes)]))
        except OSError:
            return

    return speak


def ends_with_an_error(call) -> StorageError:
    """Return the StorageError of a call, which must come in time."""
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        call()
    assert time.monotonic() - began < HANGS_S
    return caught.value


@pytest.mark.parametrize("speak", [stalls, trickles(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03" + bytes(500))],
                         ids=["stalls", "trickles"])  # fmt: skip
def test_a_handshake(server, monkeypatch, speak):
    with listener(speak) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://127.0.0.1:{port}")
        ends_with_an_error(lambda: store().get("a"))


@pytest.mark.parametrize(
    "speak", [stalls, trickles(b"HTTP/1.0 200 OK\r\n" + b"x: y\r\n" * 90)], ids=["stalls", "trickles"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy(server, monkeypatch, speak, scheme):
    with listener(speak) as port:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{scheme}://s3.example.invalid")
        ends_with_an_error(lambda: store().get("a"))


def test_a_resolver(server, monkeypatch):
    """Nothing can interrupt a name lookup, so its thread is left running."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait() and [])
    try:
        ends_with_an_error(lambda: store().get("a"))
    finally:
        over.set()


def ask_for_credentials(command, monkeypatch, folder):
    """Let a program tell the credentials."""
    (folder / "config").write_text(f"[profile slow]\ncredential_process = {command}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "slow")


def test_a_program_that_tells_credentials(server, monkeypatch, tmp_path):
    monkeypatch.setattr("snapstore.storage.s3.client.CREDENTIALS_TIMEOUT_S", 0.5)
    ask_for_credentials("sleep 2", monkeypatch, tmp_path)
    with pytest.raises(SnapstoreError, match="TimeoutError"):
        store()


@pytest.mark.parametrize(("left_s", "fails"), [(300, True), (800, False)])
def test_a_program_that_hangs_when_it_renews_credentials(server, monkeypatch, tmp_path, left_s, fails):
    """Cached credentials are used until ten minutes before they expire."""
    script = tmp_path / "credentials.py"
    expires = datetime.now(UTC) + timedelta(seconds=left_s)
    told = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": expires.isoformat()}
    script.write_text(
        "import pathlib, sys, time\nrun = pathlib.Path(sys.argv[0] + '.run')\n"
        f"if run.exists(): time.sleep(60)\nrun.touch()\nprint({json.dumps(told)!r})\n"
    )
    ask_for_credentials(f"{sys.executable} {script}", monkeypatch, tmp_path)
    opened, began = store(), time.monotonic()
    monkeypatch.setattr("snapstore.storage.s3.client.CREDENTIALS_TIMEOUT_S", 0.5)
    for _ in range(2):
        if fails:
            with pytest.raises(SnapstoreError, match="credentials could not be fetched"):
                opened.put("a", b"x")
        else:
            with suppress(AlreadyExistsError):
                opened.put("a", b"x")
    assert time.monotonic() - began < 50, "it waited for the program"


def test_credentials_are_renewed_again_after_a_failure(server, monkeypatch, tmp_path):
    """They expire within ten minutes, and the program, or the server of an instance's role, fails twice."""
    script = tmp_path / "credentials.py"
    expires = [(datetime.now(UTC) + timedelta(seconds=left_s)).isoformat() for left_s in (300, 3600)]
    told = [json.dumps({"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": e}) for e in expires]
    script.write_text(
        "import pathlib, sys\nruns = pathlib.Path(sys.argv[0] + '.runs')\n"
        "done = len(runs.read_text()) if runs.exists() else 0\nruns.write_text('x' * (done + 1))\n"
        f"if done in (1, 2): sys.exit('no answer')\nprint({told!r}[min(done, 1)])\n"
    )
    ask_for_credentials(f"{sys.executable} {script}", monkeypatch, tmp_path)
    opened = store(connect_timeout_s=HANGS_S, read_timeout_s=HANGS_S, attempts=10)
    opened.put("a", b"x")
    assert opened.get("a") == b"x"
    assert len(Path(f"{script}.runs").read_text()) == 4, "each failed attempt renewed them again"


def test_bodies_that_give_a_byte_an_attempt(server):
    """Each attempt brings a new byte, but all attempts together have a time limit."""

    def lie(wire, honest):
        head, _, body = honest.partition(b"\r\n\r\n")
        wire.send(head + b"\r\n\r\n" + body[:1])

    server.objects["bucket/p/a"] = os.urandom(4_000), time.time()
    server.lie("/p/a", lie)
    assert "within the time limit" in str(ends_with_an_error(lambda: store().get("a")))


def test_a_slow_line_is_no_stall(server, monkeypatch):
    """Twice the lowest rate, up and down, takes longer than a request without progress may take."""
    data, piece = os.urandom(420_000), 2 * s3_deadline.SLOWEST_BYTES_PER_S // 20
    monkeypatch.setattr("snapstore.storage.s3.client.BODY_PIECE_BYTES", 16 * 1024)
    monkeypatch.setattr("snapstore.storage.s3.reader.READ_PIECE_BYTES", 16 * 1024)
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # for connections that it accepts from now on
    slow = store(attempts=1, connect_timeout_s=2.5, read_timeout_s=2.5)

    def up(wire, _):
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b""
        while len(body) < len(data):
            body += wire.sock.recv(piece)
            time.sleep(0.05)
        server.objects["bucket/p/up"] = body, time.time()
        wire.send(answer(200, ETag=etag(body)))
        return True

    def down(wire, honest):
        for at in range(0, len(honest), piece):
            wire.send(honest[at : at + piece])
            time.sleep(0.05)
        return True

    server.lie("/p/up", before_body(up), method="PUT")
    server.lie("/p/down", down)
    server.objects["bucket/p/down"] = data, time.time()
    with ThreadPool(2) as pool:
        reading = pool.apply_async(slow.get, ("down",))
        slow.put("up", data)
        assert reading.get() == server.objects["bucket/p/up"][0] == data


def test_a_listing_that_goes_round(server):
    """Its pages have ever new tokens and no new objects."""
    asked = []

    def lie(wire, honest):
        asked.append(1)
        body = honest.partition(b"\r\n\r\n")[2]
        body = body.replace(b"<IsTruncated>false", b"<IsTruncated>true")
        body = body.replace(b"</ListB", f"<NextContinuationToken>{len(asked)}</NextContinuationToken></ListB".encode())
        wire.send(answer(200, body))
        return True

    for n in range(3):
        server.objects[f"bucket/p/a/{n}"] = b"x", time.time()
    server.lie("list-type=2", lie)
    assert "an earlier one has" in str(ends_with_an_error(lambda: list(store().list("a/"))))
    assert len(asked) <= 3


# --- one request's answer is never another's ---


@pytest.mark.parametrize("status", [101, 102, 103, 204, 412])
def test_a_late_answer(server, status):
    """After an odd answer the connection is closed: the next request would take a late answer on it for its own."""
    for name in "abcde":
        server.objects[f"bucket/p/{name}"] = name.encode() * 10, time.time()
    one = patient()
    late = answer(200, b"the object of another", ETag='"x"')
    server.lie(
        "/p/late", lambda wire, _: first(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status, 0.05)(wire, late)
    )
    with pytest.raises(SnapstoreError):
        one.put("late", b"x")
    time.sleep(0.2)
    for name in "abcde":
        assert one.get(name) == name.encode() * 10


def test_an_answer_before_the_body_was_sent(server):
    """A server that has not read the body may take the next request on the connection for that body."""
    one = patient()
    server.lie("/p/large", before_body(says(answer(412, reason="No"))))
    with pytest.raises(SnapstoreError):
        one.put("large", os.urandom(100_000))
    before = server.connections
    one.put("other", b"x")
    assert server.connections == before + 1


def test_connections_are_used_again(server):
    one = patient()
    for n in range(20):
        one.put(f"a/{n}", os.urandom(100_000))
        one.get(f"a/{n}")
        one.stat(f"a/{n}")
        one.delete([f"a/{n}"])
    assert server.connections <= 2


# --- the watchdog ---


def test_a_deadline_shuts_what_it_guards():
    here, there = socket.socketpair()
    with here, there:
        deadline = Deadline(0.05)
        deadline.watch(here)
        there.settimeout(HANGS_S)
        assert there.recv(1) == b""
        assert deadline.expired
        other, end = socket.socketpair()
        with other, end:
            end.settimeout(HANGS_S)
            deadline.watch(other)  # too late, so it is shut at once
            assert end.recv(1) == b""
        deadline.end()


def test_a_deadline_that_ended_shuts_nothing():
    here, there = socket.socketpair()
    with here, there:
        deadline = Deadline(0.05)
        deadline.watch(here)
        deadline.end()
        time.sleep(0.2)
        there.sendall(b"x")
        assert here.recv(1) == b"x"
    assert deadline not in s3_deadline._watchdog.active


def test_an_earlier_deadline_wakes_the_watchdog():
    late, (here, there) = Deadline(HANGS_S * 10), socket.socketpair()
    with here, there:
        soon = Deadline(0.05)
        soon.watch(here)
        there.settimeout(HANGS_S)
        assert there.recv(1) == b""
        soon.end()
    late.end()


def test_a_forked_child_has_a_watchdog_of_its_own(server):
    """The child does not shut its parent's connections."""
    one = patient()
    one.put("a", b"x")
    mine, (here, there) = Deadline(HANGS_S * 10), socket.socketpair()
    mine.watch(here)
    child = os.fork()
    if not child:
        code = 1
        try:
            alone = not s3_deadline._watchdog.active
            a, b = socket.socketpair()
            Deadline(0.05).watch(a)
            b.settimeout(HANGS_S)
            code = 0 if alone and b.recv(1) == b"" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with here, there:
        there.sendall(b"x")
        assert here.recv(1) == b"x"
    mine.end()
    assert one.get("a") == b"x"


def test_in_time():
    assert run_with_timeout(lambda: 7, HANGS_S) == 7
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(lambda: 1 / 0, HANGS_S)
    late, go = [], threading.Event()

    def work() -> int:
        go.wait()
        return 8

    with pytest.raises(TimeoutError):
        run_with_timeout(work, 0.05, late.append)
    go.set()
    until(lambda: late == [8], HANGS_S)
