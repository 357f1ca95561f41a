"""Every verb of a store survives every lie of a hostile S3 server, told once or always (tests/kit/hostile_s3.py).

A call always ends in time, with the truth or with an error of snapstore, and the next honest request gets its own
answer. `SNAPSTORE_TEST_THOROUGH=1` tells every lie to every verb in every way; without it `SEED` chooses some of them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from copy import copy
from itertools import count, product
from multiprocessing.pool import ThreadPool

import pytest

from kit.hostile_s3 import LIES, SLOW, HostileS3, Lie, error, mutates, says
from kit.ranks import save_shared
from kit.repositories import opened, same, values
from kit.samples import SEED, THOROUGH
from snapstore import Repository, SaveOptions, Snapshot
from snapstore.errors import AlreadyExistsError, NotFoundError, SnapstoreError, StorageError
from snapstore.format.keys import page_key
from snapstore.storage.base import Skipping
from snapstore.storage.s3.store import S3Store

SMALL, LARGE = os.urandom(700), os.urandom(100_000)
KEYS = [f"manifests/{n:02}" for n in range(7)]  # three pages
#: A call may take this long: all its time limits add up to a few seconds, and the machine may be busy.
HANGS_S = 60.0
#: Lies that are consistent: a client finds them only if it knows the bytes, or asks a second time.
CONSISTENT = {
    "get": {"Content-Length: 0", "200 and a page with an ETag", "an answer before the body"},
    "stat": {"Content-Length: 0", "Content-Length: 5, 5", "Content-Length: 99999999", "200 and a page with an ETag",
             "an answer before the body"},
    "put": {"an answer before the body"},
    "lock": {"an answer before the body"},
    "delete": {"an answer before the body", "200 and no body"},
}  # fmt: skip


_numbers = count()


class Case:
    """A bucket of its own, about which the server lies, and a store on it."""

    def __init__(self, server: HostileS3, like: S3Store) -> None:
        self.server, self.bucket = server, f"case-{next(_numbers):05}x"
        self.part = f"/{self.bucket}"
        requests = copy(like._requests)
        requests.bucket, requests.url, requests.place = self.bucket, f"s3://{self.bucket}/p", f"{self.bucket} p"
        self.store = copy(like)
        self.store._use(requests)
        for key in KEYS:
            self.objects[f"p/{key}"] = SMALL

    @property
    def objects(self) -> _Bucket:
        return _Bucket(self.server, self.bucket)


class _Bucket(dict):
    """The objects of one bucket, a view of the one dict that the server has for all buckets."""

    def __init__(self, server: HostileS3, bucket: str) -> None:
        self._server, self._bucket = server, bucket

    def __setitem__(self, name: str, data: bytes) -> None:
        self._server.objects[f"{self._bucket}/{name}"] = data, time.time() - 100

    def __contains__(self, name: object) -> bool:
        return f"{self._bucket}/{name}" in self._server.objects

    def __getitem__(self, name: str) -> bytes | None:
        return self._server.objects.get(f"{self._bucket}/{name}", (None, 0.0))[0]


def put(case: Case) -> bool:
    case.store.put("packs/aa", SMALL)
    return case.objects["p/packs/aa"] == SMALL


def put_large(case: Case) -> bool:
    case.store.put("packs/bb", LARGE)
    return case.objects["p/packs/bb"] == LARGE


def lock(case: Case) -> bool:
    case.store.lock("sessions/aa", SMALL)
    return case.objects["p/sessions/aa"] == SMALL


def get(case: Case) -> bool:
    return case.store.get(KEYS[0]) == SMALL


def get_range(case: Case) -> bool:
    return case.store.get_range(KEYS[1], 5, 302) == SMALL[5:307]


def stat(case: Case) -> bool:
    return case.store.stat(KEYS[2]).size_bytes == len(SMALL)


def listed(case: Case) -> bool:
    return [(info.key, info.size_bytes) for info in case.store.list("manifests/")] == [
        (key, len(SMALL)) for key in KEYS
    ]


def delete(case: Case) -> bool:
    case.store.delete(KEYS[:1])
    return f"p/{KEYS[0]}" not in case.objects


def delete_many(case: Case) -> bool:
    case.store.delete(KEYS[:4])
    return not any(f"p/{key}" in case.objects for key in KEYS[:4])


def touch(case: Case) -> bool:
    case.store.touch(KEYS[3])
    return case.server.touched.get(f"{case.bucket}/p/{KEYS[3]}", 0) >= 1


def now(case: Case) -> bool:
    return abs(case.store.now_s() - time.time()) < 1000


VERBS: list[Callable[[Case], bool]] = [
    put, put_large, lock, get, get_range, stat, listed, delete, delete_many, touch, now,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with HostileS3() as server:
        yield server


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """Return a store that makes two attempts, each of 0.6 s."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hostile")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hostile")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return S3Store("s3://template/p", connect_timeout_s=0.3, read_timeout_s=0.3, attempts=2)


