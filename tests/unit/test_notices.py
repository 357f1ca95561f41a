"""A notice by a file, a URL or a function ends a job; what hangs or cannot be read neither ends nor stalls it."""

from __future__ import annotations

import functools
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
import torch

from kit import waits
from kit.processes import environment
from kit.repositories import OPTIONS, created, opened
from snapstore import InvalidInputError, SnapshotManager
from snapstore.distributed import notices
from snapstore.distributed.notices import NoticePoller

HOPE_S = 60.0
until = functools.partial(waits.until, limit_s=HOPE_S)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(notices, "POLL_S", 0.02)
    monkeypatch.setattr(notices, "ANSWER_S", 0.5)


class Server:
    """An HTTP server whose answers a test changes.

    Attributes:
        answer: status, headers and body of all GETs; or a function of the request's handler.
        asked: the requests: path and headers.
    """

    def __init__(self):
        self.answer, self.asked = (404, {}, b""), []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.path, dict(self.headers)))
                if callable(server.answer):
                    server.answer(self)
                    return
                status, headers, body = server.answer
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=functools.partial(self._server.serve_forever, 0.01), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


class Poll:
    """A poller, and how often it has told."""

    def __init__(self, notice):
        self.told = []
        self.poller = NoticePoller(notice, lambda: self.told.append(time.monotonic()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.poller.close()


def test_a_file_that_appears_ends_the_job(tmp_path):
    store, path = created(), tmp_path / "stop"
    manager = SnapshotManager(store, run="a", save_interval_steps=100, options=OPTIONS)
    manager.handle_preemption(notice=path)
    assert not manager.should_save(1)
    path.touch()
    until(lambda: manager.should_save(7))
    with pytest.raises(SystemExit) as ended:
        manager.save(7, {"w": torch.ones(5000)})
    assert ended.value.code == 128 + signal.SIGTERM
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [7]


def test_a_path_is_that_of_the_folder_in_which_it_was_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Poll("stop") as relative, Poll("~/stop") as home:
        monkeypatch.chdir(tmp_path / "other")
        (tmp_path / "other" / "stop").touch()
        time.sleep(0.2)
        assert relative.told == home.told == []
        (tmp_path / "stop").touch()
        until(lambda: relative.told and home.told)


@pytest.mark.parametrize(
    ("answer", "is_told"),
    [
        ((404, {}, b"not found"), False),
        ((200, {}, b""), False),
        ((200, {}, b" \r\n"), False),
        ((200, {}, b"FALSE"), False),
        ((200, {}, b"none\n"), False),
        ((200, {}, b"TRUE"), True),
        ((200, {}, b'{"action": "terminate"}'), True),
        ((200, {}, b"x" * 1_000_000), True),
    ],
)
def test_what_a_url_says(server, answer, is_told, caplog):
    server.answer = answer
    with Poll(f"{server.url}/notice") as poll:
        until(lambda: poll.told if is_told else len(server.asked) > 3)
        assert len(poll.told) == is_told
    assert "cannot be read" not in caplog.text


def test_a_request_has_headers_and_no_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    server.answer = lambda handler: handler.send_error(403 if handler.headers["Metadata-Flavor"] != "Google" else 404)
    request = urllib.request.Request(f"{server.url}/preempted", headers={"Metadata-Flavor": "Google"})
    with Poll(request) as poll:
        until(lambda: len(server.asked) > 2)
        assert poll.told == []
        server.answer = (200, {}, b"TRUE")
        until(lambda: poll.told)
    assert {headers["Metadata-Flavor"] for _, headers in server.asked} == {"Google"}


def _trickle(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.1)


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, b"TRUE"),
        (401, {}, b"TRUE"),
        (302, {"Location": "/other"}, b"TRUE"),
        (204, {}, b""),
        (200, {"Content-Length": "5"}, b"FALS"),
        lambda handler: handler.wfile.write(b"TRUE\r\n\r\n" + bytes(range(256)) * 100),
        lambda handler: time.sleep(5),
        _trickle,
    ],
    ids=["500", "401", "302", "204", "cut", "garbage", "hangs", "trickle"],
)
def test_a_url_that_cannot_be_read_ends_no_job_and_warns_once(server, answer, caplog):
    """Then it recovers, and tells."""
    server.answer = answer

    with Poll(f"{server.url}/notice?token=SECRET") as poll:
        until(lambda: "cannot be read" in caplog.text)
        until(lambda: len(server.asked) > 1)
        assert poll.told == []
        server.answer = (200, {}, b"TRUE")
        until(lambda: poll.told)
    assert caplog.text.count("cannot be read") == 1
    assert "SECRET" not in caplog.text


def test_a_body_without_end_is_cut(server):
    """No more than 64 KiB are read."""

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 65536)

    server.answer = endless
    with Poll(server.url) as poll:
        until(lambda: len(server.asked) > 2)
        assert poll.told == []


