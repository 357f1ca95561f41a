"""The stored tree: a state without its arrays, as nodes that msgpack can hold; no pickle, no code.

Read form.py first; docs/format.md, "Tree", defines the nodes. The decoder trusts nothing that it reads.

form.py          the nodes of the typed tree
columns.py       a large tree of plain values as a few long lists
encode.py        values to nodes
decode.py        nodes to values; they may come from an attacker
weights_only.py  a restored state as types that `torch.load(weights_only=True)` reads
"""