def run(case: Case, verb: Callable[[Case], bool], name: str, lie: Lie, once: bool, stored: bool) -> str | None:
    """Run one case; return what was wrong with it, or None."""
    rule = case.server.lie(case.part, lie, times=1 if once else 10**9, stored=stored)
    began = time.monotonic()
    wrong, mutated = None, name.startswith("mutation")
    try:
        readable = mutated and verb not in (put, put_large, lock, touch)
        if not verb(case) and name not in CONSISTENT.get(verb.__name__, ()) and not readable:
            wrong = "success without truth"
        elif not rule.fired:
            wrong = "the lie was not told"
    except (NotFoundError, AlreadyExistsError) as error:
        wrong = None if mutated else f"a lie about what is there: {error}"  # a put reads its object back
    except SnapstoreError as error:
        wrong = foreign_words(error)
    except Exception as error:  # noqa: BLE001 - any other error
        wrong = repr(error)
    took_s = time.monotonic() - began
    if took_s > HANGS_S:
        wrong = f"{took_s:.0f} s"
    case.server.honest(case.part)
    case.store._requests.attempts = 100  # a busy machine may need longer than an attempt has
    try:
        case.store.put("sessions/after", name.encode())
        if case.store.get("sessions/after") != name.encode() or case.store.stat(KEYS[6]).size_bytes != len(SMALL):
            wrong = "another request's answer"
    except SnapstoreError as error:
        wrong = f"afterwards: {error}"
    return wrong and f"{verb.__name__}, {name!r}, {'once' if once else 'always'}, {stored=}: {wrong}"


def foreign_words(error: BaseException) -> str | None:
    """Describe the first error in a chain that is not of snapstore; None if there is none."""
    chain = [error]
    for one in chain:
        chain += [other for other in (one.__cause__, one.__context__) if other is not None and other not in chain]
        if not type(one).__module__.startswith("snapstore."):
            return f"{type(one).__module__}.{type(one).__name__} in the chain"
    return None


def run_all(server: HostileS3, store: S3Store, lies: dict[str, Lie], share: float, threads: int) -> None:
    cases = list(product(VERBS, lies, (True, False), (True, False)))
    if not THOROUGH:
        cases = random.Random(SEED).sample(cases, int(len(cases) * share))
    numbered = [(Case(server, store), *case) for case in cases]
    with ThreadPool(threads) as pool:
        found = pool.map_async(
            lambda one: run(one[0], one[1], one[2], lies[one[2]], one[3], one[4]), numbered, chunksize=1
        ).get(HANGS_S * len(cases) / threads + HANGS_S)
    assert not any(found), "\n".join(wrong for wrong in found if wrong)


def test_wrong_answers(server, store):
    run_all(server, store, LIES, 0.04, 12)


def test_answers_without_end(server, store):
    run_all(server, store, SLOW, 0.06, 16)


def test_mutated_answers(server, store):
    """A mutated answer to a read may still be consistent: the store does not verify digests."""
    mutations = {f"mutation {seed}": mutates(seed) for seed in range(SEED, SEED + (200 if THOROUGH else 20))}
    run_all(server, store, mutations, 0.15, 12)


