"""A small object that declares a huge content is refused before that much memory is allocated."""

import struct
import zlib

import numpy as np
import pytest
import zstandard

from kit.forge import MIB, SIZE, World, coded_blob, digest, little_memory, with_section
from snapstore.errors import FormatError, IntegrityError
from snapstore.format.blobs import codecs
from snapstore.format.hashing import checksum
from snapstore.format.manifests import manifest, sections

GIB = 1024 * MIB


def zeros(size, **options):
    """Return a zstd frame of zeros, written in pieces so that the test itself needs no memory."""
    stream = zstandard.ZstdCompressor(level=1, **options).compressobj(**({} if options else {"size": size}))
    return b"".join([*(stream.compress(bytes(MIB)) for _ in range(size // MIB)), stream.flush()])


def with_content_size(frame, size):
    """Return the same frame with another declared size: the field of four bytes follows the descriptor."""
    assert frame[4] == 0b1010_0000 or frame[4] >> 6 == 2
    at = 5 if frame[4] & 0b0010_0000 else 6
    return frame[:at] + struct.pack("<I", size) + frame[at + 4 :]


def deflated(size):
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    return b"".join([*(stream.compress(bytes(MIB)) for _ in range(size // MIB)), stream.flush()])


ZSTD_BOMBS = {
    "declares and holds much": lambda: zeros(256 * MIB),
    "declares little, holds much": lambda: with_content_size(zeros(256 * MIB), SIZE),
    "declares nothing": lambda: zeros(256 * MIB, write_content_size=False),
    "declares 4 GiB, holds nothing": lambda: with_content_size(zeros(16 * MIB), 2**32 - 1)[:20],
    "many frames": lambda: zstandard.ZstdCompressor().compress(bytes(SIZE)) * 1000,
    "a skippable frame first": lambda: b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + bytes(100),
    "a huge window": lambda: b"\x28\xb5\x2f\xfd\x80\xf8" + struct.pack("<I", SIZE) + bytes(10),
}


@pytest.mark.parametrize("what", ZSTD_BOMBS)
def test_a_zstd_block(what):
    """Mitigation: a frame's content size must be the block's length before it is decoded, and bounds the output."""
    check_block(codecs.ZSTD, ZSTD_BOMBS[what]())


@pytest.mark.parametrize("size", [MIB, 256 * MIB])
def test_a_deflate_block(size):
    """Mitigation: zlib gets room for the block's length and one byte; a stream that goes on is refused."""
    check_block(codecs.DEFLATE, deflated(size))


def check_block(codec, block):
    world = World()
    chunk = np.zeros(SIZE, np.uint8)
    data = coded_blob(chunk, codec, block)
    world.commit(world.manifest([(digest(chunk), world.pack(data))]))
    out = np.empty(SIZE, np.uint8)
    with little_memory(), pytest.raises(IntegrityError, match="block 0"):
        codecs.decoder(codec, "x")([memoryview(block)], out, 65536)
    with little_memory(8 * MIB + 3 * len(block)), pytest.raises(IntegrityError):
        world.restore()


SECTIONS = ("tree", "tensors", "inline", "ref_kinds", "ref_offsets", "digests")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_manifest_section_of_a_gibibyte(name):
    """Mitigation: all sections together unpack to at most 256 MiB and four times the manifest."""
    frame = with_content_size(zeros(16 * MIB), GIB)
    data = with_section(World().manifest(), name, frame, GIB)
    with little_memory(), pytest.raises(FormatError, match="declare"):
        manifest.decode(data, "here")


def test_many_sections_below_the_limit():
    """Mitigation: the limit is for the sum, and unknown sections are not unpacked at all."""
    data = World().manifest()
    frame = zeros(60 * MIB)
    for name in ("ref_kinds", "ref_packs", "ref_offsets", "ref_lengths", "lengths"):
        data = with_section(data, name, frame, 60 * MIB)
    with little_memory(), pytest.raises(FormatError, match="sections declare"):
        manifest.decode(data, "here")


@pytest.mark.parametrize("name", ["tree", "tensors", "inline"])
def test_a_section_of_nodes(name):
    """60 MiB of empty lists would be gigabytes of objects. Mitigation: such a section may unpack to at most 16 MiB."""
    frame = zeros(60 * MIB)
    with little_memory(), pytest.raises(FormatError, match="more than it can hold"):
        manifest.decode(with_section(World().manifest(), name, frame, 60 * MIB), "here")


@pytest.mark.parametrize("declared", [100, SIZE, 10 * MIB])
def test_a_section_that_holds_more_than_it_declares(declared):
    """Mitigation: the frame's own content size must be the declared one, and bounds the output."""
    for frame in (zeros(256 * MIB), with_content_size(zeros(256 * MIB), declared)):
        data = with_section(World().manifest(), "inline", frame, declared)
        with little_memory(24 * MIB), pytest.raises(FormatError, match="inline"):
            manifest.decode(data, "here")


def test_a_stored_section_cannot_lie_about_its_length():
    """Mitigation: without a codec both lengths must be the same."""
    with pytest.raises(FormatError, match="declares 1000 bytes and holds 3"):
        manifest.decode(with_section(World().manifest(), "inline", b"abc", 1000, 0), "here")


def test_counts_in_msgpack_that_the_bytes_cannot_hold():
    """An array, map or text of 2^32 - 1 elements in five bytes. Mitigation: msgspec takes memory only as it reads."""
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        for name in ("tree", "tensors"):
            data = with_section(World().manifest(), name, bomb, len(bomb), 0)
            with little_memory(), pytest.raises(FormatError, match="does not decode"):
                manifest.decode(data, "here")


def test_nested_ten_million_deep():
    """Mitigation: msgspec stops at the interpreter's recursion limit; the tree stops at 200 levels."""
    for bomb in (b"\x91" * 10_000_000 + b"\xc0", b"\x81\xa1x" * 3_000_000 + b"\xc0"):
        data = with_section(World().manifest(), "tree", bomb, len(bomb), 0)
        with little_memory(2 * len(bomb) + 8 * MIB), pytest.raises(FormatError, match="does not decode"):
            manifest.decode(data, "here")


def test_a_tree_just_below_the_recursion_limit():
    """Mitigation: nodes are refused at a fixed depth, whatever msgpack allows."""
    tree = None
    for _ in range(250):
        tree = ["list", [tree]]
    world = World()
    world.commit(world.manifest(tree=tree))
    with pytest.raises(FormatError, match="more than 200 levels deep"):
        world.restore()
    with world.open() as repo:
        assert not repo.check("metadata").ok


def test_a_map_that_repeats_one_key():
    """A map whose keys repeat. Mitigation: counts must agree, and no key may occur twice."""
    world = World()
    world.commit(world.manifest(tree=["dict", ["a"] * 100_000, [None] * 100_000], tensors=[]))
    with little_memory(64 * MIB), pytest.raises(FormatError, match="a key or member occurs twice"):
        world.restore()


@pytest.mark.parametrize("name", ["tree", "tensors"])
def test_text_that_is_no_utf8(name):
    """msgspec lets UnicodeDecodeError through. Mitigation: it is caught like msgspec's own errors."""
    bad = b"\x91\xa2\xff\xfe" if name == "tree" else b"\x91\x98\x91\xa1\xff"
    with pytest.raises(FormatError, match="does not decode"):
        manifest.decode(with_section(World().manifest(), name, bad, len(bad), 0), "here")
    with pytest.raises(FormatError, match="header does not decode"):
        manifest.decode(bad_header(), "here")


def bad_header():
    """Return a manifest's header whose part is not UTF-8."""
    data = World().manifest(part="?")
    packed = data[24 : len(manifest.header_bytes(data))].replace(b"\xa4part\xa1?", b"\xa4part\xa1\xff")
    return sections.PREFIX.pack(sections.MAGIC, 1, 0, len(packed), checksum(packed)) + packed
