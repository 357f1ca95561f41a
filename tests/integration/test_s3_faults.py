"""A fault of the network, the server or its administrator loses no committed snapshot on S3.

Each fault ends in time, in a committed snapshot or in a clear error. Every snapshot that was committed before
restores, and the next save works once the fault is over. `SNAPSTORE_TEST_THOROUGH=1` runs every combination.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path

import boto3
import pytest

from kit import foreign
from kit.objects import clone, flip, keys_of
from kit.repositories import OPTIONS, check_restores, check_whole, opened, same, save, values, version_of
from kit.s3_stores import fresh_url, impatient, needs_server
from kit.samples import THOROUGH
from kit.tcp_proxy import Fault, Proxy, answer, lose_answer
from snapstore import Repository
from snapstore.errors import (
    AlreadyExistsError,
    CapabilityError,
    ConflictError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from snapstore.format.keys import pack_key, parse_record_key
from snapstore.format.manifests import manifest
from snapstore.format.records import ABORTED, Snapshot, encode
from snapstore.retention import KeepLast
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.store import S3Store

pytestmark = needs_server

TOOL = Path(__file__).parents[2] / "tools" / "s3-server"
#: The commit and its withdrawal make several attempts, each of which may wait for a second; the rest is margin.
IN_TIME_S = 60.0
#: The error of a store whose server does not answer.
LATE = "no answer in time|could not be rolled back"


@pytest.fixture(autouse=True)
def _cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def proxy():
    with Proxy(os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")) as proxy:
        yield proxy


@cache
def two_snapshots() -> MemoryStore:
    """Return a repository with a@0 and a@1."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(2):
            save(repository, "a", step, step)
    return store


class World:
    """A copy of `made` in a bucket, with one store that uses the proxy and one, `straight`, that does not."""

    def __init__(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, made: MemoryStore) -> None:
        self.url, self.proxy = fresh_url(), proxy
        self.straight = S3Store(self.url)
        for key in keys_of(made):
            self.straight.put(key, made.get(key))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        self.store = impatient(self.url)
        self.began = time.monotonic()

    def save(self, step: int = 2):
        with opened(self.store) as repository:
            return save(repository, "a", step, step)

    def steps(self) -> list[int]:
        with opened(self.straight) as repository:
            return [s.step for s in repository.snapshots("a")]

    def check(self, steps: list[int]) -> None:
        """Check that all ended in time, that these steps are there and whole, and that the next save works."""
        assert time.monotonic() - self.began < IN_TIME_S
        assert self.steps() == steps
        self.proxy.heal()
        if THOROUGH:
            check_whole(self.store)
            return
        with opened(self.store) as repository:
            save(repository, "a", 900, 900)
            for snapshot in repository.snapshots():
                assert same(repository.restore(f"id:{snapshot.id}"), values(*version_of(snapshot)))


@pytest.fixture
def world(proxy, monkeypatch):
    return World(proxy, monkeypatch, two_snapshots())


def cases(*chosen: tuple, every: list[tuple]) -> list[tuple]:
    """Return all combinations if THOROUGH, else the chosen ones."""
    return every if THOROUGH else list(chosen)


HOWS, KINDS = ("reset", "close", "stall"), ("snapshots", "packs", "manifests", "sessions")


def put_of(kind: str):
    return lambda method, target: method == "PUT" and f"/{kind}/" in target


def get_of(kind: str):
    return lambda method, target: method == "GET" and f"/{kind}/" in target


def listing(method: str, target: str) -> bool:
    return method == "GET" and "list-type=2" in target


# --- the commit ---


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "how"),
    cases(("snapshots", "reset"), ("snapshots", "stall"), ("packs", "close"), ("manifests", "reset"),
          ("sessions", "reset"), every=list(product(KINDS, HOWS))),
)  # fmt: skip
def test_the_answer_to_a_put_is_lost(world, kind, how):
    """The repeated PUT finds the object there; a read shows that it is the object of this save."""
    rule = world.proxy.fault(put_of(kind), lose_answer(how))
    world.save()
    assert rule.fired == 1
    assert len([r for r in world.proxy.requests if put_of(kind)(*r)]) >= 2
    world.check([0, 1, 2])


