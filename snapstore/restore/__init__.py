"""The read path: a snapshot's record and manifests to a state, bit for bit. Start with `pipeline.py`.

It plans which tensors are wanted, finds the manifests that hold them (`sources.py`) and the chunks that are needed
(`overlaps.py`), lets chunks/ rebuild these chunks, and lets state/ put the tensors together. It needs only the record,
no index. `manifests.py` reads manifests and their trees. `streaming.py` returns the tensors one by one instead.
`exchange.py` lets the ranks of a node read each chunk once.
"""
