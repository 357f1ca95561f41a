"""An archive of torch is read as torch reads it, whatever another reader makes of it, or it is refused."""

import io
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.samples import examples
from snapstore import InvalidInputError
from snapstore.convert import torch_checks
from snapstore.convert.files import load_torch
from snapstore.convert.torch_checks import entries

WIDE = 0xFFFFFFFF
NAMES = [
    *(b"x/data.pkl", b"X/DATA.PKL", b"x/Data.pkl", b"y/data.pkl", b"data.pkl", b"x/data.pkl\0a", b"x/data.pkl/", b"x"),
    *(b"x/data/0", b"x/data/1", b"x/DATA/0", b"x/version", b"x/notes", b"x/", b"/", b"", b"x/\xff", "x/ä".encode()),
    b"x/" + b"n" * 600,
]


def pickled(which):
    """Return a pickle of {"which": number, "w": tensor}, whose tensor is in the entry data/0."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    return b"\x80\x02}(X\x05\0\0\0whichK" + bytes([which]) + b"X\x01\0\0\0w" + tensor + b"u."


@dataclass
class Part:
    """An entry of an archive. `lies` change numbers that the directory has of it."""

    name: bytes
    data: bytes
    local_name: bytes | None = None
    method: int = 0
    flags: int = 0
    attributes: int = 0
    extra: bytes = b""
    local_extra: bytes = b""
    comment: bytes = b""
    wide: tuple[str, ...] = ()
    lies: dict[str, int] = field(default_factory=dict)

    def body(self):
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(self.data) + packer.flush() if self.method == 8 else self.data
        name = self.name if self.local_name is None else self.local_name
        numbers = (20, self.flags, self.method, 0, 33, zlib.crc32(self.data), len(packed), len(self.data))
        head = struct.pack("<4s5H3L2H", b"PK\3\4", *numbers, len(name), len(self.local_extra))
        return head + name + self.local_extra + packed, len(packed)

    def listed(self, header, packed):
        """Return its part of the directory."""
        true = {"size": len(self.data), "packed": packed, "header": header, "crc": zlib.crc32(self.data)}
        said = {key: (true[key] + self.lies.get(key, 0)) % 2**64 for key in true}
        wide = b"".join(struct.pack("<Q", said[key]) for key in self.wide)
        extra = self.extra + (struct.pack("<HH", 1, len(wide)) + wide if wide else b"")
        short = {key: WIDE if key in self.wide else min(said[key], WIDE) for key in said}
        sizes = (short["crc"], short["packed"], short["size"], len(self.name), len(extra), len(self.comment))
        head = struct.pack("<4s6H3L3H", b"PK\1\2", 20, 20, self.flags, self.method, 0, 33, *sizes)
        return head + struct.pack("<2H2L", 0, 0, self.attributes, short["header"]) + self.name + extra + self.comment


def parts(which, packed=0):
    return [
        Part(b"x/data.pkl", pickled(which), method=packed),
        Part(b"x/data/0", struct.pack("<f", which)),
        Part(b"x/version", b"3\n"),
    ]


def archive(listed, hidden=(), *, end=(), long_end=None, between=b"", after=b"", broken=""):
    """Return an archive with the directory of `hidden` parts, then that of the `listed` ones.

    Args:
        end: changes of (count, length, start) in the last record; "hidden": they are those of the first directory.
        long_end: the same for the record of a long archive; None: there is none.
        between: bytes behind the directories.
        broken: whether the "magic" bytes or the "offset" of the record of a long archive are wrong.
    """
    data, directories = b"", []
    for chosen in (hidden, listed):
        directory = b""
        for part in chosen:
            body, packed = part.body()
            directory += part.listed(len(data), packed)
            data += body
        directories.append((len(chosen), directory))
    numbers = []
    for count, directory in directories:
        numbers.append({"count": count, "length": len(directory), "start": len(data)})
        data += directory
    data += between

    def said(changes):
        changes = dict(changes)
        chosen = numbers[0 if changes.get("hidden") else 1]
        return [max(0, chosen[key] + changes.get(key, 0)) for key in ("count", "length", "start")]

    if long_end is not None:
        count, *place = said(long_end)
        at = len(data) + (broken == "offset")
        magic = b"PK\6\7" if broken == "magic" else b"PK\6\6"
        data += struct.pack("<4sQ2H2L4Q", magic, 44, 45, 45, 0, 0, count, count, *place)
        data += struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    count, *place = said(end)
    return data + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, *place, len(after)) + after


def unicode_path(name, other):
    """Return the extra field 0x7075, by which Python 3.12 and later give an entry another name."""
    data = struct.pack("<BL", 1, zlib.crc32(name)) + other
    return struct.pack("<HH", 0x7075, len(data)) + data


deltas = st.sampled_from([-46, -4, -1, 1, 4, 46])
changes = st.one_of(
    st.tuples(st.just("name"), st.sampled_from(NAMES)),
    st.tuples(st.just("local_name"), st.sampled_from(NAMES)),
    st.tuples(st.just("path"), st.sampled_from([b"x/data.pkl", b"x/notes", b"x/version"])),
    st.tuples(st.just("data"), st.integers(2, 9).map(pickled)),
    st.tuples(st.just("method"), st.sampled_from([8, 8, 12])),
    st.tuples(st.just("flags"), st.sampled_from([1, 8, 0x40, 0x800, 0x2000])),
    st.tuples(st.just("attributes"), st.sampled_from([0x10, 0x20])),
    st.tuples(st.just("extra"), st.sampled_from([b"a", b"ab\x09\0", b"\1\0\0\0", b"\1\0\x08\0" + bytes(8)])),
    st.tuples(st.just("local_extra"), st.binary(max_size=9)),
    st.tuples(st.just("comment"), st.sampled_from([b"c", b"PK\5\6", b"PK\1\2" + bytes(42)])),
    st.tuples(st.just("wide"), st.permutations(["size", "packed", "header"]).map(lambda keys: tuple(keys[:2]))),
    st.tuples(st.just("wide"), st.sampled_from([("size",), ("packed",), ("header",), ("size", "packed", "header")])),
    st.tuples(st.just("lies"), st.dictionaries(st.sampled_from(["size", "packed", "header"]), deltas, max_size=2)),
    st.tuples(st.just("again"), st.integers(2, 9)),
)  # fmt: skip
ends = st.dictionaries(st.sampled_from(["count", "length", "start"]), deltas, max_size=1)
ends = st.one_of(st.just({}), ends, st.just({"hidden": 1}))


@st.composite
def archives(draw):
    """Draw an archive that torch.save could have written, but for some changes."""
    listed = parts(1)
    for kind, value in draw(st.lists(changes, max_size=4)):
        number = draw(st.integers(0, len(listed) - 1))
        part = listed[number]
        if kind == "again":
            listed.insert(number, replace(part, data=pickled(value) if b"pkl" in part.name else part.data))
        elif kind == "path":
            part.extra = unicode_path(part.name, value)
        elif kind == "data" and b"pkl" not in part.name:
            listed.append(Part(b"x/more", value))
        else:
            setattr(part, kind, value)
    if draw(st.booleans()):
        return archive(listed)
    return archive(
        listed,
        draw(st.sampled_from([(), parts(0), parts(0)])),
        end=draw(ends),
        long_end=draw(st.one_of(st.none(), ends)),
        between=draw(st.sampled_from([b"", b"", b"a", b"PK\5\6"])),
        after=draw(st.sampled_from([b"", b"", b"", b"a", b"PK\5\6" + bytes(18)])),
        broken=draw(st.sampled_from(["", "", "magic", "offset"])),
    )


def compared(data):
    """Read an archive as snapstore and as torch do; return who refuses it. If none does, they must agree."""
    try:
        ours = entries(io.BytesIO(data))
    except ValueError:
        return "refused"
    try:
        theirs = torch._C.PyTorchFileReader(io.BytesIO(data))
        names = theirs.get_all_records()
    except (RuntimeError, UnicodeDecodeError):
        return "refused by torch"
    folder = ours[0].name.index(b"/") + 1
    assert [entry.name[folder:].decode() for entry in ours] == names
    for entry, name in zip(ours, names, strict=True):
        try:
            content = theirs.get_record(name) if entry.size < 10_000 else None
        except RuntimeError:  # such as compressed bytes that are damaged
            continue
        if content is not None:
            assert len(content) == entry.size
            assert theirs.get_record_offset(name) == entry.start
            assert not entry.is_stored or content == data[entry.start : entry.start + entry.size]
    return "read"


def test_a_directory_is_read_as_torch_reads_it():
    found = Counter()

    @settings(max_examples=examples(2000))
    @given(archives())
    def check(data):
        found[compared(data)] += 1

    check()
    assert found["read"]
    assert found["refused"]


@pytest.fixture
def followed(monkeypatch):
    """Return a list to which each pickle is added that is followed before torch reads it."""
    seen = []
    follow = torch_checks._Scan.follow

    def noted(scan, file):
        seen.append(file.read())
        file.seek(0)
        return follow(scan, file)

    monkeypatch.setattr(torch_checks._Scan, "follow", noted)
    return seen


def check_loaded(data, path, followed):
    """Load an archive, mapped and read; return whether it was loaded. The pickle was followed that torch has loaded.

    One that is only mapped has a part of an element behind a storage: torch itself refuses to read it.
    """
    path.write_bytes(data)
    found = []
    for file in (path, io.BytesIO(data)):
        followed.clear()
        try:
            found.append(load_torch(file, "x.pt"))
        except InvalidInputError:
            continue
        assert followed == [pickled(found[-1]["which"])]
    if len(found) == 1:
        assert found[0] == torch.load(path, weights_only=True, mmap=True)
        with pytest.raises(RuntimeError, match="does not match expected size"):
            torch.load(io.BytesIO(data), weights_only=True)
    elif found:
        assert found[0] == found[1] == torch.load(io.BytesIO(data), weights_only=True)
    return bool(found)


def test_the_pickle_is_followed_that_torch_loads(tmp_path, followed):
    found = Counter()

    @settings(max_examples=examples(2000))
    @given(archives())
    def check(data):
        found[check_loaded(data, tmp_path / "x.pt", followed)] += 1

    check()
    assert found[True]
    assert found[False]


@pytest.mark.parametrize("more", [-4, -1, 1, 3, 4])
def test_a_storage_has_the_bytes_of_its_entry(tmp_path, followed, more):
    """Or a part of an element more, which torch maps and does not read."""
    listed = parts(1)
    listed[1].lies = {"size": more, "packed": more}
    assert check_loaded(archive(listed), tmp_path / "x.pt", followed) == (0 < more < 4)


@pytest.fixture
def newer_python(monkeypatch):
    """Let `zipfile` of this Python name entries by the extra field 0x7075, as that of Python 3.12 and later does."""
    decode = zipfile.ZipInfo._decodeExtra

    def renamed(entry, *args):
        decode(entry, *args)
        if entry.extra[:2] == b"up":
            entry.filename = entry.extra[9:].decode()

    monkeypatch.setattr(zipfile.ZipInfo, "_decodeExtra", renamed)


@pytest.mark.usefixtures("newer_python")
def test_a_pickle_with_another_name_in_an_extra_field(tmp_path, followed):
    listed = parts(1)
    listed[0].extra = unicode_path(listed[0].name, b"x/notes.txt")
    data = archive(listed)
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        assert other.namelist()[0] == "x/notes.txt"
    assert check_loaded(data, tmp_path / "x.pt", followed)


@pytest.mark.parametrize("name", [b"x/data.pkl", b"X/data.pkl", b"x/DATA.PKL", b"x/data.pkl\0", b"y/data.pkl", b"x"])
def test_a_second_pickle_under_another_name(tmp_path, name):
    """torch finds either of two equal names; zipfile the last one, and cuts a name off at a NUL."""
    for listed in ([*parts(1), Part(name, pickled(2))], [Part(name, pickled(2)), *parts(1)]):
        (tmp_path / "x.pt").write_bytes(archive(listed))
        with pytest.raises(InvalidInputError, match=r"x\.pt: not a PyTorch file, or damaged: .*entry \d of"):
            load_torch(tmp_path / "x.pt", "x.pt")


def test_a_directory_that_another_reader_does_not_find(tmp_path):
    """zipfile and torch choose among the two records at the end by different rules."""
    path = tmp_path / "x.pt"
    path.write_bytes(archive(parts(1), long_end={}))
    assert load_torch(path, "x.pt")["which"] == 1
    for data in (
        archive(parts(1), parts(2), end={"hidden": True}),
        archive(parts(1), parts(2), end={"hidden": True}, long_end={}, broken="magic"),
        archive(parts(1), parts(2), long_end={"hidden": True}),
        archive(parts(1), end={"count": -1}),
        archive(parts(1), after=b"a"),
        archive(parts(1), between=b"a"),
        b"PK\3\4" + archive(parts(1)),
    ):
        path.write_bytes(data)
        with pytest.raises(InvalidInputError, match="not a PyTorch file, or damaged"):
            load_torch(path, "x.pt")


def test_an_entry_whose_bytes_torch_does_not_read(tmp_path):
    """torch leaves the memory of a folder's content as it finds it, and looks for large sizes in one place only."""
    for change in ({"attributes": 0x10}, {"wide": ("size",), "lies": {"size": 1}}, {"flags": 1}, {"method": 12}):
        listed = parts(1)
        listed[0] = replace(listed[0], **change)
        (tmp_path / "x.pt").write_bytes(archive(listed))
        with pytest.raises(InvalidInputError, match=r"entry 0 of the archive, b'x/data.pkl', (has a wrong|cannot be)"):
            load_torch(tmp_path / "x.pt", "x.pt")


