"""Rewrite: give snapshots new manifests and packs, as the next revision of their records; nothing is edited in place.

Read base.py first: it has the steps of every rewrite, and why a crash between two of them harms nothing. repair/ heals
snapshots in the same steps.

base.py                  publish new manifests of a snapshot, as the next revision of its record
roots.py                 new root manifests for the children that a rewrite has replaced
shared_manifests.py      several snapshots name the manifest that replaces one that they share
stored_blobs.py          blobs in memory as they are stored, with their footer entries
blob_rewriting.py        look up single blobs in packs; read, share and move them
chunk_encoder.py         encode chunks of the store again, decode them and compare
recode.py                rewrite blobs into another codec; chains, dedup and digests stay
compact_plan.py          the bytes that compact could free, and which of them to free
compact.py               free bytes that gc cannot
compact_neighbours.py    a full chunk as a delta to the same chunk of the previous snapshot
compact_shared_edges.py  whether a base that several chunks share is worth freeing
"""
