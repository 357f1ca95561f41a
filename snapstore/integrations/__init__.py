"""Adapters for trainers and other packages: one module for each, with an optional extra; import it by its name.

A module imports its own package only, and snapstore does not import the module, so an unused adapter costs nothing.
Each uses the public calls of its package; a private call is made in one function, which checks the release. Read
`transformers.py` first. Several of them share `references.py` and `stored_optimizers.py`.
"""
