"""Inspect a repository: `stats` counts what it holds, and `diff` compares two snapshots.

Both only read. Start with stats.py, which shows how a manifest leads to blobs and codecs; diff.py also reads chunks.
plain_values.py finds the leaves that are no tensors.
"""
