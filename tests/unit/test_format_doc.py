"""docs/format.md matches the code: every table and every list of keys is compared."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from snapstore.catalog import config
from snapstore.format import chunking, pages, records
from snapstore.format.blobs import blob, codecs, pack, planes
from snapstore.format.blobs.codecs import deflate, sparse, zstd
from snapstore.format.keys import NAME
from snapstore.format.manifests import chunk_table, manifest, sections
from snapstore.state import folder
from snapstore.state.tree import columns as state_columns
from snapstore.state.tree import decode as tree_decode
from snapstore.state.tree import form as tree
from snapstore.state.values import classes, containers, tensors, torch_layouts

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title):
    """Return the text under a heading, up to the next one of its level or above."""
    level, _ = re.search(rf"^(#+) ({re.escape(title)}.*)$", TEXT, re.M).groups()
    body = TEXT.split(f"\n{level} {title}", 1)[1].split("\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.M)[0]


def tables(title):
    """Return every table of a section, as (names of the columns, rows of cells)."""
    found = re.findall(r"((?:^\|.*\|\n?)+)", section(title), re.M)
    split = [[[c.strip() for c in line.strip().strip("|").split("|")] for line in t.splitlines()] for t in found]
    return [(rows[0], rows[2:]) for rows in split]


def layout_table(title, number=0):
    """Return (offset, size) of the rows in which both are numbers, and all cells of the other rows."""
    columns, rows = tables(title)[number]
    assert columns == ["offset", "size", "field"]
    fixed = [(int(o), int(s)) for o, s, _ in rows if o.isdecimal() and s.isdecimal()]
    return fixed, [row for row in rows if not (row[0].isdecimal() and row[1].isdecimal())]


def offsets(packed):
    """Return (offset, size) of every field of a struct; padding counts as one field."""
    codes = re.findall(r"(\d*[a-zA-Z])", packed.format.removeprefix("<"))
    ends = [struct.calcsize("<" + "".join(codes[: i + 1])) for i in range(len(codes))]
    return [
        (end - struct.calcsize("<" + code), struct.calcsize("<" + code)) for end, code in zip(ends, codes, strict=True)
    ]


def keys_of(kind):
    """Return the keys of a struct's map; `(unknown)` stands for the keys that this release does not know."""
    return [name for name in kind.__struct_encode_fields__ if name != "(unknown)"]


def names_in(text):
    return re.findall(r"`([a-z0-9_]+)`", text)


def test_envelope():
    fixed, rest = layout_table("Envelope")
    assert fixed == offsets(records.ENVELOPE)
    assert rest == [["24", "", "payload: one msgpack map"]]
    assert records.ENVELOPE.size == 24
    assert records.encode(records.Wait(id="x", sessions=[]))[:4] == b"SNAP"
    assert "magic `SNAP`" in section("Envelope")
    assert f"format version, {records.FORMAT_VERSION} " in section("Envelope")


def test_envelope_kinds():
    columns, rows = tables("Layout")[0]
    assert columns == ["key", "written by", "envelope kind"]
    kinds = {row[0]: [int(k) for k in row[2].split(",") if k] for row in rows}
    by_type = {kind.__name__: number for kind, number in records._KINDS.items()}
    by_type |= {"page": pages.PAGE, "volume": pages.VOLUME}
    assert kinds["`config`"] == [by_type["Config"]]
    assert kinds["`snapshots/<run>/<step, 12 digits>-<id>.<rev>`"] == [by_type["Snapshot"]]
    assert kinds["`sessions/<id>`"] == [by_type["Session"]]
    assert kinds["`policies/<run>.<rev>`"] == [by_type["RunPolicies"]]
    assert kinds["`gc/<id>.mark` `.wait` `.done`"] == [by_type["Mark"], by_type["Wait"], by_type["Done"]]
    assert kinds["`gc/<sha256>.quarantine`, `gc/<sha256>.<id>.quarantine`"] == [by_type["Quarantine"]]
    assert kinds["`manifests/<2 hex>/<sha256>` of a manifest list"] == [by_type["ManifestList"]]
    assert kinds["`gc/<id>.lost`"] == [by_type["Lost"]]
    assert sorted(number for of_key in kinds.values() for number in of_key) == sorted(by_type.values())


