"""State: nested containers, tensors and objects on one side; trees, specs and bytes on the other.

    flatten.py     state -> parts: a tree without arrays, specs, values
    target.py      the inverse: a new state, or a target filled in place; filling.py its memory and ties
    tree.py        the typed tree, encode and decode; containers.py what it may nest
    tensors.py     what is stored of an array besides its values; arrays.py its bytes
    selection.py   which leaves `keys` means
    objects.py     state_dict and load_state_dict; rng.py one such object: RngState

None of them imports torch before it meets a tensor.
"""
