"""The write path: a state to durable packs, manifests and a record.

Read pipeline.py first: it has all steps. The training loop waits for staging.py alone. protocol/ decides what is
deleted, and the engine decides delta or full, by format/manifests/delta_choice.py.

background.py       the thread of a manager's save, its slot and its handle
hooks.py            the user's functions that hear of commits and failures, in a thread of their own
retrying.py         the further attempts of a save whose store is away
inputs.py           the checked request, each tensor on its way to the store, the parent of the next save
first_state.py      check a state before its first save, and pin memory for its copies
streaming.py        tensors from an iterator, for a state larger than memory
staging.py          the private copy of the state, and the bytes that are the next save's bases
known_state.py      a state that was recognised, grouped by where its tensors are copied
shares.py           the boxes of a tensor that one of several ranks stores
replicas.py         digests of the copies that several ranks hold
unchanged.py        tensors of a device that need no copy, because a base has their chunks
known_chunks.py     the chunks that are stored already, and the bases for deltas
near_children.py    the manifests of a base that a rank reads
chunk_columns.py    where each chunk lies in its tensor, and where it is stored
chunk_writer.py     split -> digest -> known? -> delta -> encode -> pack, in batches
manifest_writer.py  the inputs of a save into durable packs and manifests
upkeep.py           forget by the policies after a commit, then gc
pipeline.py         session -> bases -> packs -> manifests -> record -> index
ranks/              the save of all ranks of a job
"""
