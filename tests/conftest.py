"""Puts this folder on the path, so that every test finds the helper modules beside it (faults.py)."""
