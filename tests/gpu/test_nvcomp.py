"""nvCOMP's codecs round-trip; the CPU's codecs read what nvCOMP writes, and nvCOMP reads what they write."""

import dataclasses
import zlib

import numpy as np
import pytest
import torch

from snapstore import CapabilityError
from snapstore.format.blobs import codecs
from snapstore.format.blobs.codecs import zstd

if torch.cuda.is_available():
    from snapstore.engine.cuda import nvcomp
    from snapstore.engine.cuda.streams import WorkStream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ["DEFLATE_MATCHES", "ZSTD", "ANS"]
LENGTHS = [1, 7, 100, 4095, 65_535, 65_536]


@pytest.fixture
def lane():
    lane = WorkStream(torch.device("cuda", 0))
    with lane.current():
        yield lane
        lane.sync()
    lane.release_memory()


def blocks_of(lengths, seed=0):
    """Return blocks of mostly one value; every fifth block is noise."""
    rng = np.random.default_rng(seed)
    made = []
    for i, length in enumerate(lengths):
        rare = rng.integers(0, 256, length, np.uint8)
        made.append(rare if i % 5 == 4 else np.where(rng.random(length) < 0.97, 0, rare).astype(np.uint8))
    return made


def on_device(lane, blocks):
    """Copy blocks to the device; return the memory, their addresses, aligned to 16 bytes, and their sizes."""
    sizes = np.array([len(block) for block in blocks], np.int64)
    starts = np.cumsum(-(-sizes // 16) * 16) - -(-sizes // 16) * 16
    memory = np.zeros(int(starts[-1] + sizes[-1]) + 16, np.uint8)
    for block, start in zip(blocks, starts.tolist(), strict=True):
        memory[start : start + len(block)] = block
    up = torch.from_numpy(memory).to(lane.device)
    return up, up.data_ptr() + starts, sizes


def encoded(lane, coder, blocks):
    up, sources, lengths = on_device(lane, blocks)
    out = lane.empty(coder.room_bytes * len(blocks))
    starts = np.arange(len(blocks)) * coder.room_bytes
    found = nvcomp.encode(lane, coder, sources, lengths, out.data_ptr() + starts)
    lane.sync()
    sizes, host = nvcomp.sizes_of(found).tolist(), out.cpu().numpy()
    assert max(sizes) <= coder.room_bytes
    del up
    return [host[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=True)]


def decoded(lane, codec, stored, lengths):
    up, sources, sizes = on_device(lane, stored)
    rooms = -(-np.array(lengths) // 16) * 16
    starts = np.cumsum(rooms) - rooms
    out = lane.empty(int(rooms.sum()))
    found = nvcomp.decode(lane, codec, sources, sizes, out.data_ptr() + starts, np.array(lengths))
    lane.sync()
    assert nvcomp.sizes_of(found.cpu()).tolist() == list(lengths)
    host = out.cpu().numpy()
    del up
    return [host[start : start + length] for start, length in zip(starts.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_rooms_are_as_large_as_nvcomp_says(name):
    coder = getattr(nvcomp, name)
    assert coder.room_bytes == -(-nvcomp.room_bytes(coder) // 16) * 16


def test_an_nvcomp_that_wants_more_room_is_refused(monkeypatch):
    monkeypatch.setattr(nvcomp, "ANS", dataclasses.replace(nvcomp.ANS, room_bytes=nvcomp.ANS.room_bytes - 16))
    with pytest.raises(CapabilityError, match=r"a block of ANS may take 363056 bytes, expected 363040 at most"):
        nvcomp.check_rooms()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 7, 700, 2100])
def test_there_and_back(lane, name, count):
    coder = getattr(nvcomp, name)
    lengths = [*LENGTHS, coder.block_bytes]
    lengths = [lengths[i % len(lengths)] for i in range(count)]
    blocks = blocks_of(lengths)
    stored = encoded(lane, coder, blocks)
    assert sum(map(len, stored)) < sum(lengths) or count == 1
    for got, block in zip(decoded(lane, coder.codec, stored, lengths), blocks, strict=True):
        assert np.array_equal(got, block)


@pytest.mark.parametrize("name", ["DEFLATE_MATCHES", "ZSTD"])
def test_the_cpu_reads_what_nvcomp_writes(lane, name):
    coder, lengths = getattr(nvcomp, name), LENGTHS * 3
    blocks = blocks_of(lengths, 1)
    for block, frame in zip(blocks, encoded(lane, coder, blocks), strict=True):
        out = np.empty(len(block), np.uint8)
        codecs.decoder(coder.codec, "here")([memoryview(frame)], out, coder.block_bytes)
        assert np.array_equal(out, block)


@pytest.mark.parametrize("decode_bytes", [None, 1 << 20])
def test_nvcomp_reads_what_the_cpu_writes(lane, monkeypatch, decode_bytes):
    """nvCOMP reads zstd and deflate of the CPU, in one call or in several."""
    if decode_bytes:
        monkeypatch.setattr(nvcomp, "DECODE_BYTES", decode_bytes)
    lengths = LENGTHS * 3
    blocks = blocks_of(lengths, 2)
    frames = [np.frombuffer(zstd.encode_matches(block, codecs.BLOCK_BYTES)[0], np.uint8) for block in blocks]
    for got, block in zip(decoded(lane, codecs.ZSTD, frames, lengths), blocks, strict=True):
        assert np.array_equal(got, block)
    deflated = [zlib.compressobj(6, zlib.DEFLATED, -15) for _ in blocks]
    streams = [np.frombuffer(d.compress(b.tobytes()) + d.flush(), np.uint8)
               for d, b in zip(deflated, blocks, strict=True)]  # fmt: skip
    for got, block in zip(decoded(lane, codecs.DEFLATE, streams, lengths), blocks, strict=True):
        assert np.array_equal(got, block)


def test_a_call_that_cannot_be_made_says_so(lane):
    """If a call of nvCOMP fails, the error names the function and its status."""
    with pytest.raises(RuntimeError, match=r"nvCOMP: DeflateCompressGetMaxOutputChunkSize failed with status \d+"):
        nvcomp.room_bytes(nvcomp.Coder(codecs.DEFLATE, "Deflate", b"\x63", 1 << 40, 16, 1))