STATES = {"committed", "aborted", "forgotten", "swept"}


@pytest.mark.parametrize(
    ("title", "kind", "more"),
    [
        ("config", records.Config, set()),
        ("record", records.Snapshot, STATES | set(keys_of(records.ManifestRef))),
        ("session", records.Session, set()),
        ("policy", records.RunPolicies, {"kind"}),
        ("mark", records.Mark, set()),
        ("wait", records.Wait, set()),
        ("done", records.Done, set()),
        ("quarantine", records.Quarantine, set()),
        ("manifest list", records.ManifestList, set()),
        ("lost", records.Lost, {"swept"}),
    ],
)
def test_keys_of_small_objects(title, kind, more):
    text = re.search(rf"\*\*{title}\*\*(.*?)(?=\n- \*\*|\*\*wait|\*\*done|\n\n)", section("Envelope"), re.S)[1]
    assert set(names_in(text)) - more == set(keys_of(kind)) - more
    assert set(keys_of(kind)) <= set(names_in(text))


def test_states():
    text = section("Envelope")
    assert set(re.findall(r"`(committed|aborted|forgotten|swept)`", text)) == STATES
    assert {records.COMMITTED, records.ABORTED, records.FORGOTTEN, records.SWEPT} == STATES


def test_names_and_steps():
    assert f"`{NAME.pattern}`" in section("Layout")
    assert records.MAX_STEP == 10**12 - 1
    assert "Steps are 0 to 10^12 - 1" in section("Layout")


def test_blob():
    fixed, rest = layout_table("Blob")
    assert fixed == offsets(blob.HEADER)
    assert [row[:2] for row in rest] == [["80", "4n"], ["80+4n", ""]]
    assert blob.HEADER.size == 80
    text = section("Blob")
    assert f"magic `{blob.MAGIC.decode()}`" in text
    assert f"| 2 | format version, {blob.VERSION} |" in text
    assert "transform: 0 full, 1 difference, 2 XOR" in text
    assert blob.TRANSFORMS == {0: "full", 1: "difference", 2: "XOR"}
    assert "plane layout: 0 bytes, 1 rotated" in text
    assert (planes.BYTES, planes.ROTATED) == (0, 1)
    assert "64 Ki for codecs 1 and 2" in text
    assert codecs.BLOCK_BYTES == 64 * 1024


def test_codecs():
    columns, rows = tables("Blob")[1]
    assert columns == ["codec", "name", "a block is"]
    assert {int(row[0]): row[1] for row in rows if row[0].isdecimal()} == codecs.NAMES
    assert (codecs.RAW, zstd.ID, deflate.ID) == (0, 1, 2)


def test_sparse_deltas():
    columns, rows = tables("Blob")[2]
    assert columns == ["offset", "size", "field of a group"]
    assert [(int(at), int(size)) for at, size, _ in rows] == [
        (offset, dtype.itemsize) for dtype, offset in sparse.GROUP.fields.values()
    ]
    text = section("Blob")
    assert (sparse.MAX_GAP_SHIFT, sparse.DENSE) == (26, 255)
    assert "0 to 26; 255: dense" in text
    assert (sparse.GAP_ESCAPE, sparse.OTHER, sparse.VALUE_ESCAPE) == (84, 2, 255)
    assert "3 min(g >> s, 84) + k" in text
    assert "min(w >> t, 255)" in text
    assert codecs.SPARSE == sparse.ID == 3


