"""Any root, child, box map, tree of one rank and page gives an error or a result, and hurts no other snapshot.

The manifests of a snapshot of several ranks are changed at random. All checksums and references hold, as those of an
attacker would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from kit.forge import MIB, little_memory, little_time
from kit.objects import clone, keys_of, replace
from kit.ranks import Managers, part_of, small_boxes
from kit.repositories import created, opened, same, snapshot_of
from kit.samples import SEED
from kit.tally import EXAMPLES, tally
from snapstore import AlreadyExistsError, PerRank, Repository, SnapstoreError
from snapstore.format import records
from snapstore.format.keys import manifest_key
from snapstore.format.manifests import manifest, sections
from snapstore.restore.pipeline import read
from snapstore.restore.sources import AsRank
from snapstore.storage.memory import MemoryStore

COUNT = 3
#: Forged manifests in a run of the tests.
FORGED = 6 * EXAMPLES
#: The snapshot that is forged. It has a@0 and a@1 for bases.
HOSTILE = "a@2"
WHOLE = ("model", "optimizer", "step", "data")
NUMBERS = (0, 1, -1, 2, 3, 255, 4096, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63))
TEXTS = ("", "rank", "own", "pages", "tensor", "model", "w", "columns", "values", "float64", "int8", "bytes", "page")


def state(step: int, rank: int) -> dict[str, Any]:
    """Return a rank's state: shards, tensors of one rank, tied ones, values of each rank, and a tree that has pages."""
    whole = torch.from_numpy(np.random.default_rng(5).standard_normal((24, 40)).astype(np.float32))
    whole[step] += 1
    tied = torch.arange(2000.0) + step
    own = {"rank": rank, "t": torch.full((900,), float(rank + 100 * step)), "more": {f"k{i}": i for i in range(300)}}
    return {
        "model": {"w": tied, "tied": tied, f"layer{rank}": torch.full((700,), float(rank + 10 * step)),
                  "drift": part_of(whole, rank, COUNT), "small": torch.ones(3)},
        "own": PerRank(own), "optimizer": {"w": tied, "n": [1, 2, (3, "x")]}, "step": step,
        "data": {f"k{i}": i * 7919 % 100003 for i in range(12000)},
    }  # fmt: skip


@cache
def history() -> tuple[MemoryStore, dict[str, Any]]:
    """Save three steps; return the store, and what the others than the hostile one restore."""
    store = created()
    with small_boxes():
        managers = Managers(store, COUNT, async_save=False)
        for step in range(3):
            saved = managers.all(lambda m, rank, step=step: m.save(step, state(step, rank)))
            assert not [error for error in saved if isinstance(error, BaseException)], saved
        managers.end()
    with opened(store) as repository:
        roots = [manifest.read(store, ref, None) for ref in repository.snapshot(HOSTILE).manifests]
        assert "pages" in {root.tree[0] for root in roots}
        children = [manifest.read(store, child, None) for root in roots for child in root.header.children]
        assert all(
            child.header.box_map for child in children if child.header.box_map is not None and child.tree is None
        )
        assert "own" in {child.tree[0] for child in children if child.tree}
        return store, {ref: repository.restore(ref, keys=WHOLE) for ref in ("a@0", "a@1")}


# --- forging


