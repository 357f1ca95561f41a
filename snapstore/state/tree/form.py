"""The typed tree: a state without its arrays, as nodes that msgpack can hold; no pickle, no code.

encode.py makes nodes of values, decode.py makes values of nodes. A node is None, bool, int (64 bit), float,
str, bytes (up to 4 KiB), or a list whose first element is a tag:

| node                                  | value                                                                    |
|---------------------------------------|--------------------------------------------------------------------------|
| ["int", bytes]                        | int beyond 64 bits: little-endian two's complement                       |
| ["str", bytes]                        | str with lone surrogates: UTF-8 with them encoded (surrogatepass)        |
| ["bytes", index]                      | bytes longer than 4 KiB: entry `index` of the manifest's tensors         |
| ["bytearray", bytes or index]         | bytearray                                                                |
| ["complex", real, imag]               | complex                                                                  |
| ["list", [node...]]                   | list                                                                     |
| ["tuple", [node...]]                  | tuple                                                                    |
| ["set", [node...]]                    | set of hashable plain values, sorted by their packed nodes               |
| ["frozenset", [node...]]              | frozenset, likewise                                                      |
| ["deque", maxlen or None, [node...]]  | collections.deque                                                        |
| ["dict", [key...], [node...]]         | dict in its order; keys are hashable plain values                        |
| ["odict", [key...], [node...]]        | OrderedDict; a fourth element is the node of its `_metadata` attribute   |
| ["counter", [key...], [node...]]      | collections.Counter                                                      |
| ["defaultdict", name, [key...], [node...]] | defaultdict; `name` of its factory (`int`, `list`, ...) or None     |
| ["dtype", name]                       | torch.dtype: `float32`                                                   |
| ["size", [int...]]                    | torch.Size                                                               |
| ["device", str]                       | torch.device: `cuda:0`                                                   |
| ["np", dtype, bytes]                  | NumPy scalar: `dtype.str` and its bytes                                  |
| ["npstr", node], ["npbytes", bytes]   | numpy.str_, numpy.bytes_                                                 |
| ["npdtype", str]                      | numpy.dtype: `dtype.str`                                                 |
| ["path", kind, node] | path of pathlib: `posix`, `windows`, `pure posix` or `pure windows`, and its text         |
| ["date", text]                        | datetime.date: ISO 8601                                                  |
| ["time", text, fold, zone]            | datetime.time: ISO 8601; `zone` is None or a `timezone` node             |
| ["datetime", text, fold, zone]        | datetime.datetime, likewise                                              |
| ["timedelta", days, seconds, microseconds] | datetime.timedelta                                                  |
| ["timezone", timedelta, node]         | datetime.timezone: its offset, and its name if it has one                |
| ["enum", module, name, member, node]  | member of an Enum of that class; its plain form is the node of its value |
| ["object", kind, module, name, node]  | value of that class; the node is its plain form, see "Classes"           |
| ["optimizer", [form...], [int...], node] | state of a torch optimizer, see "Optimizers"; the node is a dict     |
| ["tensor", index, requires_grad]      | entry `index` of the manifest's tensors                                  |
| ["parameter", index, requires_grad]   | the same, as a torch.nn.Parameter                                        |
| ["array", index]                      | the same, as a numpy.ndarray                                             |
| ["part", name]                        | the tree of another part; only in the root dict of part ""               |
| ["rank", i]                           | a value of each rank's own: item i of the rank's `["own", [node...]]`    |
| ["columns", column]                   | a large list, tuple or dict of plain values; see "Columns"               |

"Classes", "Optimizers" and "Columns" are sections of docs/format.md; classes.py, stateful.py and columns.py make
them. The node of a named tuple has a sixth element: the names of its fields.

Invariants: decoding a node returns the encoded value, equal in every bit and type (for a class: its plain form), or
raises FormatError. It runs no code that the node names, and allocates no more than the node's own size. Stateless: any
thread may use it.
"""

from __future__ import annotations

from ..values.tensors import Node

INLINE_BYTES = 4 * 1024  # longer bytes are stored as entries of the manifest, in chunks

#: The factories that a defaultdict may have, by name.
FACTORIES: dict[str, type] = {t.__name__: t for t in (int, float, str, list, dict, set, tuple, bool)}

#: Positions in a node at which the keys and values of a mapping, the items of a sequence, or a plain form begin.
MAPPINGS = {"dict": 1, "odict": 1, "counter": 1, "defaultdict": 2}
SEQUENCES = {"list": 1, "tuple": 1, "deque": 2}
OBJECTS = {"object": 4, "optimizer": 3}
STARTS = MAPPINGS | SEQUENCES | OBJECTS


def has_own(tree: Node) -> bool:
    """Return whether a tree, which may be broken, has a value of a rank's own; other parts are not looked into."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if type(node) is not list or not node or type(node[0]) is not str:
            continue
        if node[0] == "rank":
            return True
        if node[0] in STARTS:
            below = node[STARTS[node[0]] + (node[0] in MAPPINGS) :][:1]
            nodes.extend(below[0] if node[0] not in OBJECTS and below and type(below[0]) is list else below)
    return False
