"""The CPU engine keeps the order of batches, stores deltas that pay, raises errors, and survives a fork."""

import multiprocessing
import os
import threading
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import xxhash

from kit.waits import until
from snapstore.engine.batches import Chunks, DecodeBatch, EncodeBatch, EncodeJob
from snapstore.engine.cpu import (
    NO_QUOTA,
    CpuEngine,
    EncodedChunk,
    HostEncoded,
    Threads,
    cores_of_quota,
    default_threads,
)
from snapstore.engine.reference import encode_chunk
from snapstore.errors import IntegrityError, InvalidInputError
from snapstore.format import hashing
from snapstore.format.blobs import blob, chain_decode, planes

SEED = 0xD1A5ED5EED
digest = partial(hashing.digest, seed=SEED)


@pytest.fixture
def engine():
    made = CpuEngine(SEED, 2)
    yield made
    made.close()


def encoded(job: EncodeJob) -> EncodedChunk:
    return encode_chunk(job, np.empty(blob.bound(job.chunk.size, job.element_size), np.uint8))


def digests_of(chunks):
    return np.frombuffer(b"".join(map(digest, chunks)), np.uint8).reshape(-1, 16)


def encode_batch(chunks, element_size):
    """Return a batch of chunks without bases."""
    n = len(chunks)
    none = Chunks([], np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.int64))
    return EncodeBatch(
        Chunks.of(chunks), digests_of(chunks), np.full(n, element_size, np.uint8), np.zeros(n, np.uint8), none,
        np.zeros((n, 16), np.uint8), np.zeros(n, np.int64),
    )  # fmt: skip


