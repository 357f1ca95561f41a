"""The bytes on disk: chunks to blobs, blobs to packs, tensors to manifests, records; and back (docs/format.md).

Read records.py first: the small objects, from the config to a snapshot's record, which names manifests; then
manifest.py and blob.py. Nothing here does I/O of its own: functions that read take the object store.
"""