@pytest.mark.parametrize("fault", [answer(503, "SlowDown"), lose_answer(), Fault(request_bytes=100_000)],
                         ids=["refused", "lost", "cut"])  # fmt: skip
def test_a_large_body_is_sent_again_from_its_start(world, fault):
    """The body of a pack is sent as a file, which a second attempt must rewind."""
    data = os.urandom(1_000_000)
    rule = world.proxy.fault(put_of("packs"), fault, times=2)
    world.store.put("packs/large", data)
    assert rule.fired == 2
    assert world.straight.get("packs/large") == data
    world.straight.delete(["packs/large"])
    world.check([0, 1])


def test_every_answer_to_the_commit_is_lost(world):
    """No PUT is answered; a read of the key shows that one has arrived."""
    world.proxy.fault(put_of("snapshots"), lose_answer(), times=3)
    world.save()
    world.check([0, 1, 2])


# --- compact, recode, repair ---


def to_compact() -> MemoryStore:
    """Return a repository with a@5 to a@7, whose chains need chunks of forgotten snapshots."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(8):
            save(repository, "a", step, step)
        repository.forget([KeepLast(3)], run="a")
        repository.gc()
    return store


def to_recode() -> MemoryStore:
    """Return a repository with a@0 and a@1 in another codec."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository, foreign.written():
        for step in range(2):
            save(repository, "a", step, step)
    return store


def to_repair() -> MemoryStore:
    """Return a repository with a@0, which has a damaged pack, and b@0, a later save of the same content."""
    store = clone(two_snapshots())
    with opened(store) as repository:
        repository.forget_snapshots(["a@1"], force=True)
        repository.gc()
        parts = repository.snapshot("a@0").manifests
        key = pack_key(next(name for ref in parts for name in manifest.read(store, ref, None).header.pack_names))
        flip(store, key, store.stat(key).size_bytes // 2)
        repository.repair(apply=True)
        repository.save(values("a", 0), run="b", step=0)
    return store


REWRITES = {
    "compact": (to_compact, lambda r: r.compact(), [5, 6, 7]),
    "recode": (to_recode, lambda r: r.recode(), [0, 1]),
    "repair": (to_repair, lambda r: r.repair(apply=True), [0]),
}


def needed(repository) -> list[tuple[str, int]]:
    return [(s.ref, s.revision) for s in repository.snapshots()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["lost", "stays"])
@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["snapshots", "packs"])
@pytest.mark.parametrize("verb", REWRITES)
def test_a_rewrite_beside_a_bad_network(proxy, monkeypatch, verb, kind, what):
    """The rewrite survives a lost answer; if every PUT is refused it ends in an error, and a later run completes it."""
    foreign.readable(monkeypatch)
    make, act, steps = REWRITES[verb]
    world = World(proxy, monkeypatch, make())
    with opened(world.store) as repository:
        before = dict(needed(repository))
        rule = proxy.fault(
            put_of(kind),
            lose_answer() if what == "lost" else answer(503, "SlowDown"),
            times=1 if what == "lost" else 10**6,
        )
        try:
            act(repository)
        except StorageError:
            assert what == "stays"
        assert rule.fired or (verb, kind) == ("repair", "packs")
    assert time.monotonic() - world.began < IN_TIME_S
    world.proxy.heal()
    with opened(world.store) as repository:
        act(repository)
        repository.gc()
        after = dict(needed(repository))
        assert after.keys() == before.keys()
        assert any(after[ref] > before[ref] for ref in after), "it is done"
        for snapshot in repository.snapshots("a"):
            assert snapshot.step in steps
            assert same(repository.restore(f"id:{snapshot.id}"), values(*version_of(snapshot)))
        assert repository.stats().unneeded_bytes == 0 or verb == "repair"
        assert repository.check("restore").ok or verb == "repair"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_409_is_tried_again(world, kind):
    rule = world.proxy.fault(put_of(kind), answer(409, "ConditionalRequestConflict"), times=2)
    world.save()
    assert rule.fired == 2
    world.check([0, 1, 2])


@pytest.mark.skipif(not THOROUGH, reason="takes nine seconds")
def test_409_for_ever(world):
    world.proxy.fault(put_of("packs"), answer(409, "ConditionalRequestConflict"), times=1000)
    with pytest.raises(StorageError, match="ConditionalRequestConflict"):
        world.save()
    world.check([0, 1])


