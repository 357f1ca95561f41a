"""The bytes on disk: chunks to blobs, blobs to packs, tensors to manifests, records; and back (docs/format.md).

Read records.py first: it has the small objects, from the config to a snapshot's record, which names manifests. Then
read manifest.py and blob.py. Nothing here opens files or connections: functions that read take the object store.
"""
