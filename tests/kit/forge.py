"""Forged blobs, packs, manifests and records whose checksums all hold; and limits on time and memory."""

import hashlib
import struct
import time
import tracemalloc
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import torch  # noqa: F401  (before memory is measured: importing it takes much)

from snapstore import Repository, SaveOptions
from snapstore.engine.cpu import EncodedChunk, HostEncoded
from snapstore.errors import AlreadyExistsError, FormatError, IntegrityError
from snapstore.format import hashing as digests
from snapstore.format import records
from snapstore.format.blobs import blob, pack, planes
from snapstore.format.hashing import checksum
from snapstore.format.keys import manifest_key, pack_key
from snapstore.format.manifests import manifest, sections
from snapstore.format.manifests.chunk_table import ChunkTable
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.format.records import Config, ManifestRef, Snapshot
from snapstore.storage.memory import MemoryStore

MIB = 1024 * 1024
SIZE = 8192  # of every forged chunk
CHUNK_BYTES = 8192
SEED = 0x5EED5EED5EED5EED  # of every forged repository: an attacker can read the config


#: The limit for one hostile input [s of this process's time, so that others on the machine do not count]. Most take
#: milliseconds; tracing memory makes them five times as slow, coverage twice, and a busy machine twice.
LIMIT_S = 10.0


@contextmanager
def little_time(limit_s=LIMIT_S):
    """Check that the block ends soon. A loop that does not end is stopped by pytest's time-out."""
    began = time.process_time()
    yield
    took_s = time.process_time() - began
    assert took_s < limit_s, f"{took_s:.1f} s were taken"


@contextmanager
def little_memory(limit_bytes=8 * MIB, limit_s=LIMIT_S):
    """Check that the block never has more than this allocated, and takes no longer than `little_time` allows."""
    tracemalloc.start()
    try:
        with little_time(limit_s):
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak} bytes were allocated"


@contextmanager
def budget(world, *, decoded_bytes=0, fits=False):
    """Check that a block takes memory and time by the bytes that a forged repository stores, not by those it declares.

    Args:
        decoded_bytes: how much it may decode, at a quarter of a gigabyte a second.
        fits: whether a declared size that fits into memory may be allocated.
    """
    declared = 2 * 1024 * MIB if fits else 0
    stored = world.stored_bytes
    # A byte of a tree unpacks to at most 64, each an object of about 64 bytes. A chunk has buffers to decode it.
    limit_s = 10.0 + 2e-4 * stored + decoded_bytes / 2.5e8
    room = 96 * MIB + 4096 * stored + 8 * world.size + declared  # includes modules that a verb imports first
    with little_memory(room, limit_s):
        yield


def noise(seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(chunk):
    """Return the digest of a chunk in a forged repository."""
    return digests.digest(chunk, SEED)


def full(chunk, element_size=1):
    return forge_blob(chunk, digest(chunk), None, element_size)


def delta(chunk, base):
    return forge_blob(difference(chunk, base), digest(chunk), digest(base))


def difference(chunk, base):
    """Return the difference of single bytes, as `forge_blob` takes it."""
    found = np.empty_like(chunk)
    planes.difference(chunk, base, 1, found)
    return found


def forge_blob(source, chunk_digest, base, element_size=1):
    statistics = planes.statistics(planes.histograms(planes.split(source, element_size)))
    out = np.empty(blob.bound(source.size, element_size), np.uint8)
    return bytes(blob.encode(source, element_size, planes.BYTES, statistics, (chunk_digest, base), out))


#: `blob.HEADER`, with the two fields that a reader ignores.
HEADER = struct.Struct("<4sHHQBBBBIII8sII16s16s")
FIELDS = (
    "magic", "version", "zero", "check", "transform", "element_size", "layout", "zero2", "raw_bytes", "payload_bytes",
    "block_bytes", "codecs", "count", "zero3", "digest", "base",
)  # fmt: skip


def rewrite(data, **changes):
    """Return a blob with other header fields and a valid checksum."""
    fields = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True)) | changes
    out = bytearray(HEADER.pack(*(fields[name] for name in FIELDS)) + data[HEADER.size :])
    struct.pack_into("<Q", out, 8, checksum(bytes(out[16:])))
    return bytes(out)


def coded_blob(chunk, codec, block, **changes):
    """Return a blob of one plane in one block of a codec, whatever the block holds."""
    head = HEADER.pack(
        blob.MAGIC, 1, 0, 0, 0, 1, 0, 0, chunk.size, len(block), 65536, bytes([codec]).ljust(8, b"\0"), 1, 0,
        digest(chunk), bytes(16),
    )  # fmt: skip
    return rewrite(head + struct.pack("<I", len(block)) + block, **changes)