def test_pack():
    fixed, rest = layout_table("Pack")
    assert fixed == offsets(pack.HEADER)
    assert pack.HEADER.size == 64
    assert [row[:2] for row in rest[:3]] == [["64", ""], ["f", "96n"], ["f+96n", "p"]]
    trailer = [(pack.TRAILER.size - int(at.removeprefix("end-")), int(size)) for at, size, _ in rest[3:]]
    assert trailer == offsets(pack.TRAILER)
    text = section("Pack")
    assert f"magic `{pack.MAGIC.decode()}`" in text
    assert f"magic `{pack.FOOTER_MAGIC.decode()}`" in text
    assert f"format version, {pack.VERSION} " in text
    assert "multiple of 8" in text
    assert blob.ALIGNMENT == 8
    assert "at 32 MiB by default" in text
    assert pack.DEFAULT_PACK_BYTES == 32 * 1024 * 1024


def test_footer_entry():
    fixed, rest = layout_table("Pack", 1)
    assert rest == []
    rows = {row[2]: (int(row[0]), int(row[1])) for row in tables("Pack")[1][1]}
    assert rows.pop("zero") == (18, 6)
    in_code = [(offset, dtype.itemsize) for dtype, offset in pack.ENTRY.fields.values()]
    assert list(rows.values()) == in_code
    assert sum(size for _, size in fixed) == pack.ENTRY.itemsize == 96


def test_manifest_prefix():
    fixed, rest = layout_table("Manifest")
    assert fixed == offsets(sections.PREFIX)
    assert [row[:2] for row in rest] == [["24", "h"], ["24+h", ""]]
    assert sections.PREFIX.size == 24
    assert f"magic `{sections.MAGIC.decode()}`" in section("Manifest")
    assert f"format version, {sections.VERSION} " in section("Manifest")


def test_manifest_header():
    text = re.search(r"^Header: (.*?)\n\n", section("Manifest"), re.S | re.M)[1]
    assert names_in(text) == keys_of(manifest.ManifestHeader)


def test_sections():
    columns, rows = tables("Manifest")[1]
    assert columns == ["section", "contents"]
    found = {}
    for names, contents in rows:
        for name in names_in(names):
            found[name] = contents
    assert list(found) == ["tree", "tensors", "inline", *chunk_table.COLUMNS, records.STRIDES]
    for name, (dtype, shape) in chunk_table.COLUMNS.items():
        of = "chunks" if name in ("digests", "lengths", "ref_counts") else "refs"
        of = "refs - chunks" if name == "ref_digests" else of
        kind = np.dtype(dtype)
        described = f"({of}, {shape[0]})" if shape else f"({of},)"
        assert found[name].startswith(f"{described} u{8 * kind.itemsize}" if kind.itemsize > 1 else f"{described} u8")
        assert kind.kind == "u"
    assert "under 4 KiB" in found["inline"]
    assert chunking.INLINE_BYTES == 4096
    assert (blob.FULL, blob.DIFFERENCE, blob.XOR) == (0, 1, 2)
    assert found["ref_kinds"].endswith("0 full, 1 difference, 2 XOR")


def test_tensor_entries_and_boxes():
    text = re.search(r"^Tensor entry: (.*?)\n\n", section("Manifest"), re.S | re.M)[1]
    entry, box = text.split("A box is")
    named = [
        name
        for name in names_in(entry.split("]. ")[0] + "]")
        if name not in ("tensor", "parameter", "array", "bytes", "page")
    ]
    assert named == list(manifest.TensorEntry.__struct_encode_fields__)
    assert names_in(box.split("]")[0]) == ["offsets", "sizes"]
    assert re.search(r"\[`offsets`, `sizes`, first chunk, number of\s+chunks\]", box)
    assert manifest.Box.__struct_encode_fields__ == ("offsets", "sizes", "first_chunk", "chunks")
    assert "bfloat16" in tensors.TORCH_DTYPES
    assert "`bfloat16`" in entry + box


