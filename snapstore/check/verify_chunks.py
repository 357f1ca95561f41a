"""Rebuild every chunk of many manifests, each chain of blobs about once: level "restore" of a check.

In: manifests. Out: the chunks that cannot be rebuilt, with their errors. The bytes are not kept.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ..arrays import Column
from ..chunks import limits
from ..context import Context
from ..errors import CapabilityError, IntegrityError, SnapstoreError
from ..format.manifests.manifest import Manifest
from ..text import human_bytes, log
from .damaged_packs import DamagedPacks, lost_rows, unbuilt

_FORGED_LINK = "an older blob of its chain does not give the chunk of its digest; run 'snapstore check --restore'"


class ChunkRebuilder:
    """Rebuilds chunks of one repository and remembers the chains that are good.

    Args:
        max_decoded_bytes: limit of the bytes to decode; None: the default of limits.py.

    Attributes:
        store: of the repository.
        budget: counts the bytes decoded.
    """

    def __init__(self, context: Context, max_decoded_bytes: int | None) -> None:
        self._context, self.store = context, context.store
        self.budget = limits.Budget(context.store, max_decoded_bytes)
        self._good: set[bytes] = set()  # names of chains

    def failures(
        self, ref: str, m: Manifest, packs: DamagedPacks, *, prove: bool = False, checksums: Column | None = None
    ) -> dict[int, SnapstoreError]:
        """Rebuild the chunks of a manifest, except chains that are known to be good and chunks with a lost blob.

        Args:
            ref: the snapshot, for messages.
            prove: also remember each link of a chain that gives the digest of its own chunk: older snapshots refer to
                such links, and their blobs need no second decode. A chunk with another link fails too: the chunk itself
                can be rebuilt, but the link is not the chunk of its digest.
            checksums: (k,) of the blob of each reference, as in `ProvingEngine`; None: none is known.

        Returns:
            row -> error, of the chunks that cannot be rebuilt. A CapabilityError means that this machine cannot, which
            is no damage.
        """
        names, starts = _chain_names(m, _links(m)), m.table.starts.tolist()
        lost = set(lost_rows(m, packs.lost(m)).tolist())
        first = {names[starts[row]]: row for row in reversed(range(len(m.table))) if row not in lost}
        rows = sorted(row for name, row in first.items() if name not in self._good)
        decoded = int((m.table.lengths[rows].astype(np.int64) * m.table.ref_counts[rows]).sum())
        log.info("%s: %s to decode", ref, human_bytes(decoded))
        proven: dict[int, int] | None = {} if prove else None
        try:
            self.budget.spend(decoded, f"{ref}, and the snapshots checked before it")
            failed = unbuilt(self._context, m, rows, proven, checksums) if rows else {}
        except CapabilityError as error:
            failed = dict.fromkeys(rows, error)
        self._good.update(names[starts[row]] for row in rows if row not in failed)
        for row, count in (proven or {}).items():
            self._good.update(names[starts[row] : starts[row] + count])
        bad = {name: failed[row] for name, row in first.items() if row in failed}
        if prove:
            for name, row in first.items():
                if not self._good.issuperset(names[starts[row] : starts[row + 1]]):
                    bad.setdefault(name, IntegrityError(_FORGED_LINK))
        return {row: bad[name] for row in range(len(m.table)) if (name := names[starts[row]]) in bad}


def tensor_of(m: Manifest, row: int) -> str:
    """Return the tensor that a chunk belongs to, and the chunk's number in it, for messages."""
    for entry in m.tensors:
        for box in entry.boxes:
            if box.first_chunk <= row < box.first_chunk + box.chunks:
                return f"{'.'.join(map(str, entry.path))}, chunk {row - box.first_chunk}"
    return f"chunk {row}"


def _links(m: Manifest) -> list[bytes]:
    """Return all that a manifest says of each blob, (k,): its place and length, digest and length of its chunk."""
    table = m.table
    fields = [("pack", "V32"), ("offset", "<u8"), ("length", "<u4"), ("plain", "<u4"), ("digest", "V16")]
    links = np.zeros(len(table.ref_packs), fields)
    if len(links):
        links["pack"] = np.frombuffer(m.header.packs, "V32")[table.ref_packs]
        links["offset"], links["length"] = table.ref_offsets, table.ref_lengths
        links["plain"] = np.repeat(table.lengths, table.ref_counts)
        links["digest"] = np.ascontiguousarray(table.ref_digests).view("V16").reshape(-1)
        links["digest"][table.starts[:-1]] = np.ascontiguousarray(table.digests).view("V16").reshape(-1)
    data = links.tobytes()
    return [data[at : at + links.itemsize] for at in range(0, len(data), links.itemsize)]


def _chain_names(m: Manifest, links: list[bytes]) -> list[bytes]:
    """Return a name for the rest of the chain that begins at each reference, (k,)."""
    names, name = [], b""
    for kind, link in zip(m.table.ref_kinds[::-1].tolist(), reversed(links), strict=True):
        following = name if kind else b""  # kind 0 ends a chain
        name = hashlib.blake2b(link + following, digest_size=16).digest()
        names.append(name)
    return names[::-1]