def test_a_redirect_that_names_no_region_is_followed_once(server, store):
    """botocore asks for the region by HeadBucket, and followed redirects of that, too: 80 requests deep."""
    case = Case(server, store)
    case.store._requests.attempts = 1
    rule = server.lie(case.part, says(error(301, "PermanentRedirect"), goes_on=False))
    with pytest.raises(StorageError):
        case.store.get(KEYS[0])
    assert rule.fired == 2


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_honest_answers(server, store, verb):
    case = Case(server, store)
    case.store._requests.attempts = 100
    assert verb(case)


#: A save by two ranks makes about this many requests.
REQUESTS = 36
VERIFIED = SaveOptions(pack_bytes=4096, threads=1, verify_writes="full")


def saved_by_ranks(case: Case, lie: Lie, after: int, once: bool, stored: bool) -> str | None:
    """Save by two ranks while the server lies about one request, or about all after it; return what was wrong."""
    stores = [case.store, copy(case.store)]
    for store in stores:
        store._use(copy(store._requests))
    for key in KEYS:
        del case.server.objects[f"{case.bucket}/p/{key}"]
    stores[0]._requests.attempts = 100
    Repository.create(stores[0], chunk_bytes=1024, options=VERIFIED).close()
    stores[0]._requests.attempts = 2
    case.server.lie(case.part, lie, times=1 if once else 10**9, stored=stored, after=after)
    words = save_shared(stores, "a", 0, 0, save_options=VERIFIED)
    case.server.honest(case.part)
    stores[0]._requests.attempts = 100
    with opened(stores[0]) as repository:
        found = {snapshot.id for snapshot in repository.snapshots("a")}
        for word in words:
            unknown = "is committed as" in str(word) or "whether it was committed" in str(word)
            if isinstance(word, Snapshot):
                if {word.id} != found:
                    return f"one says committed, found {found}: {words}"
            elif not isinstance(word, SnapstoreError):
                return repr(word)
            elif found and not unknown:
                return f"one says failed, found {found}: {words}"
        if not all(same(repository.restore(f"id:{name}"), values("a", 0)) for name in found):
            return "other bytes"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False])
def test_a_listing_leaves_out_what_is_not_needed(server, store, monkeypatch, knows):
    """Whatever lies between: each key that is needed comes once, and a long row of others costs no page each."""
    monkeypatch.setattr(server, "knows_start_after", knows)
    case, random_ = Case(server, store), random.Random(SEED)
    row = [page_key("a", number) for number in range(40)]
    asked = []
    for _ in range(25):
        others = random_.sample([*KEYS, "pages/a/0000000/99", "pages/Z/0000000/00", "pages/b/0000000/00", "pages/a"], 5)
        for key in (*row, *others):
            case.objects[f"p/{key}"] = SMALL
        first, last = sorted(random_.sample(row, 2))
        skipping = Skipping(lambda keys: keys, lambda key, a=first, b=last: max(key, b) if a <= key else key)
        for prefix in ("", "pages/", "pages/a/"):
            server.seen.clear()
            found = [info.key for info in case.store.list(prefix, skipping)]
            asked.append(len(server.seen))
            whole = [info.key for info in case.store.list(prefix)]
            assert {key for key in whole if not first <= key <= last} <= set(found)
            assert len(found) == len(set(found))
            assert set(found) <= set(whole)
    assert (min(asked) < 8 < max(asked)) == knows, "pages of three keys"


def test_wrong_answers_to_a_save_by_ranks(server, store):
    """No lie makes a rank report a commit that the record does not show, or loses a committed snapshot."""
    ways = [(True, False), (True, True), (False, False)]  # told once or always; done or not
    cases = [(name, after, *way) for name in LIES for after in range(REQUESTS) for way in ways]
    cases = random.Random(SEED).sample(cases, 120 if THOROUGH else 6)
    for name, after, once, stored in cases:
        wrong = saved_by_ranks(Case(server, store), LIES[name], after, once, stored)
        assert wrong is None, f"{name!r} after {after} requests, {once=}, {stored=}: {wrong}"