def test_dtypes():
    ((columns, rows),) = tables("Dtypes")
    assert columns == ["torch dtype", "bytes", "element size"]
    found = {name: (int(size), int(element)) for names, size, element in rows for name in names_in(names)}
    assert found == {name: (size, element) for name, (size, element, _) in tensors.TORCH_DTYPES.items()}
    for name in ("<i2", "|u1", ">f8", "<c16", "<M8[ns]", "|S3", "<U5"):
        spec = tensors.TensorSpec((), "array", name, (), False, None)
        assert spec.itemsize == np.dtype(name).itemsize
        assert spec.element_size == {"c": spec.itemsize // 2, "S": 1, "U": 1}.get(name[1], spec.itemsize)


def test_factories_and_features():
    text = re.search(r"The `name` of a `defaultdict` is (.*?) or\s+None", section("Tree"), re.S)[1]
    assert set(names_in(text)) == set(tree.FACTORIES)
    known = re.search(r"^Known features: (.*?) Nothing", section("What may grow"), re.M | re.S)[1]
    assert set(names_in(known)) == records.KNOWN_FEATURES | config.KNOWN_FEATURES


def normal(cells):
    return [re.sub(r"\s+", " ", cell.replace("`", "")).strip() for cell in cells]


def test_tree_is_the_table_of_the_module():
    lines = [line for line in tree.__doc__.splitlines() if line.startswith("|")]
    in_code = [normal(line.strip("|").split("|")) for line in lines]
    ((columns, rows),) = tables("Tree")
    assert normal(columns) == in_code[0] == ["node", "value"]
    assert [normal(row) for row in rows] == in_code[2:]
    tags = {tag for row in rows for tag in re.findall(r'\["([a-z]+)"', row[0])}
    assert tags == set(tree_decode.READERS)
    assert "TREE_TABLE" not in TEXT


def test_classes():
    (columns, rows), (_, layouts) = tables("Classes")
    assert columns == ["kind", "plain form"]
    assert {name for row in layouts for name in re.findall(r"`(\w+)`", row[0])} == set(torch_layouts.LAYOUTS)
    assert [row[0].strip("`") for row in rows] == list(classes.KINDS)
    assert classes.NAMESPACES == ("argparse.Namespace", "types.SimpleNamespace")
    assert set(re.findall(r"`([a-z ]+)`", dict(tables("Tree")[0][1])['`["path", kind, node]`'])) == set(classes.PATHS)


def test_columns():
    lines = [line for line in state_columns.__doc__.splitlines() if line.startswith("|")]
    in_code = [normal(line.strip("|").split("|")) for line in lines]
    ((columns, rows),) = tables("Columns")
    assert normal(columns) == in_code[0] == ["column", "values"]
    assert [normal(row) for row in rows] == in_code[2:]
    assert "256 or more" in section("Columns")
    assert state_columns.MIN_VALUES == 256
    assert "64 KiB or more in pages" in re.sub(r"\s+", " ", section("Manifest"))
    assert chunking.PAGED_BYTES == 64 * 1024


def test_limits():
    text = re.sub(r"\s+", " ", section("Limits"))
    for what, number in {
        "small objects 64 MiB": records.MAX_OBJECT_BYTES == 64 << 20,
        "metadata 1 MiB": records.MAX_FIELD_BYTES == 1 << 20,
        "together by 4 times its size": sections.MAX_COLUMNS_RATIO == 4,
        "`inline` by 16 MiB": sections.MAX_INLINE_BYTES == 16 << 20,
        "each by 64 KiB or 64 times": (sections.MAX_NODES_BYTES, sections.MAX_NODES_RATIO) == (64 << 10, 64),
        "chunks 64 MiB": chunking.MAX_CHUNK_BYTES == 64 << 20,
        "chains 255 references": chunk_table.MAX_CHAIN == 255,
        "tree depth 200": containers.MAX_DEPTH == 200,
    }.items():
        assert what in text
        assert number, what
    assert "a multiple of 16, 64 to 64 Mi" in section("Envelope")
    assert chunking.MIN_CHUNK_BYTES == 64


def test_folders():
    assert [row[0] for row in tables("Folders")[0][1]] == list(folder.FolderEntry.__struct_fields__)
    assert folder.FolderIndex.__struct_fields__ == ("entries", "block_bytes")
    assert folder.MAGIC == b"snapstore folder 1\n"
    assert "`snapstore folder 1` and a line feed" in section("Folders")