def decode_batch(made, chunks, outs, where=str):
    """Return a batch that decodes the blobs that an engine made, one for each chunk."""
    entries = np.concatenate([e.entries for e in made])
    rooms = [np.empty(int((e.entries["offset"] + e.entries["length"]).max() + 7) // 8 * 8, np.uint8) for e in made]
    for e, room in zip(made, rooms, strict=True):
        e.copy(0, len(e.entries), room)()
    starts = np.repeat(np.cumsum([0, *map(len, rooms)])[:-1], [len(e.entries) for e in made])
    return DecodeBatch(
        np.concatenate(rooms), starts + entries["offset"].astype(np.int64), entries["length"].astype(np.int64),
        np.ones(len(chunks), np.int64), digests_of(chunks), Chunks.of(outs), where,
    )  # fmt: skip


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def weights(count, seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


def changed(values):
    return (values + values * np.float32(1e-5)).view(np.uint8)


@pytest.mark.parametrize("raw", [False, True])
def test_rows_of_a_batch(raw):
    """`take` returns rows of a batch; a device without memory for a whole batch encodes one half after the other."""
    whole = replace(encode_batch([noise(size) for size in (10, 20, 30)], 4), raw=raw)
    taken = whole.take(np.array([2, 0]))
    assert [len(chunk) for chunk in taken.chunks.views()] == [30, 10]
    assert taken.digests.tolist() == whole.digests[[2, 0]].tolist()
    assert taken.raw is raw


def test_digests_are_xxh3_128_in_order(engine):
    chunks = [noise(size, size) for size in range(0, 3000, 37)]
    found = engine.start_digests(Chunks.of(chunks))()
    assert (found.shape, found.dtype) == ((len(chunks), 16), np.uint8)
    assert [row.tobytes() for row in found] == [xxhash.xxh3_128_digest(c.tobytes(), SEED) for c in chunks]
    assert engine.start_digests(Chunks.of([]))().shape == (0, 16)


def test_batches_round_trip_in_order(engine):
    chunks = [noise(64 * (i + 1), i) for i in range(200)]
    made = engine.start_encode(encode_batch(chunks, 4))()
    entries = np.concatenate([e.entries for e in made])
    assert len(entries) == 200
    assert (np.ascontiguousarray(entries["digest"]).view(np.uint8).reshape(-1, 16) == digests_of(chunks)).all()
    assert not entries["transform"].any()
    outs = [np.empty(c.size, np.uint8) for c in chunks]
    engine.start_decode(decode_batch(made, chunks, outs))()
    assert all(np.array_equal(out, c) for out, c in zip(outs, chunks, strict=True))


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
        near, digest(near), 4, planes.ROTATED, base.view(np.uint8), digest(base.view(np.uint8)), 1000
    )
    assert not encoded(long_chain).is_delta


def test_a_delta_is_smaller_and_decodes():
    base = weights(20_000).view(np.uint8)
    chunk = changed(weights(20_000))
    full = encoded(EncodeJob(chunk, digest(chunk), 4))
    delta = encoded(EncodeJob(chunk, digest(chunk), 4, planes.ROTATED, base, digest(base), 70_000))
    assert len(delta.data) < 0.7 * len(full.data)
    out = np.empty_like(chunk)
    chain = [memoryview(delta.data), memoryview(encoded(EncodeJob(base, digest(base), 4)).data)]
    chain_decode.decode_chain(chain, ["a", "b"], digest(chunk), out, seed=SEED)
    np.testing.assert_array_equal(out, chunk)


def test_an_unchanged_chunk_costs_next_to_nothing():
    base = weights(200_000).view(np.uint8)
    made = encoded(EncodeJob(base, digest(base), 4, planes.ROTATED, base, digest(base), 700_000))
    assert made.is_delta
    assert len(made.data) < 3000


def test_the_first_damage_is_raised(engine):
    chunks = [noise(1000, i) for i in range(50)]
    made = engine.start_encode(encode_batch(chunks, 1))()
    batch = decode_batch(made, chunks, [np.empty(1000, np.uint8) for _ in chunks], lambda i: f"blob {i}")
    batch.stored[batch.offsets[7] + 200] ^= 1
    with pytest.raises(IntegrityError, match="blob 7: checksum mismatch"):
        engine.start_decode(batch)()


def test_buffers_of_blobs_are_used_again(engine):
    chunks = [noise(1000, i) for i in range(20)]
    made = engine.start_encode(encode_batch(chunks, 1))()
    buffers = {b.ctypes.data for e in made for b in e.buffers}
    engine.recycle(made)
    again = engine.start_encode(encode_batch(chunks, 1))()
    assert {b.ctypes.data for e in again for b in e.buffers} == buffers


def test_jobs_that_run_one_after_the_other_share_their_memory():
    """With 64 MiB chunks and 16 threads, a save took 4.5 GB: each thread had memory for chunks of its own."""
    engine = CpuEngine(SEED, 4)
    planes.scratch.clear()
    for i in range(12):  # on whichever thread
        chunks = [weights(10_000, i).view(np.uint8)]
        made = engine.start_encode(encode_batch(chunks, 4))()
        out = [np.zeros(chunks[0].size, np.uint8)]
        engine.start_decode(decode_batch(made, chunks, out))()
        assert out[0].tobytes() == chunks[0].tobytes()
        until(lambda: engine._jobs is None or not engine._jobs._serving)
    assert len(planes.Scratch._free) <= 2  # a thread of the pool, and the one that waits
    engine.close()
    assert planes.Scratch._free == []


def test_the_reference_inside_a_job_in_c_uses_the_memory_of_that_job():
    planes.scratch.clear()
    with planes.scratch.borrowed():
        outer = planes.scratch.room("native", 100)
        with planes.scratch.borrowed():
            planes.scratch.room("planes", 50)
        assert planes.scratch.room("native", 100).ctypes.data == outer.ctypes.data
    (rooms,) = planes.Scratch._free
    assert sorted(rooms) == ["native", "planes"]
    planes.scratch.clear()


def test_host_encoded_copies_any_blobs_padded():
    chunks = [noise(size, size) for size in (8, 13, 0, 21)]
    blobs = [encoded(EncodeJob(c, digest(c), 1)) for c in chunks]
    made = HostEncoded.of(blobs)
    ends = np.concatenate([made.entries["offset"][1:], [10**6]]).astype(np.int64)
    assert (made.entries["offset"] % blob.ALIGNMENT == 0).all()
    assert made.entries["length"].tolist() == [len(b.data) for b in blobs]
    for first in range(4):
        for last in range(first + 1, 5):
            expected = b"".join(bytes(b.data) + bytes(-len(b.data) % 8) for b in blobs[first:last])
            room = np.full(len(expected), 0xEE, np.uint8)
            assert made.copy(first, last, room)() is None
            assert room.tobytes() == expected
            if last < 4:
                assert len(expected) == ends[last - 1] - made.entries["offset"][first]


def test_chunks_are_views_of_their_memories():
    memories = [np.arange(10, dtype=np.uint8), np.arange(100, 120, dtype=np.uint8)]
    chunks = Chunks(memories, np.array([1, -1, 0, 1]), np.array([3, 0, 0, 19]), np.array([2, 7, 10, 1]))
    assert [view.tolist() for view in chunks.views()] == [[103, 104], [], list(range(10)), [119]]
    chunks.views()[0][:] = 0
    assert memories[1][3:5].tolist() == [0, 0]
    assert [view.size for view in chunks.take(np.array([2, 0])).views()] == [10, 2]
    assert len(chunks) == 4
    assert [view.size for view in Chunks.of(memories).views()] == [10, 20]


def test_an_engine_may_be_used_again_after_close(engine):
    for _ in range(2):
        assert engine.start_digests(Chunks.of([noise(10)]))().tobytes() == digest(noise(10))
        (made,) = engine.start_encode(encode_batch([noise(10)], 1))()
        assert made.entries["raw_bytes"].tolist() == [10]
        engine.close()
        engine.close()


def test_threads_are_made_at_first_use_and_run_at_once():
    before = threading.active_count()
    threads = Threads(3)
    assert threading.active_count() == before
    barrier = threading.Barrier(3, timeout=600)
    try:
        assert sorted(threads.start(lambda i: (barrier.wait(), i)[1], [0, 1, 2])()) == [0, 1, 2]
    finally:
        threads.close()
    until(lambda: threading.active_count() <= before)


def test_threads_are_closed_by_one_of_them():
    threads = Threads(2)
    assert threads.start(lambda _: threads.close(), [None])() == [None]
    assert threads.start(abs, [-1])() == [1]
    threads.close()


def test_start_does_not_wait():
    threads = Threads(1)
    go = threading.Event()
    result = threads.start(lambda _: go.wait(600), [None])
    go.set()
    assert result() == [True]
    threads.close()


def _in_child(threads, queue):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child drops the parent's pool without closing it
        queue.put((threads.start(lambda x: x + 1, [1, 2])(), os.getpid()))
        threads.close()


def test_threads_work_in_a_forked_child():
    threads = Threads(2)
    assert threads.start(abs, [-1])() == [1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about a fork while there are threads
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


QUOTA_V1 = {"cpu,cpuacct/p/cpu.cfs_quota_us": "30000", "cpu,cpuacct/p/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "30000 100000"}, 1),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "max 100000"}, NO_QUOTA),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "150000 100000"}, 2),
        ("0::/gone/b", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/p", QUOTA_V1, 1),
        ("3:cpu:/docker/x", {"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000"}, 7),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, NO_QUOTA),
        ("3:memory:/\n1:name=systemd:/", {"memory/cpu.max": "1 1"}, NO_QUOTA),
        ("0::/", {"cpu.max": "nonsense"}, NO_QUOTA),
        ("0::/", {"cpu.max": "5 0"}, NO_QUOTA),
        ("", {}, NO_QUOTA),
        ("no colon", {}, NO_QUOTA),
    ],
)
def test_threads_are_bounded_by_the_quota_of_the_cgroup(tmp_path, groups, files, expected):
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")
    assert cores_of_quota(tmp_path / "root", tmp_path / "groups") == expected
    assert cores_of_quota(tmp_path / "root", tmp_path / "none") == NO_QUOTA
