"""Catalog: read what a repository holds: its config, its records and manifest headers, its policies.

The objects in the store are the truth; the index caches them in LMDB in the user's own cache folder, and `refresh`
returns a View of one listing. Read index.py first, then history.py, which answers every question about snapshots.
"""