class World:
    """A repository in memory into which anything can be planted."""

    def __init__(self, size=SIZE):
        self.size = size  # of its chunks
        self.store = MemoryStore()
        config = Config(
            uuid=records.new_id(), version=1, chunk_bytes=size, digest_seed=SEED, features=[], created=0.0,
            writer="forge",
        )  # fmt: skip
        self.store.put("config", records.encode(config))
        self.packs = []
        self._digests = {}  # (number, offset) -> digest in the header of the blob there

    @property
    def stored_bytes(self):
        return sum(len(data) for data, _ in self.store._objects.values())

    def pack(self, *blobs, size_bytes=None):
        """Put a pack without a valid footer; return [(number, offset, length)] of its blobs."""
        writer = pack.PackWriter(bytes(16), 0, len(self.packs), "")
        places, pieces, at = [], [writer.buffer[: pack.HEADER.size].tobytes()], pack.HEADER.size
        for data in blobs:
            places.append((len(self.packs), at, len(data)))
            self._digests[len(self.packs), at] = data[48:64].ljust(16, b"\0")
            pieces += [data, bytes(-len(data) % 8)]
            at += len(data) + -len(data) % 8
        data = b"".join(pieces) + b"footer" + len(self.packs).to_bytes(4, "little")
        name = hashlib.sha256(data).hexdigest()
        self.store.put(pack_key(name), data)
        self.packs.append((name, size_bytes or len(data)))
        return places

    def whole_pack(self, *blobs):
        """As `pack`, with a valid footer, for verbs that read it."""
        writer = pack.PackWriter(bytes(16), 0, len(self.packs), "")
        made = HostEncoded.of([EncodedChunk(memoryview(bytearray(b)), False, np.empty(0, np.uint8)) for b in blobs])
        offsets = writer.extend(made, 0, len(blobs)).tolist()
        data = bytes(writer.seal())
        name = hashlib.sha256(data).hexdigest()
        self.store.put(pack_key(name), data)
        self.packs.append((name, len(data)))
        number = len(self.packs) - 1
        self._digests |= {(number, at): b[48:64] for at, b in zip(offsets, blobs, strict=True)}
        return [(len(self.packs) - 1, offset, len(b)) for offset, b in zip(offsets, blobs, strict=True)]

    def table(self, chunks):
        """Return a table of [(digest, [(number, offset, length)...])...], newest reference first."""
        refs = [ref for _, chain in chunks for ref in chain]
        kinds = [kind for _, chain in chunks for kind in [1] * (len(chain) - 1) + [0]]
        return ChunkTable(
            digests=np.array([list(d) for d, _ in chunks], np.uint8).reshape(-1, 16),
            ref_counts=np.array([len(chain) for _, chain in chunks], np.uint16),
            ref_kinds=np.array(kinds, np.uint8),
            ref_packs=np.array([r[0] for r in refs], np.uint32),
            ref_offsets=np.array([r[1] for r in refs], np.uint64),
            ref_lengths=np.array([r[2] for r in refs], np.uint32),
            ref_digests=np.array([list(self._digests.get(r[:2], bytes(16))) for r in refs], np.uint8).reshape(-1, 16),
            lengths=np.full(len(chunks), self.size, np.uint32),
        )

    def manifest(self, chunks=(), **changes):
        """Return a manifest of one uint8 tensor `w` over these chunks; `changes` replace any of its fields."""
        n = len(chunks)
        shape = [n * self.size]
        entry = TensorEntry(("w",), "tensor", "uint8", shape, False, None, (Box((0,), shape, 0, n),) if n else (), None)
        fields = {
            "save_id": bytes(16), "rank": 0, "sequence": 0, "part": "", "chunk_bytes": self.size,
            "digest_seed": SEED, "tree": ["dict", ["w"], [["tensor", 0, False]]], "tensors": [entry], "inline": b"",
            "table": self.table(chunks), "packs": [name for name, _ in self.packs],
            "pack_sizes": [size for _, size in self.packs],
            "logical_bytes": n * self.size + len(changes.get("inline", b"")),
        }  # fmt: skip
        return manifest.encode(manifest.ManifestContents(**(fields | changes)))

    def commit(self, *manifests, **changes):
        """Put the record of a committed snapshot r@0 with these manifests, and the manifests."""
        refs, depths = [], [0]
        for data in manifests:
            with suppress(FormatError, IntegrityError):
                depths.append(header_of(data).depth)
            name = hashlib.sha256(data).hexdigest()
            with suppress(AlreadyExistsError):
                self.store.put(manifest_key(name), data)
            refs.append(ref_of(name, data))
        fields = {
            "id": "a" * 32, "run": "r", "step": 0, "seq": 0, "state": "committed", "write_id": "", "manifests": refs,
            "logical_bytes": sum(ref.logical_bytes for ref in changes.get("manifests", refs)), "depth": max(depths),
        }  # fmt: skip
        snapshot = Snapshot(**(fields | changes))
        self.store.put(snapshot.key, records.encode(snapshot))
        return snapshot

    def open(self):
        return Repository.open(self.store, options=SaveOptions(threads=1))

    def restore(self):
        with self.open() as repo:
            return repo.restore("r@0")


def ref_of(name, data):
    """Return a record's entry about a manifest, however hostile it is."""
    head = data[: sections.PREFIX.size + int.from_bytes(data[12:16], "little")]
    header = None
    with suppress(FormatError, IntegrityError):
        header = header_of(data)
    told = {
        field: getattr(header, field, other) for field, other in {"part": "", "rank": 0, "logical_bytes": 0}.items()
    }
    header_sha256 = hashlib.sha256(head).hexdigest()
    return ManifestRef(sha256=name, header_sha256=header_sha256, size_bytes=len(data), **told)


def header_of(data):
    return manifest.decode_header(data, "x")


def reheader(data, **changes):
    """Return a manifest with other header fields, also such as `encode` would not write, and a valid checksum."""
    fields = msgspec.to_builtins(header_of(data), builtin_types=(bytes,)) | changes
    packed = msgspec.msgpack.encode(fields)
    prefix = sections.PREFIX.pack(sections.MAGIC, 1, 0, len(packed), checksum(packed))
    return prefix + packed + data[len(manifest.header_bytes(data)) :]


def with_section(data, name, stored, raw_bytes, codec=1):
    """Return a manifest in which one section is replaced by other bytes, appended at the end."""
    header = header_of(data)
    body = len(data) - len(manifest.header_bytes(data))
    sections = [s if s[0] != name else (name, body, len(stored), raw_bytes, codec) for s in header.sections]
    return reheader(data, sections=sections) + stored
