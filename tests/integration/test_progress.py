"""A verb that takes long says how far it is: in one line of a terminal, or in a line now and then.

The verbs are processes of their own; their store is a slow S3 server in this process, which may also be away.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kit.hostile_s3 import HostileS3, error
from kit.processes import environment
from kit.shell import invoke
from snapstore import Repository, SaveOptions
from snapstore.catalog import index
from snapstore.cli import output
from snapstore.storage import progress

#: A line says this once bytes are counted.
FAR = re.compile(r"checking, level data: \d[\d.]*[kM]?B of [\d.]+kB \(\d+%\), [\d.]+[kM]?B/s(, \d+ (s|min) left)?")

VERB = re.compile(r"checking, level data: |opening s3://bucket/repo: ")


def noise(step, nbytes=40_000):
    return {"w": np.random.default_rng(step).integers(0, 256, nbytes, np.uint8)}


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server with a bucket of ten packs."""
    with HostileS3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with Repository.create("s3://bucket/repo", options=SaveOptions(threads=1)) as repository:
            for step in range(10):
                repository.save(noise(step), run="exp", step=step)
        yield server


def slow(server, pause_s):
    """Let the server wait before it answers a read of a pack."""

    def answer_late(wire, honest):
        wire.over.wait(pause_s)
        wire.send(honest)
        return True

    server.lie("/packs/", answer_late, method="GET")


def command(*args, **settings):
    """Return the command for a verb as a process; `settings` are names of `output` with other values there."""
    lines = [f"output.{name} = {value}" for name, value in settings.items()]
    program = "\n".join(["from snapstore.cli import main, output", *lines, "main()"])
    return [sys.executable, "-c", program, "--repo", "s3://bucket/repo", *args]


@contextmanager
def terminal(columns=100):
    """Yield (a descriptor for the program's end of a terminal, a function that returns all that was written to it)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = bytearray()

    def read():
        while True:
            try:
                seen.extend(os.read(ours, 65536))
            except OSError:  # the other end was closed
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def written():
        if theirs_open:
            os.close(theirs_open.pop())
        reader.join(60)
        return seen.decode()

    theirs_open = [theirs]
    yield theirs, written
    written()
    os.close(ours)


def run_on(terminal_end, *args, **settings):
    """Run a verb with stderr on a terminal and stdout in a pipe; return the finished process."""
    env = environment(TERM="xterm", COLUMNS="300")  # of another terminal, such as the one around a container
    return subprocess.run(
        command(*args, **settings), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal_end,
        text=True, check=False, timeout=300,
    )  # fmt: skip


def shown(text):
    """Return each state of a line that a terminal showed."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", text)
    return [line.strip() for line in plain.split("\r") if line.strip()]