def test_412_because_a_gc_was_first(world):
    """The gc of another process has created the record as aborted, so the save commits nothing."""

    def fence() -> None:
        key = world.proxy.requests[-1][1].split("?")[0].split(f"{world.straight._requests.prefix}")[1]
        run, step, name, _ = parse_record_key(key)
        world.straight.put(key, encode(Snapshot(id=name, run=run, step=step, seq=0, state=ABORTED, write_id="0" * 32)))

    world.proxy.fault(put_of("snapshots"), Fault(before=fence))
    with pytest.raises(ConflictError, match="another writer"):
        world.save()
    world.check([0, 1])


def test_412_because_of_another_object_after_a_lost_answer(world):
    """A repeated PUT that finds other bytes than its own reports that the key is taken."""
    store = world.store
    world.proxy.fault(
        lambda m, t: m == "PUT", Fault(before=lambda: world.straight.put("taken", b"theirs"), answer=None)
    )
    world.proxy.fault(lambda m, t: m == "PUT", lose_answer())
    with pytest.raises(AlreadyExistsError, match=r"^taken "):
        store.put("taken", b"ours, longer")
    assert world.straight.get("taken") == b"theirs"
    world.straight.delete(["taken"])


# --- storms, stalls, short bodies ---


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable")])
def test_a_storm_that_passes(world, status, code):
    """Every third request is refused, six times in all; the client tries again each time."""
    count = [0]

    def every_third(method: str, target: str) -> bool:
        count[0] += 1
        return count[0] % 3 == 0

    rule = world.proxy.fault(every_third, answer(status, code), times=6)
    world.save()
    assert rule.fired == 6
    world.check([0, 1, 2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    cases(("packs", 503, "SlowDown"), ("snapshots", 500, "InternalError"), ("sessions", 500, "InternalError"),
          every=[(k, *e) for k in KINDS for e in [(500, "InternalError"), (503, "SlowDown")]]),
)  # fmt: skip
def test_a_storm_that_stays(world, status, code, kind):
    world.proxy.fault(put_of(kind), answer(status, code), times=1000)
    with pytest.raises(StorageError, match=code):
        world.save()
    world.check([0, 1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["reset", "stall"])
def test_a_put_that_breaks_off(world, how):
    rule = world.proxy.fault(put_of("packs"), Fault(request_bytes=1000, how=how))
    world.save()
    assert rule.fired == 1
    world.check([0, 1, 2])


@pytest.mark.parametrize("how", ["reset", "stall"] if THOROUGH else ["stall"])
def test_puts_that_always_break_off(world, how):
    world.proxy.fault(put_of("packs"), Fault(request_bytes=1000, how=how), times=1000)
    with pytest.raises(StorageError, match="packs/"):
        world.save()
    world.check([0, 1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "how"),
    cases(("snapshots", "reset"), ("packs", "close"), ("packs", "stall"), ("manifests", "reset"),
          every=list(product(KINDS[:3], HOWS))),
)  # fmt: skip
def test_a_get_that_breaks_off(world, kind, how, monkeypatch, tmp_path):
    """The next attempt continues where it broke off."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cold"))
    rule = world.proxy.fault(get_of(kind), Fault(response_bytes=100, how=how), times=2)
    with opened(world.store) as repository:
        assert same(repository.restore("a@1"), values("a", 1))
    assert rule.fired == 2
    world.check([0, 1])


@pytest.mark.parametrize("how", HOWS if THOROUGH else ["close"])
def test_gets_that_always_break_off(world, how):
    """No attempt brings a new byte. The test counts requests, since layers of retries would multiply them."""
    world.proxy.fault(get_of("packs"), Fault(response_bytes=0, how=how), times=1000)
    with opened(world.store) as repository, pytest.raises(StorageError, match="packs/"):
        repository.restore("a@1")
    asked = [target for method, target in world.proxy.requests if get_of("packs")(method, target)]
    assert max(asked.count(target) for target in asked) <= 3
    world.check([0, 1])


def test_an_outage_under_sixteen_writers(proxy, monkeypatch):
    """Every thread outlasts it: they do not share one budget of retries, as they would in botocore (35 for all)."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setattr("snapstore.storage.s3.retry._LONGEST_PAUSE_S", 0.1)
    store = S3Store(fresh_url())
    rule = proxy.fault(put_of("packs"), answer(503, "ServiceUnavailable"), times=60)
    threads = [threading.Thread(target=store.put, args=(f"packs/{i}", b"x")) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rule.fired == 60
    assert sorted(keys_of(store)) == sorted(f"packs/{i}" for i in range(16))
    store.put("packs/later", b"x")


@pytest.mark.parametrize("body", [b"", b"<html>default backend - 404</html>"], ids=["empty", "html"])
def test_a_proxys_404_is_no_missing_object(world, body):
    """Else gc would think that a live session has ended, and delete its objects."""
    head = f"HTTP/1.1 404 Not Found\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    with opened(world.straight) as repository:
        mine = repository.snapshots("a")[1].manifests[0].key
    before = keys_of(world.straight)
    for method in ("GET", "HEAD"):
        given = head if method == "HEAD" else head + body
        world.proxy.fault(lambda m, t, method=method: m == method and "/manifests/" in t, Fault(answer=given), times=9)
    for ask in (world.store.get, world.store.stat):
        with pytest.raises(StorageError) as caught:
            ask(mine)
        assert not isinstance(caught.value, NotFoundError)
    world.proxy.heal()
    world.proxy.fault(
        lambda m, t: m in ("GET", "HEAD") and ("/snapshots/" in t or "/gc/" in t or "/sessions/" in t) and "?" not in t,
        Fault(answer=head), times=1000,
    )  # fmt: skip
    with suppress(SnapstoreError), opened(world.store) as repository:
        repository.gc()
    assert set(keys_of(world.straight)) >= set(before)
    world.check([0, 1])


def test_an_answer_that_says_less_than_its_range(world):
    """Each answer is shorter than its range, without a failure: the read must end."""
    rule = world.proxy.fault(
        get_of("packs"), Fault(answer=b"HTTP/1.1 206 Partial\r\nContent-Length: 3\r\n"
                               b"Content-Range: bytes 0-99/4000\r\nConnection: close\r\n\r\nabc"), times=1000
    )  # fmt: skip
    with pytest.raises(StorageError, match="packs/"):
        world.store.get_range("packs/00/00", 0, 100)
    assert rule.fired <= 9
    world.check([0, 1])


def test_a_get_of_another_range_than_asked_for(world):
    world.proxy.fault(get_of("packs"), Fault(replace=(b"bytes ", b"bytes 1")), times=1000)
    with opened(world.store) as repository, pytest.raises(StorageError, match="another range"):
        repository.restore("a@1")
    world.check([0, 1])


def test_no_server_answers(world, monkeypatch):
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StorageError, match="AWS_ENDPOINT_URL_S3"):
            Repository.open(impatient(world.url))
    world.check([0, 1])


# --- the server dies, or sleeps ---


@contextmanager
def gateway(monkeypatch):
    """Start one more gateway to the same objects, which the test may kill."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start() -> subprocess.Popen:
        process = subprocess.Popen([TOOL, "gateway", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            time.sleep(0.1)
        raise AssertionError("the gateway does not come up")

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    running = [start()]
    try:
        yield running, start
    finally:
        for process in running:
            process.kill()
            process.wait()


def at_request(store, key_part, method, call):
    """Call `call` just before the first such request is sent."""
    armed = [True]

    def fire(request, **_):
        if armed[0] and key_part in request.url and request.method == method:
            armed[0] = False
            call()

    store._client.meta.events.register("before-send.s3", fire)


def test_the_server_is_killed_and_comes_back(monkeypatch):
    """If it is killed and restarted, a save and a restore continue; if it is not restarted, a save fails."""
    straight = S3Store(fresh_url())
    with Repository.create(straight, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
    with gateway(monkeypatch) as (running, start):
        store = S3Store(straight.url, connect_timeout_s=1, read_timeout_s=2)

        def kill() -> None:
            running[-1].kill()
            running[-1].wait()
            threading.Thread(target=lambda: running.append(start())).start()

        with opened(store) as repository:
            at_request(store, "/packs/", "PUT", kill)
            save(repository, "a", 1, 1)
            at_request(store, "/snapshots/", "PUT", kill)
            save(repository, "a", 2, 2)
            at_request(store, "/packs/", "GET", kill)
            for snapshot in repository.snapshots():
                assert same(repository.restore(snapshot.ref), values(*version_of(snapshot)))
            assert len(running) == 4
            hasty = impatient(straight.url)
            running[-1].kill()
            with opened(straight) as other:
                config = other.config
            with Repository(hasty, config, OPTIONS) as without, pytest.raises(StorageError, match="connection failed"):
                save(without, "a", 3, 3)
    check_whole(straight)


def test_the_server_sleeps(monkeypatch):
    """A server that is stopped in a save, a commit or a restore ends it by a timeout; after SIGCONT all works again."""
    straight = S3Store(fresh_url())
    with Repository.create(straight, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
    with gateway(monkeypatch) as (running, _):
        store = impatient(straight.url, attempts=1, connect_timeout_s=0.4, read_timeout_s=0.4)
        with opened(store) as repository:
            stages = [("/packs/", "PUT"), ("/packs/", "GET"), *([("/snapshots/", "PUT")] if THOROUGH else [])]
            for step, (key_part, method) in enumerate(stages):
                at_request(store, key_part, method, lambda: running[0].send_signal(signal.SIGSTOP))
                began = time.monotonic()
                with pytest.raises(StorageError, match=LATE):
                    save(repository, "a", 10 + step, 1) if method == "PUT" else repository.restore("a@0")
                assert time.monotonic() - began < IN_TIME_S
                running[0].send_signal(signal.SIGCONT)
                in_some_attempt(save, repository, "a", 20 + step, 11)
            in_some_attempt(check_restores, repository)
    check_whole(straight)


def in_some_attempt(call, *args):
    """Call `call` until it gets its answers in time: on a busy machine a server that runs may take 0.4 s, too."""
    end = time.monotonic() + IN_TIME_S
    while True:
        try:
            return call(*args)
        except StorageError as error:
            if not re.search(LATE, str(error)) or time.monotonic() > end:
                raise


# --- what administrators do ---


def test_quota():
    """Without room a save raises StorageFullError, and earlier snapshots are whole; with room the next save works."""
    bucket = f"quota-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    store = S3Store(f"s3://{bucket}/here")
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)

        def quota(*options: str) -> None:
            scope = ["--quota-scope=bucket", f"--bucket={bucket}", "--uid=snapstore"]
            subprocess.run([TOOL, "admin", "quota", *options, *scope], check=True, capture_output=True)

        def save_until_full() -> None:
            for step in range(1, 50):
                save(repository, "a", step, step)

        quota("set", "--max-size=131072")
        quota("enable")
        with pytest.raises(StorageFullError, match="quota"):
            save_until_full()
        fitted = check_restores(repository)
        assert 2 <= len(fitted) < 49
        with suppress(StorageFullError):  # a revision needs room too; how much is left depends on how the server counts
            repository.forget([KeepLast(1)], run="a", force=True)
            repository.gc()
        check_restores(repository)
        quota("disable")
        save(repository, "a", 30, 30)
        check_restores(repository)
    check_whole(store)


@pytest.mark.parametrize(
    ("variable", "value"), [("AWS_SECRET_ACCESS_KEY", "not-the-secret"), ("AWS_ACCESS_KEY_ID", "NOBODYSKEY")]
)
def test_wrong_credentials(world, monkeypatch, variable, value, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(variable, value)
    for call in (Repository.open, lambda store: Repository.create(f"{store.url}/new")):
        with pytest.raises(StorageError, match=r"credentials|permission") as caught:
            call(impatient(world.url))
        assert value not in f"{caught.value}{caplog.text}"
    monkeypatch.undo()


def test_expired_credentials(world):
    """They expire during a save: the committed snapshots stay, and the error says what to do."""
    world.proxy.fault(put_of("manifests"), answer(400, "ExpiredToken"), times=1000)
    with pytest.raises(StorageError, match="expired; renew"):
        world.save()
    world.check([0, 1])


def test_no_credentials(world, monkeypatch, tmp_path):
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="no credentials found"):
        Repository.open(impatient(world.url))


def test_credentials_are_in_no_text(world, monkeypatch, caplog):
    """No failure repeats a secret, a token or a key id."""
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_SESSION_TOKEN": "token-123",
        "AWS_ACCESS_KEY_ID": "AKIA-123",
    }
    for variable, value in secrets.items():
        monkeypatch.setenv(variable, value)
    caplog.set_level(logging.DEBUG, logger="snapstore")
    store = impatient(world.url)
    texts = [repr(store), repr(vars(store))]
    for call in (
        lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: store.get_range("a", 0, 1),
        lambda: list(store.list("")), lambda: store.delete(["a", "b"]), lambda: store.touch("a"), store.now_s,
        store.prepare, lambda: Repository.open(store), lambda: store.stat("a"),
    ):  # fmt: skip
        with pytest.raises(SnapstoreError) as caught:
            call()
        texts.append(str(caught.value))
    for value in secrets.values():
        assert value not in "".join(texts) + caplog.text


def test_403_on_a_listing_stops_a_gc(world):
    """gc does not take it for an empty repository, and deletes nothing."""
    with opened(world.store) as repository:
        repository.forget_snapshots(["a@0"])
        before = keys_of(world.straight)
        for prefix in ("packs", "manifests", "snapshots", "gc", "sessions"):
            world.proxy.heal()
            world.proxy.fault(
                lambda m, t, p=prefix: listing(m, t) and f"{p}%2F" in t, answer(403, "AccessDenied"), times=99
            )
            with pytest.raises(StorageError, match="no permission"):
                repository.gc()
            now = [key for key in keys_of(world.straight) if not key.startswith("gc/")]
            assert now == [key for key in before if not key.startswith("gc/")]
    world.check([1])


def test_a_listing_that_is_cut_short_is_no_listing(world):
    """It lacks its end, or the token of the next page."""
    body = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    for cut, text in ((len(body), "does not say where to continue"), (-9, "cannot list"), (0, "cannot list")):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body[:cut])
        world.proxy.fault(listing, Fault(answer=head + body[:cut]), times=1000)
        with pytest.raises(StorageError, match=text):
            list(world.store.list("packs/"))
        world.proxy.heal()
    world.proxy.fault(listing, Fault(response_bytes=40, how="close"), times=1000)
    with pytest.raises(StorageError):
        list(world.store.list("packs/"))
    world.check([0, 1])


def test_a_server_that_ignores_if_none_match():
    """`init` notices it and refuses; no object is left."""
    store = S3Store(fresh_url())

    def strip(request, **_) -> None:
        del request.headers["If-None-Match"]

    store._client.meta.events.register("before-sign.s3.PutObject", strip)
    with pytest.raises(CapabilityError, match="overwrites silently"):
        Repository.create(store)
    with pytest.raises(NotFoundError):
        Repository.open(store)
    assert not list(store._requests.listed(""))


def test_no_such_bucket():
    for call in (Repository.create, Repository.open):
        with pytest.raises(StorageError, match="bucket does not exist"):
            call("s3://no-such-bucket/x")


def test_bytes_that_are_damaged_on_the_way_are_refused(world, monkeypatch):
    """The server checks the SHA-256 that a request is signed with."""
    monkeypatch.setattr("snapstore.storage.s3.retry._LONGEST_PAUSE_S", 0.1)

    def damage(request, **_) -> None:
        request.body = b"other bytes"

    store = S3Store(world.url)
    store._client.meta.events.register("before-send.s3.PutObject", damage)
    with pytest.raises(StorageError):
        store.put("damaged", b"these bytes")
    assert "damaged" not in keys_of(world.straight)


def test_a_forked_child_makes_connections_of_its_own(world):
    world.straight.put("forked", b"x")
    child = os.fork()
    if not child:
        os._exit(0 if world.straight.get("forked") == b"x" else 1)
    assert [world.straight.get("forked") for _ in range(10)] == [b"x"] * 10
    assert os.waitpid(child, 0)[1] == 0
    world.straight.delete(["forked"])


def test_connections_are_used_again(world):
    with opened(world.store) as repository:
        for _ in range(3):
            repository.restore("a@1")
    assert len(world.proxy.requests) > 20
    assert world.proxy.connections <= 12
