"""The write path: a state to durable packs, manifests and a record. Start with `pipeline.py`, which tells it in order.

`staging.py` copies the state while the training loop waits, `inputs.py` holds each tensor on its way, `bases.py` finds
known chunks and delta bases, `chunk_writer.py` decides delta or full and fills packs, `manifest_writer.py` ends each
part. `lineage.py` knows the parent of the next save. Nothing here decides what is kept or deleted: see protocol/.
"""
