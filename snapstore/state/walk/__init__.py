"""A state to parts: trees, and the arrays that lie in it. A state that is known is recognised instead of walked again.

Read flatten.py first. Training waits for this folder at every save, so its checks of a known state are fast.

stateful.py       objects with `state_dict` and `load_state_dict`; the parameters of optimizers
rng.py            the global random generators as an object
resumable.py      the position of a DataLoader as an object
per_rank.py       values of which a snapshot keeps one for every rank
flatten.py        a state to parts
learner.py        learn the structure of a state, in one walk
structure.py      recognise the next state by that structure
known_tensors.py  the tensors of a known state: their forms, and where they lie
"""
