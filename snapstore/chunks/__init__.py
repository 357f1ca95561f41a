"""Chunks between engine and store, for saves, restores, checks and rewrites. Start with `reader.py`.

`reader.py` rebuilds chunks from packs, in batches. `uploader.py` puts blobs into packs and packs into the store.
`verify.py` decodes new blobs and compares them with their chunks. `limits.py` refuses more memory or decoding than a
repository can justify. `bad_sectors.py` reads around unreadable bytes that nothing needs.
"""
