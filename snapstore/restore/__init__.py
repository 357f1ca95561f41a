"""The read path: a snapshot's record and manifests to a state, bit for bit. Start with `pipeline.py`.

It plans which tensors are wanted, lets chunks/ rebuild their chunks, and lets state/ put the tensors together. It needs
no index beyond the record. `streaming.py` gives the tensors one by one instead.
"""
