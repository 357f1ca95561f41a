"""Adapters for trainers and other packages: one module for each, an optional extra, imported only when it is named.

A module imports its package and no other module of this folder does, so nothing here costs those who do not use it.
Each uses the public calls of its package; a private one stands in one function, which checks the release. Read
`transformers.py` first. `references.py` is the one module that several of them share.
"""
