"""Chunks between engine and store, for saves, restores, checks and rewrites.

Read reader.py first: it rebuilds chunks from packs, in batches. uploader.py goes the other way.

uploader.py     blobs into packs, and packs into the store in the background
verify.py       decode new blobs and compare them with the digests of their chunks
reader.py       rebuild chunks from packs: get ranges, decode planes, add up chains, verify digests
bad_sectors.py  read around unreadable bytes that nothing needs
limits.py       refuse more memory or decoding than a repository can justify
"""
