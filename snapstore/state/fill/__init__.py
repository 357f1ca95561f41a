"""Parts to a state: new, or into the objects and tensors of a target.

Read plan.py first: all that can fail is planned before anything is written. Then buffers.py: the memory of a restore.

selection.py        which leaves `keys` names, by paths and patterns
fit.py              which values a restore takes, and whether all of them must fit
differences.py      the differences between a snapshot and a target, as an error that helps
repeated_places.py  a container or object at several places of a target takes one value
composite_fit.py    whether composite tensors fit a target, and of which class they come back
optimizer_fit.py    whether the state of an optimizer fits, and stored values after a loader's casts
buffers.py          one buffer for every stored array, and the places that share it
object_loads.py     the calls of `load_state_dict`, and the checks of what they leave
plan.py             plan the changes of a restore, and put the state together
"""
