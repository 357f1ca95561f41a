"""Storage: where bytes are kept under keys, on a local disk, in memory or in S3; nothing here knows of snapshots.

Read base.py first: `ObjectStore` is the protocol that all stores implement and that the rest of snapstore uses. The
stores are local.py (with atomic_write.py, folders.py and locks.py), memory.py and s3/store.py; urls.py opens one of
them by its URL, and cache_dir.py finds the user's cache folder on this machine.
"""
