"""Survey a repository as compact must, by plain loops over every reference; `check_survey` compares the results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from snapstore import Repository
from snapstore.errors import DAMAGE
from snapstore.format.manifests import manifest
from snapstore.format.manifests.delta_choice import cost
from snapstore.rewrite.compact_plan import HEIGHT_UNITS, LiveBlobs

Blob = tuple[str, int]  # pack and offset
Chain = list[tuple[bytes, Blob, int]]  # (digest, blob, stored bytes), the newest first


@dataclass
class Survey:
    """Findings; chunks by their digests."""

    damaged: set[str] = field(default_factory=set)  # ids
    kept: set[bytes] = field(default_factory=set)
    blobs: dict[Blob, int] = field(default_factory=dict)
    pinned: set[Blob] = field(default_factory=set)  # of snapshots that are not chosen
    heights: dict[bytes, int] = field(default_factory=dict)
    full: dict[str, list[int]] = field(default_factory=dict)  # manifest -> rows
    # chunk -> (its stored bytes, estimate of the new ones, next kept chunk, blobs between, has a new chain)
    edges: dict[bytes, tuple[int, int, bytes, set[Blob], bool]] = field(default_factory=dict)
    digests: set[bytes] = field(default_factory=set, compare=False)  # of all links


def survey(repository: Repository, chosen: set[str]) -> Survey:
    """Read every manifest, and look at every reference of every chunk."""
    found, parts = Survey(), []
    for snapshot in repository.view().snapshots():
        refs = list(snapshot.manifests)
        while refs:
            ref = refs.pop(0)
            try:
                m = manifest.read(repository.store, ref, repository.config.digest_seed)
            except DAMAGE:
                found.damaged.add(snapshot.id)
                continue
            refs = [*m.header.children, *refs]
            parts.append((snapshot.id, ref.sha256, _chains(m), m.table.lengths.tolist()))
    found.kept = {chain[0][0] for _, _, chains, _ in parts for chain in chains}
    for snapshot_id, name, chains, sizes in parts:
        for chain, size in zip(chains, sizes, strict=True):
            found.blobs.update({blob: length for _, blob, length in chain})
            if len(chain) > 1:
                full = cost(chain[-1][2], size)
                above = sum(cost(length, size) for _, _, length in chain[:-1])
                height = min(255, math.ceil(above / full / HEIGHT_UNITS))
                found.heights[chain[-1][0]] = max(height, found.heights.get(chain[-1][0], 0))
        if snapshot_id in chosen - found.damaged:
            found.full[name] = [
                row for row, chain in enumerate(chains) if len(chain) == 1 and chain[0][0] not in found.digests
            ]
            for chain in chains:
                _find_edges(found, chain)
        else:
            found.pinned |= {blob for chain in chains for _, blob, _ in chain}
        found.digests |= {digest for chain in chains for digest, _, _ in chain}
    every = [chain for _, _, chains, _ in parts for chain in chains]
    whole = {chain[0][0] for chain in every if all(link[0] in found.kept for link in chain)}
    for digest in whole & found.edges.keys():
        length, _, base, blobs, _ = found.edges[digest]
        found.edges[digest] = length, 0, base, blobs, True
    return found


def _chains(m: Any) -> list[Chain]:
    table, names = m.table, m.header.pack_names
    return [
        [
            (table.ref_digests[i].tobytes(), (names[table.ref_packs[i]], int(table.ref_offsets[i])), int(length))
            for i, length in enumerate(table.ref_lengths[first:last].tolist(), first)
        ]
        for first, last in zip(table.starts[:-1].tolist(), table.starts[1:].tolist(), strict=True)
    ]


def _find_edges(found: Survey, chain: Chain) -> None:
    """Note every kept chunk of a chain that is followed by chunks that no snapshot holds."""
    kept = [i for i, (digest, _, _) in enumerate(chain) if digest in found.kept]
    for at, behind in zip(kept, [*kept[1:], len(chain)], strict=True):
        if behind == at + 1:
            continue
        lengths = [length for _, _, length in chain[at:behind]]
        base = chain[behind][0] if behind < len(chain) else b""
        first = (lengths[0], max(lengths) if base else lengths[-1], base, set(), False)
        _, _, _, blobs, _ = found.edges.setdefault(chain[at][0], first)
        blobs.update(blob for _, blob, _ in chain[at:behind])


def check_survey(repository: Repository, chosen: set[str]) -> Survey:
    """Fail unless compact's own survey finds the same; return it."""
    expected = survey(repository, chosen)
    assert _surveyed(repository, chosen, expected.digests) == expected
    return expected


def _surveyed(repository: Repository, chosen: set[str], digests: set[bytes]) -> Survey:
    """Return what compact's own survey finds about all `digests`, in the same form."""
    live = LiveBlobs(repository.store, repository.config.digest_seed, repository.view(), chosen, set())

    def blob_of(key: int) -> Blob:
        return live._names[key >> 40], key & (1 << 40) - 1

    blobs = [blob_of(key) for key in live._blobs.tolist()]
    assert blobs == sorted(blobs, key=lambda blob: (live._numbers[blob[0]], blob[1])), "they are searched"
    names = sorted(digests)
    column = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)
    heights = zip(names, live.heights.numbers_of(column).tolist(), strict=True)
    return Survey(
        damaged=set(live.damaged),
        kept={name for name, is_kept in zip(names, live.kept.has(column).tolist(), strict=True) if is_kept},
        blobs=dict(zip(blobs, live._lengths.tolist(), strict=True)),
        pinned={blob for blob, is_pinned in zip(blobs, live._pinned.tolist(), strict=True) if is_pinned},
        heights={name: height for name, height in heights if height},
        full={ref.sha256: rows.tolist() for _, ref, rows in live.full},
        edges={
            digest: (e.length, e.estimate_bytes, e.base, {blob_of(key) for key in e.blobs}, bool(e.chain))
            for digest, e in live._edges.items()
        },
    )
