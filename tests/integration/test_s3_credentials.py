"""A process that lives longer than its AWS keys: it reads them once more when the server refuses them."""

from __future__ import annotations

import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import botocore.session
import pytest

from kit import s3_stores  # noqa: F401 - its clients share what they load
from kit.hostile_s3 import HostileS3, error
from kit.processes import environment
from snapstore.errors import StorageError
from snapstore.storage.s3.store import S3Store

SECRET = "hunter2XYZZY"
#: The server's error codes for refused keys, and their status.
CODES = {"InvalidAccessKeyId": 403, "SignatureDoesNotMatch": 403, "ExpiredToken": 400, "TokenRefreshRequired": 400}


class Guarded(HostileS3):
    """A server that accepts one access key, which is exchanged for another one before a request that contains `at`."""

    accepted, code, at, file = "", "InvalidAccessKeyId", "", None
    refused = 0

    def exchange(self, key, **options):
        """Accept only another key, which is in the file."""
        self.accepted = key
        write(self.file, key, **options)

    def answer_to(self, request):
        if self.at and self.at in f"{request.method} {request.target}":
            self.at = ""
            self.exchange("AKIATHIRD")
        if f"Credential={self.accepted}/" in request.fields["authorization"]:
            return super().answer_to(request)
        self.refused += 1
        reply = error(CODES[self.code], self.code)
        return reply if request.method != "HEAD" else reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def write(file, key, *, profile="mine"):
    file.write_text(f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")


@pytest.fixture
def server(tmp_path, monkeypatch):
    with Guarded() as server:
        server.file = tmp_path / "credentials"
        server.exchange("AKIAFIRST")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(server.file))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "mine")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        yield server


@pytest.fixture
def reads(monkeypatch):
    """Return a list with an item for each time that a session has read credentials."""
    done, whole = [], botocore.session.Session.get_credentials

    def get(session):
        if session._credentials is None:
            done.append(session)
        return whole(session)

    monkeypatch.setattr(botocore.session.Session, "get_credentials", get)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken"])
def test_a_training_goes_on_after_its_keys_have_been_exchanged(server, code, tmp_path):
    """The keys change between two saves, and while a later save uploads its packs: no save fails."""
    program = """if True:
        import sys
        import torch
        import snapstore

        state = {f"w{i}": torch.zeros(300_000) for i in range(4)}
        with snapstore.SnapshotManager("s3://bucket/p", run="a", save_interval_steps=1) as snapshots:
            for step in range(4):
                for w in state.values():
                    w += torch.rand(300_000)
                print("next", flush=True)
                sys.stdin.readline()
                snapshots.save(step, state).result()
            assert all(torch.equal(value, state[key]) for key, value in snapshots.restore().items())
            assert snapshots.latest_step() == 3
        print("done", flush=True)
    """
    server.code, log = code, tmp_path / "errors"
    variables = environment(SNAPSTORE_CACHE_DIR=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", program],
            **{"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "env": variables},
        ) as child,
    ):
        for step in range(4):
            assert child.stdout.readline() == "next\n", log.read_text()
            if step == 1:
                server.exchange("AKIASECOND")
            if step == 3:
                server.at = "PUT /bucket/p/packs/"
            child.stdin.write("\n")
            child.stdin.flush()
        assert child.stdout.readline() == "done\n", log.read_text()
        assert child.wait(60) == 0
    assert server.accepted == "AKIATHIRD"
    assert server.refused >= 2


@pytest.mark.parametrize("code", CODES)
def test_threads_that_share_a_client_read_the_keys_once(server, code, reads):
    server.code = code
    store = S3Store("s3://bucket/p")
    store.put("a/first", b"x")
    server.exchange("AKIASECOND")
    del reads[:]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.put(f"a/{i}", bytes(100_000)), range(16)))
        assert list(pool.map(lambda i: store.get(f"a/{i}"), range(16))) == [bytes(100_000)] * 16
    assert len(reads) == 1, reads
    assert len([*store.list("a/")]) == 17


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.stat("a"), lambda store: store.get("a"), lambda store: store.get_range("a", 1, 2),
        lambda store: [*store.list("")], lambda store: store.put("b", b"x"), lambda store: store.touch("a"),
        lambda store: store.delete(["a"]), lambda store: store.delete(["a", "b"]), lambda store: store.now_s(),
        lambda store: store.sizes(["a", "b"]), lambda store: store.lock("sessions/x", b"x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken"])
def test_each_request_reads_the_keys_once_more(server, act, code, reads):
    """HEAD's refusal says nothing, so a listing asks why."""
    server.code = code
    store = S3Store("s3://bucket/p", attempts=3)
    store.put("a", b"xyz")
    server.exchange("AKIASECOND")
    act(store)
    server.accepted = "none that anybody has"
    del reads[:]
    before = server.refused
    with pytest.raises(StorageError) as caught:
        act(store)
    text = str(caught.value)
    assert f"read them once more, from profile 'mine' of {server.file} ({code}, HTTP status {CODES[code]})" in text
    assert ("have expired" if code == "ExpiredToken" else "unknown or wrong credentials") in text
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert len(reads) <= 2, "a session for each attempt"
    assert server.refused - before <= 4


def test_the_error_names_the_place_of_the_keys(server, monkeypatch, tmp_path):
    """From the environment they cannot be read again. A profile that has gone is named as such."""
    server.file.unlink()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAFIRST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_PROFILE")
    store = S3Store("s3://bucket/p", attempts=3)
    store.put("a", b"x")
    server.accepted = "AKIASECOND"
    with pytest.raises(
        StorageError, match="once more, from its own environment, which no other process can change: st"
    ):
        store.get("a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"no credentials found; .* once more, from no place"):
        store.get("a")
    server.exchange("AKIASECOND", profile="default")
    assert store.get("a") == b"x"
    monkeypatch.setenv("AWS_PROFILE", "gone")
    server.accepted = "AKIATHIRD"
    with pytest.raises(StorageError, match="ProfileNotFound"):
        store.get("a")
    script = tmp_path / "tell.py"
    keys = f'{{"Version": 1, "AccessKeyId": "AKIATHIRD", "SecretAccessKey": "{SECRET}"}}'
    script.write_text(f"print({keys!r})")
    (tmp_path / "config").write_text(f"[profile gone]\ncredential_process = {sys.executable} {script}\n")
    assert store.get("a") == b"x"
    server.accepted = "AKIAFOURTH"
    with pytest.raises(StorageError, match=r"once more, from profile 'gone' \(custom-process\)"):
        store.get("a")


def test_the_store_stays_on_its_server_when_the_configuration_names_another(server, monkeypatch):
    """The objects of a save lie on one server, whatever the configuration says meanwhile."""
    store = S3Store("s3://bucket/p", attempts=3)
    store.put("a", b"x")
    server.exchange("AKIASECOND")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert store.get("a") == b"x"
