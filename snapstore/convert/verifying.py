"""Compare a snapshot with the checkpoint that it was imported from, to the bit: then its files may be deleted.

In: a snapshot, and a source. Out: the names of what differs. Both are read whole, tensor by tensor: the checkpoint as
an import reads it, and the snapshot from its chunks, each verified against its digest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from ..arrays import Bytes
from ..errors import InvalidInputError
from ..format.records import Snapshot
from ..inspect.diff import plain_changes
from ..inspect.stored_tensors import bytes_of_each, read_tensors
from ..repository import Repository
from ..restore.manifests import decoding_of, require_decoding, stored_parts
from ..restore.pipeline import read_as_ruled
from ..state.tree.decode import decode, unpack_nodes
from ..state.tree.encode import pack
from ..state.values.containers import Path as StatePath
from ..state.values.containers import display, leaves
from ..state.values.tensors import DimOrder, Node, StoredPart, TensorSpec, is_array
from ..text import some
from .checkpoint import changed, versions
from .importing import Imported
from .lazy_state import inputs_of_lazy
from .sources import NumberedSource, open_source

#: At most so many differences are returned.
MOST_DIFFERENCES = 20
#: A snapshot of another save has its tree in several parts, whose form is not compared.
_NO_IMPORT = "(root): was not saved by an import, so ties, types and order of keys cannot be compared"
_OTHER_FORM = "(root): has other ties, another order of keys, or containers or objects of another kind"


def compare(repository: Repository, one: Imported) -> tuple[list[str], list[str]]:
    """Compare a snapshot with the checkpoint that it was imported from.

    If a source has the step of another one, such as `last.ckpt`, the callbacks of Lightning are not compared: they
    have its own name.

    Returns:
        What differs, nothing if they are equal; and names of files that an import leaves out.

    Raises:
        InvalidInputError, CapabilityError: the checkpoint cannot be read any more.
        IntegrityError, FormatError: the snapshot is damaged.
    """
    if one.origin is None:
        raise InvalidInputError(f"{one.source}: expected what import_checkpoints yields")
    return read_as_ruled(repository.context, (one.snapshot,), partial(_compare, repository, one.origin))


def _compare(repository: Repository, origin: NumberedSource, snapshot: Snapshot) -> tuple[list[str], list[str]]:
    context, path = repository.context, origin.path
    before = versions(path)
    opened = open_source(path, origin.format)
    source = inputs_of_lazy(opened.state, context.engines, opened.let_go, opened.bytes_read, str(path))
    found = [
        f"{display(at)}: has attributes that no snapshot keeps: {some(sorted(vars(leaf)), 3)}"
        for at, leaf in leaves(opened.state, ())
        if is_array(leaf) and getattr(leaf, "__dict__", None)
    ]
    opened.state = None
    manifests, stored = read_tensors(context, snapshot)
    pieces = [piece for tensor in stored.values() for piece in tensor.pieces]
    what = f"verifying {snapshot.ref}"
    require_decoding(context.store, pieces, f"{what}:")
    content = bytes_of_each(context, stored.values())  # in the order of the save, which is that of the source
    orders = [m.dim_orders.get(n, ()) for m in manifests for n, one in enumerate(m.tensors) if one.kind != "page"]
    specs: list[TensorSpec] = []
    seen: Counter[StatePath] = Counter()
    there = iter(stored)
    for tensor in source.tensors:
        spec = tensor.spec
        specs.append(spec)
        key = spec.path, seen[spec.path]
        seen[spec.path] += 1
        if next(there, None) != key:
            in_file = [spec.path, *(other.spec.path for other in source.tensors)]
            found += _unmatched(in_file, [path for path, _ in stored][len(specs) - 1 :])
            return found[:MOST_DIFFERENCES], opened.left_out
        data = tensor.data(context.engines.memory_of)
        was, now = _form(stored[key].spec, orders[len(specs) - 1]), _form(spec, spec.dim_order)
        if was != now:
            deque(next(content), 0)
            found.append(f"{display(spec.path)}: is {was}, in the file {now}")
        elif not _is_equal(np.asarray(data), next(content)):
            found.append(f"{display(spec.path)}: has other values")
    found += [f"{display(path)}: is not in the file" for path, _ in there]
    parts = stored_parts(context, manifests, what)
    tree = unpack_nodes(pack(source.tree))
    packed = [pack(_without_callbacks(one) if origin.is_alias else one) for one in (parts[0].tree, tree)]
    if len(parts) > 1 or packed[0] != packed[1]:
        changes = plain_changes(decode(parts, decoded=decoding_of(what)), decode([StoredPart("", tree, specs)]))
        found += [f"{name}: {was}, in the file {now}" for name, was, now in changes]
        found = found or [_NO_IMPORT if len(parts) > 1 else _OTHER_FORM]
    if names := changed(path, before):
        found.insert(0, f"{names}: changed while it was verified")
    return found[:MOST_DIFFERENCES], opened.left_out


def _unmatched(in_file: list[StatePath], stored: list[StatePath]) -> list[str]:
    """Return the differences between the names of tensors, from the first that is not the same on."""
    here, there = set(in_file), set(stored)
    found = [f"{display(path)}: is not in the snapshot" for path in in_file if path not in there]
    found += [f"{display(path)}: is not in the file" for path in stored if path not in here]
    return found or [f"{display(in_file[0])}: its tensors are in another order"]


def _without_callbacks(tree: Node) -> Node:
    """Return the tree of a state without the callbacks of Lightning."""
    if type(tree) is not list or tree[0] != "dict" or "callbacks" not in tree[1]:
        return tree
    at = tree[1].index("callbacks")
    return ["dict", *([*each[:at], *each[at + 1 :]] for each in tree[1:])]


def _form(spec: TensorSpec, dim_order: DimOrder) -> str:
    grad = " that requires grad" if spec.requires_grad else ""
    order = f" in the order {list(dim_order)}" if dim_order else ""
    return f"{spec.kind} {spec.dtype}{list(spec.shape)}{grad}{order}"


def _is_equal(data: Bytes, pieces: Iterator[Bytes]) -> bool:
    """Return whether pieces are these bytes; all pieces are read."""
    at, is_equal = 0, True
    for piece in pieces:
        is_equal = is_equal and np.array_equal(data[at : at + piece.size], piece)
        at += piece.size
    return is_equal and at == data.size
