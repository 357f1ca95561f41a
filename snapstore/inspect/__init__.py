"""Inspect a repository: `stats` counts what it holds, `diff` compares two snapshots, `lazy` reads slices of tensors.

None of them writes. Start with stats.py, which shows how a manifest leads to blobs and codecs; diff.py also reads
chunks. plain_values.py finds the leaves that are not tensors.
"""
