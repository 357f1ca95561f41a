"""rewrite: give snapshots new manifests and packs, as the next revision of their records; nothing is edited in place.

recode.py changes the codec of blobs, compact.py frees dead bytes, and ../repair heals snapshots, all in the same steps.
Read base.py first: it has these steps, and why a crash between two of them harms nothing.
"""
