"""The bytes on disk: chunks to blobs, blobs to packs, tensors to manifests, records; and back (docs/format.md).

Read records.py first: it has the small objects, from the config to a snapshot's record, which names manifests. Nothing
here opens files or connections: functions that read take the object store.

chunking.py   where a tensor and a tree are cut into chunks
hashing.py    the digest of a chunk (seeded XXH3-128), and the checksum of stored bytes (XXH3-64)
blobs/        a chunk as stored: planes, codecs, blobs, packs
manifests/    the tensors of a part of a snapshot, and where their chunks lie
records.py    config, records, sessions, policies and gc's notes, and their envelope
pages.py      many records of a run in one object
open_maps.py  keep the map keys that this release does not know
keys.py       the keys of all objects in the store
"""