def test_a_terminal_shows_one_line_that_is_rewritten(server):
    slow(server, 0.3)
    with terminal() as (end, written):
        done = run_on(end, "check", "--read-data")
        text = written()
    assert (done.returncode, done.stdout) == (0, "10 snapshots are restorable (10 of 10 packs read)\nno problems\n")
    lines = shown(text)
    assert all(VERB.search(line) for line in lines)
    found = [line for line in lines if FAR.search(line)]
    assert len({FAR.search(line)[0] for line in found}) >= 3  # it advances
    assert any(line.endswith(" left") for line in found)
    assert text.count("\n") <= 2  # nothing scrolls; rich ends a line before it clears it, of the opening too
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[2K" in text.rpartition("\n")[2]  # and nothing stays


def test_a_terminal_that_is_closed_stops_no_verb(server):
    """A verb in the background goes on, and did so before it had a line to show; at its end it failed."""
    slow(server, 0.3)
    ours, theirs = pty.openpty()
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": theirs}
    line, env = command("check", "--read-data", SPINNER_AFTER_S=0), environment(TERM="xterm")
    with subprocess.Popen(line, env=env, start_new_session=True, **streams) as child:
        os.close(theirs)
        seen = b""
        while b"checking, level data" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
        said = child.stdout.read()
    assert (child.returncode, said) == (0, b"10 snapshots are restorable (10 of 10 packs read)\nno problems\n")


def test_a_narrow_terminal_cuts_the_line(server):
    slow(server, 0.3)
    with terminal(columns=30) as (end, written):
        assert run_on(end, "check", "--read-data").returncode == 0
        text = written()
    assert max(map(len, shown(text))) <= 30
    assert text.count("\n") <= 2


def test_a_short_verb_shows_nothing(server):
    with terminal() as (end, written):
        assert run_on(end, "check", SPINNER_AFTER_S=60).returncode == 0
        assert written() == ""


def run_in_pipes(*args, **settings):
    return subprocess.run(
        command(*args, **settings), env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def test_a_log_gets_a_line_now_and_then(server):
    assert output.LINE_EVERY_S == 30
    slow(server, 0.3)
    began_s = time.monotonic()
    quiet = run_in_pipes("check", "--read-data")
    assert quiet.returncode == 0
    assert len(quiet.stderr.splitlines()) <= (time.monotonic() - began_s) // 30  # none, unless the machine is very busy
    began_s = time.monotonic()
    done = run_in_pipes("check", "--read-data", "--json", LINE_EVERY_S=0.5)
    took_s = time.monotonic() - began_s
    assert json.loads(done.stdout)["packs_read"] == 10
    lines = done.stderr.splitlines()
    assert 3 <= len(lines) <= took_s / 0.5
    assert all(line.startswith("snapstore: ") and VERB.search(line) and line.isprintable() for line in lines)
    assert sum(FAR.search(line) is not None for line in lines) >= 3


def test_a_pipe_that_nobody_reads_stops_no_verb(server):
    """Its lines filled the pipe, and the verb waited for a reader at its end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    slow(server, 0.1)
    line = command("check", "--read-data", LINE_EVERY_S=0.001)
    done = subprocess.run(line, env=environment(), stdout=subprocess.PIPE, stderr=writer, check=False, timeout=300)
    os.close(writer)
    assert done.returncode == 0
    with os.fdopen(reader) as said:
        assert said.read().startswith("snapstore: opening s3://bucket/repo: ")


def test_a_dumb_terminal_is_a_log(server):
    with terminal() as (end, written):
        env = environment(TERM="dumb")
        slow(server, 0.1)
        done = subprocess.run(
            command("check", "--read-data", LINE_EVERY_S=0.3), env=env, stdout=subprocess.PIPE, stderr=end, check=False
        )
        text = written()
    assert done.returncode == 0
    assert "\x1b" not in text
    assert "snapstore: checking, level data: " in text


@pytest.mark.parametrize(
    ("on_terminal", "part", "what"),
    [
        (True, "/packs/", "checking, level data: "),
        (False, "/packs/", "checking, level data: "),
        (True, "/config", "opening s3://bucket/repo: "),  # it is away from the beginning
    ],
)
def test_a_store_that_is_away_is_named(server, on_terminal, part, what):
    """The server refuses every read of these objects for four seconds, and is back then."""
    ends_s = time.monotonic() + 1e9

    def away(wire, honest):
        nonlocal ends_s
        ends_s = min(ends_s, time.monotonic() + 4)
        back = time.monotonic() > ends_s
        wire.send(honest if back else error(503, "ServiceUnavailable"))
        return back

    server.lie(part, away, method="GET")
    if on_terminal:
        with terminal() as (end, written):
            done = run_on(end, "check", "--read-data")
            lines = shown(written())
    else:
        done = run_in_pipes("check", "--read-data", LINE_EVERY_S=0.5)
        lines = done.stderr.splitlines()
    assert done.returncode == 0
    found = [re.search(r", retrying S3 since (\d+) s$", line) for line in lines if what in line]
    waits = [int(match[1]) for match in found if match]
    assert waits == sorted(waits)
    assert max(waits) >= 2


def test_what_is_printed_meanwhile_stays_on_stdout(server, tmp_path):
    """The lines of an import went to the terminal of stderr, once its progress was shown, and not into the pipe."""
    for step in range(4):
        torch.save({"w": torch.from_numpy(noise(20 + step, 400_000)["w"])}, tmp_path / f"step_{step}.pt")

    def answer_late(wire, honest):
        wire.over.wait(0.5)
        wire.send(honest)
        return True

    server.lie("/packs/", answer_late, method="PUT", stored=True)
    with terminal() as (end, written):
        sources = [str(tmp_path / f"step_{step}.pt") for step in range(4)]
        done = run_on(end, "import", *sources, "--run", "new", SPINNER_AFTER_S=0)
        text = written()
    assert done.returncode == 0
    assert [line.split(": ")[1].split()[0] for line in done.stdout.splitlines()[:4]] == [f"new@{n}" for n in range(4)]
    assert "importing 4 into new: " in text
    assert "new@0" not in text


# --- what each verb counts


@pytest.fixture
def counted(monkeypatch):
    """Return the list to which each verb of this process appends its progress."""
    seen = []
    original = progress.shown

    @contextmanager
    def shown():
        with original() as own:
            seen.append(own)
            yield own

    monkeypatch.setattr(progress, "shown", shown)
    return seen


VERBS = {
    "check": ["check", "--read-data"],
    "rebuild": ["check", "--restore"],
    "save": ["save", "x.pt", "--run", "file", "--step", "1"],
    "save again": ["save", "x.pt", "--run", "file", "--step", "2"],  # a delta reads its base, which counts for nothing
    "save a folder": ["save", "folder", "--run", "folder", "--step", "1"],
    "restore a folder": ["restore", "folder@1", "-o", "restored"],
    "restore": ["restore", "exp@2", "-o", "y.pt"],
    "restore tensors": ["restore", "exp@2", "-o", "y.safetensors"],
    "export": ["export", "exp@2", "--to", "hf", "-o", "hf"],
    "export to dcp": ["export", "exp@2", "--to", "dcp", "-o", "dcp"],
    "import": ["import", "dcp", "--run", "imported", "--step", "1"],
    "diff": ["diff", "exp@2", "exp@3"],
    "copy": ["copy", "--to", "copied"],
    "copy again": ["copy", "--to", "copied"],
    "recode": ["recode", "--all"],
    "compact": ["compact"],
    "repair": ["repair", "--level", "restore"],
    "gc": ["gc"],
    "log of a cold index": ["index", "rebuild"],
}


def test_each_verb_counts_all_of_its_bytes_and_no_more(tmp_path, monkeypatch, counted):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPSTORE_REPO", str(tmp_path / "repo"))
    monkeypatch.setattr(index, "RECORDS_IN_MEMORY", 2)  # few records count for nothing
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(noise(40, 200_000)["w"].tobytes())
    torch.save({"model": {"w": torch.arange(60_000)}}, "x.pt")
    with Repository.create("repo", chunk_bytes=4096, options=SaveOptions(threads=1)) as repository:
        for step in range(4):
            state = {"model": {"w": torch.arange(60_000) * (step + 1), "v": torch.from_numpy(noise(1)["w"])}}
            repository.save(state, run="exp", step=step)
        repository.forget_snapshots(["exp@0", "exp@1"])
    for name, verb in VERBS.items():
        counted.clear()
        done = invoke(verb)
        assert done.exit_code == 0, (name, done.stderr)
        own = counted[-1]  # those before it are of opening the repository
        assert own.done_bytes == own.total_bytes, name
        assert own.total_bytes > (0 if name == "gc" else 1000), name
    assert progress.retrying() is None


def test_plain_values_are_no_part_of_the_total(tmp_path, monkeypatch, counted):
    """Many of them lie in chunks; their bytes were counted, but not expected, so no time left was shown.

    NumPy's arrays are read twice for a file of torch, and expected as often.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPSTORE_REPO", str(tmp_path / "repo"))
    state = {
        "w": torch.arange(20_000),
        "a": np.arange(30_000),
        "seen": [f"sample {number}" for number in range(100_000)],
    }
    with Repository.create("repo", options=SaveOptions(threads=1)) as repository:
        repository.save(state, run="exp", step=0)
        repository.save(state | {"w": state["w"] * 3}, run="exp", step=1)
    for verb, nbytes in ((["restore", "exp@1", "-o", "x.pt"], 640_000), (["diff", "exp@0", "exp@1"], 320_000)):
        counted.clear()
        assert invoke(verb).exit_code == 0
        assert counted[-1].done_bytes == counted[-1].total_bytes == nbytes


@pytest.mark.filterwarnings("error")  # of an exception that ends a thread
@pytest.mark.parametrize(("on_terminal", "threads"), [(True, 0), (False, 0), (True, 1)])
def test_a_process_that_may_start_no_thread_goes_on_without(monkeypatch, on_terminal, threads):
    original, started = threading.Thread.start, []

    def start(self):
        started.append(self)
        if len(started) > threads:
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(output, "SPINNER_AFTER_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.spinner("working"):
        for thread in started[:threads]:
            thread.join(60)  # it has tried to show the line
        done = True
    assert done
    assert len(started) == threads + 1


def test_nothing_is_counted_where_nothing_is_shown(tmp_path):
    with progress.shown() as own:
        pass
    with Repository.create(tmp_path / "r") as repository:
        repository.save(noise(1), run="r", step=0)
        repository.check("data")
    progress.expect(5)
    progress.advance(5)
    assert list(progress.through([1, 2], int)) == [1, 2]
    assert (own.done_bytes, own.total_bytes) == (0, 0)


def test_a_share_counts_for_what_was_expected():
    with progress.shown() as own:
        for item in progress.through([10, 20, 30], int):
            assert own.total_bytes == 60
            progress.expect(1000)  # is in the share already
            progress.advance(item // 2)
            with progress.whole(5):
                progress.advance(1000)  # an estimate that was too low
            assert own.done_bytes == {10: 10, 20: 30, 30: 60}[item]
        assert (own.done_bytes, own.total_bytes) == (60, 60)
        progress.expect(10)
        progress.advance(4)
        assert (own.done_bytes, own.total_bytes) == (64, 70)


def test_a_line_says_bytes_rate_and_time_left(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with progress.shown() as own:
        line = output.ProgressLine("restoring exp@3", own)
        now_s[0] += 2
        assert line() == "restoring exp@3: 2 s"
        progress.expect(3_400_000_000)
        progress.advance(1_000_000_000)
        now_s[0] += 2
        assert line() == "restoring exp@3: 1.0GB of 3.4GB (29%), 250.0MB/s, 10 s left"
        now_s[0] += 20
        assert line() == "restoring exp@3: 1.0GB of 3.4GB (29%), 0B/s"  # nothing in the last seconds
        progress.advance(1)
        now_s[0] += 1
        progress.begin_retry("S3")
        now_s[0] += 4
        assert line().endswith(", retrying S3 since 4 s")
        progress.begin_retry("S3")
        now_s[0] += 146
        assert line().endswith(", retrying S3 since 2 min")
        progress.end_retry()
        progress.advance(4_000_000_000)
        assert line().startswith("restoring exp@3: 5.0GB, ")  # more than was expected
