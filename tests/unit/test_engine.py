"""The CPU engine: batches in order, deltas where they pay, errors raised, threads that survive a fork."""

import multiprocessing
import os
import threading
import time
import warnings

import numpy as np
import pytest
import xxhash

from snapstore import blob, planes
from snapstore.digest import digest
from snapstore.engine import CpuEngine, DecodeJob, Encoded, EncodeJob, Threads, default_threads, encode_chunk
from snapstore.errors import IntegrityError, InvalidInputError


@pytest.fixture
def engine():
    made = CpuEngine(2)
    yield made
    made.close()


def encoded(job: EncodeJob) -> Encoded:
    return encode_chunk(job, np.empty(blob.bound(job.chunk.size, job.element_size), np.uint8))


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def weights(count, seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


def changed(values):
    return (values + values * np.float32(1e-5)).view(np.uint8)


def test_digests_are_xxh3_128_in_order(engine):
    chunks = [noise(size, size) for size in range(0, 3000, 37)]
    assert engine.digests(chunks) == [xxhash.xxh3_128_digest(c.tobytes()) for c in chunks]
    assert engine.digests([]) == []


def test_batches_round_trip_in_order(engine):
    chunks = [noise(64 * (i + 1), i) for i in range(200)]
    encoded = engine.start_encode([EncodeJob(c, digest(c), 4) for c in chunks])()
    outs = [np.empty(c.size, np.uint8) for c in chunks]
    jobs = [
        DecodeJob([memoryview(e.data)], ["x"], digest(c), out) for e, c, out in zip(encoded, chunks, outs, strict=True)
    ]
    engine.start_decode(jobs)()
    assert all(np.array_equal(out, c) for out, c in zip(outs, chunks, strict=True))
    assert not any(e.is_delta for e in encoded)


def test_a_delta_is_stored_where_it_pays():
    base = weights(20_000)
    near, far = changed(base), weights(20_000, 1).view(np.uint8)
    for chunk, expected in ((near, True), (far, False)):
        job = EncodeJob(
            chunk, digest(chunk), 4, planes.ROTATED, base.view(np.uint8), digest(base.view(np.uint8)), 70_000
        )
        made = encoded(job)
        header = blob.parse(memoryview(made.data), "x")
        assert made.is_delta is expected
        assert header.base == (digest(base.view(np.uint8)) if expected else blob.NO_BASE)
        assert header.digest == digest(chunk)
    long_chain = EncodeJob(
        near, digest(near), 4, planes.ROTATED, base.view(np.uint8), digest(base.view(np.uint8)), 10**6
    )
    assert not encoded(long_chain).is_delta


def test_a_delta_is_smaller_and_decodes():
    base = weights(20_000).view(np.uint8)
    chunk = changed(weights(20_000))
    full = encoded(EncodeJob(chunk, digest(chunk), 4))
    xor = encoded(EncodeJob(chunk, digest(chunk), 4, planes.ROTATED, base, digest(base), 70_000))
    assert len(xor.data) < 0.7 * len(full.data)
    out = np.empty_like(chunk)
    chain = [memoryview(xor.data), memoryview(encoded(EncodeJob(base, digest(base), 4)).data)]
    blob.decode_chain(chain, ["a", "b"], digest(chunk), out)
    np.testing.assert_array_equal(out, chunk)


def test_an_unchanged_chunk_costs_next_to_nothing():
    base = weights(200_000).view(np.uint8)
    made = encoded(EncodeJob(base, digest(base), 4, planes.ROTATED, base, digest(base), 700_000))
    assert made.is_delta
    assert len(made.data) < 3000


def test_the_first_damage_is_raised(engine):
    chunks = [noise(1000, i) for i in range(50)]
    encoded = engine.start_encode([EncodeJob(c, digest(c), 1) for c in chunks])()
    encoded[7].data[200] ^= 1
    jobs = [
        DecodeJob([memoryview(e.data)], [f"blob {i}"], digest(c), np.empty(1000, np.uint8))
        for i, (e, c) in enumerate(zip(encoded, chunks, strict=True))
    ]
    with pytest.raises(IntegrityError, match="blob 7: checksum mismatch"):
        engine.start_decode(jobs)()


def test_an_engine_may_be_used_again_after_close(engine):
    for _ in range(2):
        assert engine.digests([noise(10)]) == [digest(noise(10))]
        engine.close()
        engine.close()


def test_threads_are_made_at_first_use_and_run_at_once():
    before = threading.active_count()
    threads = Threads(3)
    assert threading.active_count() == before
    barrier = threading.Barrier(3, timeout=10)
    try:
        assert sorted(threads.start(lambda i: (barrier.wait(), i)[1], [0, 1, 2])()) == [0, 1, 2]
    finally:
        threads.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_start_does_not_wait():
    threads = Threads(1)
    go = threading.Event()
    result = threads.start(lambda _: go.wait(10), [None])
    go.set()
    assert result() == [True]
    threads.close()


def _in_child(threads, queue):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent's pool is only forgotten here
        queue.put((threads.start(lambda x: x + 1, [1, 2])(), os.getpid()))
        threads.close()


def test_threads_work_in_a_forked_child():
    threads = Threads(2)
    assert threads.start(abs, [-1])() == [1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        child = context.Process(target=_in_child, args=(threads, queue))
        child.start()
    try:
        child.join(30)
        assert child.exitcode == 0
        assert queue.get() == ([2, 3], child.pid)
        assert threads.start(abs, [-5])() == [5]
    finally:
        threads.close()


def test_the_environment_says_how_many_threads(monkeypatch):
    monkeypatch.setenv("SNAPSTORE_THREADS", "7")
    assert default_threads() == 7
    monkeypatch.delenv("SNAPSTORE_THREADS")
    assert default_threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("value", ["", "0", "-1", "two", "1.5", "1025", "²", " 2"])
def test_bad_environment_values_are_named(monkeypatch, value):
    monkeypatch.setenv("SNAPSTORE_THREADS", value)
    with pytest.raises(InvalidInputError, match=r"SNAPSTORE_THREADS=.*expected a number of threads from 1 to 1024"):
        default_threads()
