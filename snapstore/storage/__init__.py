"""Storage: where bytes are kept under keys, on a local disk, in memory or in S3; nothing here knows of snapshots.

Read base.py first: `ObjectStore` is the protocol that all stores implement and that the rest of snapstore uses. A store
is opened by its URL.

base.py             ObjectStore: key -> bytes
progress.py         how many bytes the running verb is through, and since when a store has not answered
urls.py             open the store that a URL names
local.py            a directory as a store
atomic_write.py     a file gets its name only when it is complete and durable
folders.py          open files below a root by descriptors, never through a symbolic link
kept_open.py        files that stay open while a restore reads ranges of them
locks.py            file locks: which temporary files are being written, which objects are locked
os_errors.py        errors of the operating system as errors of snapstore
memory.py           a dictionary as a store
s3/                 a bucket as a store
sandbox_folders.py  hidden folders in which a place is tested
cache_dir.py        the user's cache folder on this machine
"""
