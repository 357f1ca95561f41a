"""The read path: a snapshot's record and manifests to a state, bit for bit. Start with `pipeline.py`.

It plans which tensors are wanted, finds which manifests hold them (`sources.py`) and which of their chunks are needed
(`overlaps.py`), lets chunks/ rebuild these, and lets state/ put the tensors together. It needs no index beyond the
record. `manifests.py` reads manifests and their trees; `streaming.py` gives the tensors one by one instead.
"""