def changed_value(value: Any, random: Random) -> Any:
    """Return something that might be in a value's place."""
    if isinstance(value, bool) or value is None:
        return random.choice([True, False, None, 0, "x", []])
    if isinstance(value, int):
        number = random.choice([*NUMBERS, value + 1, value - 1, 2 * value])
        return random.choice([*[number] * 6, None, "x", 1.5]) if -(2**63) <= number < 2**64 else 0  # msgpack's range
    if isinstance(value, str):
        return random.choice([*TEXTS, value + "x", 5, None])
    if isinstance(value, bytes):
        return random.choice([b"", value[:-1], 2 * value, value[::-1], bytes(len(value)), value[: len(value) // 2], 5])
    if isinstance(value, dict):
        dropped = random.choice([*value]) if value else ""
        return {key: one for key, one in value.items() if key != dropped}
    if not isinstance(value, list) or not value:
        return random.choice([0, None, []])
    at, to = random.randrange(len(value)), random.randrange(len(value))
    swapped = list(value)
    swapped[at], swapped[to] = value[to], value[at]
    return random.choice([
        value[:at] + value[at + 1 :], [*value[:to], value[at], *value[to:]], swapped, swapped, [], value[::-1],
        random.choice([None, 5, "x", [value]]),
    ])  # fmt: skip


def change_somewhere(whole: list[Any], random: Random) -> None:
    """Change one value anywhere in a tree of lists and dicts."""
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        keys = range(min(len(inner), 50)) if isinstance(inner, list) else inner if isinstance(inner, dict) else ()
        for key in keys:
            places.append((inner, key))
            walk(inner[key])

    walk(whole)
    inner, key = random.choice(places)
    inner[key] = changed_value(inner[key], random)


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes with some that are flipped, cut out, doubled, or a number of ours."""
    out = bytearray(data) or bytearray(random.randbytes(1))
    for _ in range(random.randint(1, 3)):
        at, how = random.randrange(len(out) + 1), random.randrange(5)
        if how == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif how == 1:
            out[at : at + 4] = (random.choice(NUMBERS) % 2**32).to_bytes(4, "little")
        elif how == 2:
            del out[at : at + random.choice([1, 2, 4, 8, 16])]
        elif how == 3:
            out[at:at] = out[at : at + random.choice([1, 4, 8, 16])]
        else:
            out[at : at + 8] = (random.choice(NUMBERS) % 2**64).to_bytes(8, "little")
    return bytes(out)


def taken_apart(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a manifest's header and its sections, unpacked."""
    header = msgspec.msgpack.decode(sections.packed_header(data, "x"))
    return header, sections.decode_sections(data, sections.header_end(data, "x"), header["sections"], "x")


def joined(header: dict[str, Any], contents: dict[str, bytes]) -> bytes:
    entries, body = sections.encode_sections(contents)
    return sections.join(msgspec.msgpack.encode(header | {"sections": entries}), body)


def change_manifest(data: bytes, random: Random) -> bytes:
    """Return a manifest with valid checksums in which one to three places are not as they should be."""
    header, contents = taken_apart(data)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        there = [name for name, kind in (("children", list), ("box_map", bytes))
                 if header.get(name) and isinstance(header[name], kind)]  # fmt: skip
        where = random.choice(["header", "tree", "tensors", "column", "inline", *there, *there])
        if where == "header":
            change_somewhere([header], random)
        elif where == "children":
            change_somewhere(header["children"], random)
        elif where == "box_map":
            with suppress(zstandard.ZstdError):  # a change of the header has damaged it
                plain = zstandard.ZstdDecompressor().decompress(header["box_map"], max_output_size=MIB)
                columns = msgspec.msgpack.decode(plain)
                at = random.randrange(len(columns))
                columns[at] = changed_bytes(columns[at], random)
                header["box_map"] = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(columns))
        elif where in ("tree", "tensors"):
            wrapped = [msgspec.msgpack.decode(contents[where])]
            for _ in range(random.choice([1, 2, 4])):
                change_somewhere(wrapped, random)
            contents[where] = msgspec.msgpack.encode(wrapped[0])
        elif where == "column":
            name = random.choice([name for name in contents if name not in ("tree", "tensors", "inline")])
            contents[name] = changed_bytes(contents[name], random)
            if random.random() < 0.5:  # the counts in the header agree
                header |= {"chunks": len(contents["lengths"]) // 4, "refs": len(contents["ref_kinds"])}
        else:
            contents["inline"] = changed_bytes(contents["inline"], random)
    return joined(header, contents)


def reference(data: bytes, old: dict[str, Any]) -> dict[str, Any]:
    """Return a reference as it was, with the digests and the size of another manifest."""
    digests = {"sha256": data, "header_sha256": manifest.header_bytes(data)}
    return old | {name: hashlib.sha256(of).hexdigest() for name, of in digests.items()} | {"size_bytes": len(data)}


def forged(random: Random) -> MemoryStore:
    """Return the history with a changed root or child, under the names that its bytes have now."""
    store = clone(history()[0])
    snapshot = snapshot_of(store, HOSTILE)
    refs = [msgspec.to_builtins(ref) for ref in snapshot.manifests]

    def put(data: bytes, old: dict[str, Any]) -> dict[str, Any]:
        new = reference(data, old)
        with suppress(AlreadyExistsError):
            store.put(manifest_key(new["sha256"]), data)
        return new

    at = random.randrange(len(refs))
    root = store.get(manifest_key(refs[at]["sha256"]))
    header, contents = taken_apart(root)
    if header["children"] and random.random() < 0.5:
        which = random.randrange(len(header["children"]))
        child = header["children"][which]
        header["children"][which] = put(change_manifest(store.get(manifest_key(child["sha256"])), random), child)
        root = joined(header, contents)
    else:
        root = change_manifest(root, random)
    refs[at] = put(root, refs[at])
    if random.random() < 0.3:
        said = msgspec.msgpack.decode(sections.packed_header(root, "x")).get("logical_bytes")
        refs[at]["logical_bytes"] = said if isinstance(said, int) and 0 <= said < 2**62 else 0
    changed = {"manifests": msgspec.convert(refs, list[records.ManifestRef]),
               "logical_bytes": sum(ref["logical_bytes"] for ref in refs)}  # fmt: skip
    replace(store, snapshot.key, records.encode(msgspec.structs.replace(snapshot, **changed)))
    return store


# --- what the verbs make of it


def save_again(store: MemoryStore) -> list[Any]:
    """Save by ranks, with the hostile snapshot for a base; return the snapshots."""
    with small_boxes():
        managers = Managers(store, COUNT, async_save=False)
        try:
            found = managers.all(lambda m, rank: m.save(7, state(2, rank)).result())
        finally:
            managers.end()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def verbs(repository: Repository, store: MemoryStore, random: Random) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each verb and its call."""
    context = repository.context
    target = {"model": {"w": torch.zeros(2000), "drift": part_of(torch.zeros(24, 40), 1, 2)}}
    keys = ["model.w", "model.drift"]
    yield "restore", lambda: read(context, HOSTILE, as_rank=AsRank("drop", 0, 1))
    yield "restore the values of all ranks", lambda: repository.restore(HOSTILE)
    yield "restore as rank 1", lambda: read(context, HOSTILE, as_rank=AsRank(1, 0, 1))
    yield "restore a shard", lambda: read(context, HOSTILE, into=target, keys=keys, as_rank=AsRank("drop", 1, 2))
    yield "restore one tensor", lambda: repository.restore(HOSTILE, keys="model.drift")
    yield "tensors", lambda: [h[:2] if h.ndim else h.read() for h in repository.tensors(HOSTILE).values()]
    yield "named_tensors", lambda: list(repository.named_tensors(HOSTILE))
    yield "diff", lambda: repository.diff("a@1", HOSTILE)
    yield "stats", repository.stats
    yield "check", lambda: repository.check(random.choice(["metadata", "data", "restore"]))
    yield "gc -n", lambda: repository.gc(dry_run=True)
    yield "compact", repository.compact
    yield "recode", repository.recode
    if random.random() < 0.2:
        yield "save by ranks", lambda: save_again(store)
    yield "repair", lambda: repository.repair(apply=True, drop=True)
    yield "gc", repository.gc


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(FORGED))
def test_any_manifest_of_ranks(number):
    """Mitigation: every field is typed, and children, boxes, pages and own values are compared with the root."""
    tally("fuzz inputs")
    random = Random(SEED * 1000 + number)
    store = forged(random)
    traced = random.random() < 0.2  # it takes five times as long
    with opened(store, damaged=True) as repository:
        for name, call in verbs(repository, store, random):
            with little_memory(150 * MIB) if traced else little_time():
                try:
                    call()
                except SnapstoreError:
                    pass
                except Exception as error:
                    raise AssertionError(f"number {number}: {name} raised no error of ours") from error
        for ref, expected in history()[1].items():
            assert same(repository.restore(ref, keys=WHOLE), expected), f"number {number}: {ref} has changed"


def test_every_part_of_a_snapshot_of_ranks_is_forged():
    """Without this, the test above would prove nothing: most forged manifests differ from the real ones in a place."""
    real = set(keys_of(history()[0], "manifests/"))
    changed = [set(keys_of(forged(Random(number)), "manifests/")) - real for number in range(20)]
    assert sum(map(bool, changed)) >= 15
    assert {len(new) for new in changed} >= {1, 2}, "roots, and children with their roots"