def test_a_damaged_pickle(tmp_path):
    """torch does not compare the CRC-32. It can be told to write none."""
    data = archive(parts(1))
    (tmp_path / "x.pt").write_bytes(data.replace(b"which", b"Which", 1))
    with pytest.raises(InvalidInputError, match=r"the CRC-32 of data\.pkl is"):
        load_torch(tmp_path / "x.pt", "x.pt")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"which": 1}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_torch(tmp_path / "x.pt", "x.pt") == torch.load(tmp_path / "x.pt") == {"which": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"K\x01tQ", b"K\x02tQ"), (b"K\x01tQ", b"K\0tQ"), (b"Float", b"Doubl"), (b"\x000X", b"\x001X")],
    ids=["long", "short", "type", "missing"],
)
def test_a_storage_that_is_not_its_entry(tmp_path, old, new):
    """Before 2.13, torch reads memory that is not of the storage."""
    listed = parts(1)
    listed[0].data = listed[0].data.replace(old, new)
    (tmp_path / "x.pt").write_bytes(archive(listed))
    with pytest.raises(InvalidInputError, match=r"x\.pt: names .*; the file is damaged or hostile"):
        load_torch(tmp_path / "x.pt", "x.pt")


def test_an_entry_under_many_names_is_read_once(tmp_path):
    """torch takes names in any case and up to a NUL: 2^20 storages of one entry would take its memory so often."""
    tensor = pickled(1)[pickled(1).index(b"ctorch._utils") : -2]
    for keys in ((b"ab", b"aB"), (b"ab", b"ab\0a")):
        tensors = b"".join(tensor.replace(b"\1\0\0\x000X", struct.pack("<L", len(key)) + key + b"X") for key in keys)
        listed = [Part(b"x/data.pkl", b"\x80\x02(" + tensors + b"t."), Part(b"x/data/ab", bytes(4)), parts(1)[2]]
        (tmp_path / "x.pt").write_bytes(archive(listed))
        with pytest.raises(InvalidInputError, match=r"x\.pt: names 1 elements of 4 bytes in data/a"):
            load_torch(tmp_path / "x.pt", "x.pt")


def test_an_archive_of_more_than_4_gib(tmp_path):
    """Its sizes and offsets are in extra fields, and its directory has a second record at the end."""
    with (tmp_path / "x.pt").open("w+b") as file, torch.serialization.skip_data():
        torch.save({"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(2)}, file)
    with (tmp_path / "x.pt").open("rb") as file:
        theirs = torch._C.PyTorchFileReader(file)
        names = theirs.get_all_records()
        ours = {entry.name.removeprefix(b"archive/").decode(): entry for entry in entries(file)}
        assert {name: entry.start for name, entry in ours.items()} == {
            name: theirs.get_record_offset(name) for name in names
        }
    assert [ours[f"data/{number}"].size for number in range(3)] == [5 << 30, 12, 8]
    assert list(load_torch(tmp_path / "x.pt", "x.pt")["a"].shape) == [5 << 30]
