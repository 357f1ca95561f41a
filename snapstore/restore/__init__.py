"""The read path: a snapshot's record and manifests to a state, bit for bit. `pipeline.py` is all of it.

It plans which tensors are wanted, lets chunks/ rebuild their chunks, and lets state/ put the tensors together. It needs
no index beyond the record.
"""
