"""Blobs: one chunk as stored, alone or with the blobs of its chain, and many of them in a pack.

Read blob.py first. docs/format.md, "Blob" and "Pack", defines the bytes. Nothing here knows of tensors or snapshots.

planes.py        split a chunk or its difference from a base into byte planes; their entropy
plane_kinds.py   the kind of a plane, which decides its codec, and the estimated size
codecs/          planes to compressed blocks, and sparse deltas
blob.py          a blob: header and encoded planes
pack.py          many blobs in one object that is named by the SHA-256 of its bytes
chain_decode.py  rebuild one chunk from the blobs of its chain
"""
