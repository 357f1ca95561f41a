"""The write path: a state to durable packs, manifests and a record. Start with `pipeline.py`, which has all steps.

`staging.py` copies the state while the training loop waits. `inputs.py` holds each tensor on its way. `streaming.py`
takes tensors from an iterator. `known_chunks.py` finds the chunks that are stored already (dedup), and bases for
deltas. `chunk_writer.py` writes the new chunks, and `manifest_writer.py` ends each part. The engine decides delta or
full, by `format/manifests/delta_choice.py`. `lineage.py` knows the parent of the next save. protocol/ decides what is deleted.
"""