def test_a_server_that_is_not_there_warns_once_and_may_come_back(caplog):
    server = Server()
    server.close()
    with Poll(server.url) as poll:
        until(lambda: "Connection refused" in caplog.text)
        time.sleep(0.2)
        assert poll.told == []
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize("found", [None, "yes", 1, ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_gives_no_bool_is_no_notice(found, caplog):
    """A coroutine counts as true, and would end every job at its first step."""
    asked = []

    def ask():
        asked.append(1)
        if isinstance(found, BaseException):
            raise found
        return found

    with Poll(ask) as poll:
        until(lambda: len(asked) > 3)
        assert poll.told == []
    assert caplog.text.count("cannot be read") == 1
    assert "ask()" in caplog.text


@pytest.mark.parametrize("yes", [True, np.True_])
def test_a_function_tells_once(yes):
    answers = [False, yes]
    with Poll(lambda: answers.pop(0)) as poll:
        until(lambda: poll.told)
        time.sleep(0.1)
        assert (len(poll.told), answers) == (1, [])


def test_a_late_answer_counts(caplog):
    """And the answer of an earlier look that comes later takes nothing back."""
    first, looks = threading.Event(), []

    def ask():
        looks.append(1)
        number = len(looks)
        first.wait(HOPE_S) if number == 1 else time.sleep(0.7)
        return number == 2

    with Poll(ask) as poll:
        until(lambda: poll.told)
        first.set()
    assert caplog.text.count("no answer within 0.5 s") == 1


def test_looks_that_hang_are_few_and_stall_nothing(monkeypatch):
    """Neither the loop nor `close`; and the next notice is heard once they end."""
    monkeypatch.setattr(notices, "ANSWER_S", 0.01)
    gate, looks = threading.Event(), []

    def ask():
        looks.append(1)
        gate.wait(HOPE_S)
        return gate.is_set()

    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False, notice=ask)
        until(lambda: len(looks) == notices.MOST_HUNG)
        began = time.monotonic()
        for step in range(3):
            assert not manager.reached_preemption(step)
            manager.save(step, {"w": torch.ones(10)}).result()
        time.sleep(0.2)
        assert len(looks) == notices.MOST_HUNG
        other = SnapshotManager(created(), run="b", options=OPTIONS)
        other.handle_preemption(end=False, notice=ask)
        other.close()
        assert time.monotonic() - began < HOPE_S / 2
        gate.set()
        until(lambda: manager.reached_preemption(3))


def test_a_process_ends_while_a_look_hangs():
    program = """
import time, torch
from kit.repositories import created
from snapstore import SnapshotManager
from snapstore.distributed import notices
notices.POLL_S = notices.ANSWER_S = 0.01
manager = SnapshotManager(created(), run="a")
looks = []
manager.handle_preemption(notice=lambda: looks.append(1) or time.sleep(1000))
while not looks:
    time.sleep(0.01)
manager.save(1, {"w": torch.ones(3)})
manager.close()
"""
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, timeout=300)


def test_a_poller_that_is_closed_tells_nothing(tmp_path):
    path, asked = tmp_path / "stop", []
    with Poll(lambda: bool(asked.append(1)) or path.exists()) as poll:
        until(lambda: asked)
    path.touch()
    time.sleep(0.2)
    assert poll.told == []


@pytest.mark.parametrize("notice", ["missing/stop", "file/stop"])
def test_a_file_of_a_folder_that_is_missing_warns(tmp_path, monkeypatch, notice, caplog):
    """It is rather a typing error, or a volume that is not mounted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with Poll(notice) as poll:
        until(lambda: "cannot be read" in caplog.text)
        assert poll.told == []
        if notice.startswith("missing"):
            (tmp_path / "missing").mkdir()
            (tmp_path / notice).touch()
            until(lambda: poll.told)


@pytest.mark.parametrize(
    ("notice", "says"),
    [
        ("", "expected a path"),
        ("s3://bucket/stop", "expected a path"),
        ("file:///tmp/stop", "expected a path"),
        ("a\0b", "expected a path"),
        ("http://", "begins with http"),
        (3, "got int"),
        (b"stop", "expected a path"),
        (["stop"], "got list"),
        (urllib.request.Request("ftp://host/a"), "begins with http"),
        ("http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01", "pass a function"),
    ],
)
def test_a_notice_of_no_kind_is_refused(notice, says):
    """Whatever was set before goes on."""
    before = signal.getsignal(signal.SIGTERM)
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        with pytest.raises(InvalidInputError, match=says):
            manager.handle_preemption(notice=notice)
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_child_looks_no_more(tmp_path):
    """Its parent's threads are not there; its end is its own."""
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False, notice=tmp_path / "stop")
        child = os.fork()
        if not child:
            os._exit(threading.active_count())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
