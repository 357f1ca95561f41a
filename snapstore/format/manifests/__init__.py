"""Manifests: the tensors of a part of a snapshot, and for each chunk where its blob and the blobs of its bases lie.

Read manifest.py first. docs/format.md, "Manifest", defines the bytes. Nothing here reads or writes chunks.

boxes.py          rectangular parts of tensors, the cuts of their chunks, and overlaps
chunk_table.py    the digest and the chain of every chunk, as columns
delta_choice.py   whether a changed chunk is stored as a delta or full
delta_chain.py    the blobs that rebuild one chunk, as objects
sections.py       prefix, header and sections of a manifest; entries of tensors and their orders
manifest.py       a manifest as an object: made, read and checked
tensor_layout.py  check that boxes, chunks and inline bytes are exactly the bytes of a tensor
box_map.py        which ranks store which boxes, so that a reader opens few manifests
rank_checks.py    check that a root manifest and its children fit together
"""
