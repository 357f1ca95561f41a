"""A page of a listing that contradicts itself or an earlier page is refused, even if botocore accepts it."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.hostile_s3 import page_of
from kit.samples import SEED
from snapstore.storage.s3.listing import Listing, read_page
from snapstore.storage.s3.transport import InvalidAnswerError

OBJECTS = {"p/a b+c": (b"1", 1e9), "p/x/ä": (b"22", 1.1e9), "p/z&": (b"", 1.2e9)}
PAGE = page_of(OBJECTS, "p/")
MORE = page_of(OBJECTS, "p/", token="now", following="next")


def test_a_page():
    page = read_page(PAGE, "p/")
    assert [(info.key, info.size_bytes, info.modified_s) for info in page.objects] == [
        (name, len(data), when) for name, (data, when) in OBJECTS.items()
    ]
    assert len({info.tag for info in page.objects}) == 3
    assert '"' not in page.objects[0].tag
    assert page.token is None
    assert read_page(MORE, "p/", "now").token == "next"
    assert read_page(page_of({}, "p/"), "p/").objects == []


def test_names_that_are_not_encoded():
    body = page_of({"p/ab": (b"1", 1.0)}, "p/", EncodingType="", Prefix="p/")
    assert [info.key for info in read_page(body, "p/").objects] == ["p/ab"]


def without(name: str, body: bytes = PAGE) -> bytes:
    return re.sub(rf"<{name}>.*?</{name}>".encode(), b"", body, count=1)


def with_(name: str, text: str, body: bytes = PAGE) -> bytes:
    assert f"<{name}>".encode() in body
    return re.sub(rf"<{name}>.*?</{name}>".encode(), f"<{name}>{text}</{name}>".encode(), body, count=1)


CONTRADICTIONS = {
    "no body": b"",
    "no XML": b"<ListBucketResult",
    "a portal": b"<html><body>Sign in</body></html>",
    "another operation": PAGE.replace(b"ListBucketResult", b"ListAllMyBucketsResult"),
    "an error": b"<Error><Code>SlowDown</Code></Error>",
    "entities": b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]>" + PAGE.partition(b"?>")[2],
    "another encoding of bytes": PAGE.replace(b"UTF-8", b"no-such"),
    "UTF-16 that is none": PAGE.replace(b"UTF-8", b"UTF-16"),
    "IsTruncated missing": without("IsTruncated"),
    "IsTruncated empty": with_("IsTruncated", ""),
    "IsTruncated maybe": with_("IsTruncated", "maybe"),
    "IsTruncated with a space": with_("IsTruncated", " true", MORE),
    "IsTruncated with a line": with_("IsTruncated", "\nfalse\n"),
    "IsTruncated of Python": with_("IsTruncated", "False"),
    "IsTruncated nested": with_("IsTruncated", "<x>false</x>"),
    "IsTruncated twice": PAGE.replace(b"</ListBucket", b"<IsTruncated>true</IsTruncated></ListBucket"),
    "truncated without a token": without("NextContinuationToken", MORE),
    "truncated with an empty token": with_("NextContinuationToken", "", MORE),
    "a token without truncation": with_("IsTruncated", "false", MORE),
    "KeyCount larger": with_("KeyCount", "4"),
    "KeyCount smaller": with_("KeyCount", "2"),
    "KeyCount no number": with_("KeyCount", "three"),
    "KeyCount empty": with_("KeyCount", ""),
    "an object left out": without("Contents"),
    "truncated without objects": page_of({}, "p/", following="next"),
    "a key outside the prefix": with_("Key", "q/a"),
    "an empty key": with_("Key", ""),
    "no key": without("Key"),
    "a key twice": with_("Key", "p/z%26"),
    "no size": without("Size"),
    "a size that is none": with_("Size", "1e3"),
    "a negative size": with_("Size", "-1"),
    "a huge size": with_("Size", "9" * 5000),
    "no date": without("LastModified"),
    "a date that is none": with_("LastModified", "yesterday"),
    "a date without a zone": with_("LastModified", "2026-01-01T00:00:00"),
    "a date out of range": with_("LastModified", "2026-13-41T00:00:00.000Z"),
    "common prefixes": PAGE.replace(b"</ListB", b"<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes></ListB"),
    "another prefix": with_("Prefix", "q/"),
    "the page after another token": with_("ContinuationToken", "then", MORE),
    "an encoding nobody knows": with_("EncodingType", "base64"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_page_that_contradicts_itself(name):
    with pytest.raises(InvalidAnswerError):
        read_page(CONTRADICTIONS[name], "p/", "now" if b"<ContinuationToken>" in CONTRADICTIONS[name] else None)


@given(st.data())
def test_mutated_pages_are_pages_or_refused(data):
    """Reading a mutated page returns a consistent page or raises InvalidAnswerError."""
    body = bytearray(data.draw(st.sampled_from([PAGE, MORE])))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body)))
        end = min(len(body), start + data.draw(st.integers(0, 30)))
        body[start:end] = data.draw(st.one_of(st.binary(max_size=8), st.just(bytes(body[:start][-40:]))))
    try:
        page = read_page(bytes(body), "p/", "now")
    except InvalidAnswerError:
        return
    assert all(info.key.startswith("p/") and info.size_bytes >= 0 for info in page.objects)
    assert len({info.key for info in page.objects}) == len(page.objects)
    assert page.objects or not page.token


def pages(names: list[str], size: int) -> list[bytes]:
    """Return the pages of a listing of these names."""
    starts = range(0, len(names), size)
    return [
        page_of(dict.fromkeys(names[at : at + size], (b"x", 1.0)), "", following=f"t{at}" if at != starts[-1] else "")
        for at in starts
    ]


def read(bodies: list[bytes]) -> list[str]:
    listing = Listing()
    return [info.key for body in bodies for info in listing.add(read_page(body, ""))]


@pytest.mark.parametrize("ordered", [True, False])
def test_any_order_is_taken(ordered):
    """A listing may have any order: directory buckets, and servers on a file system, do not sort names as S3 does."""
    names = [f"{n:03}" for n in range(40)]
    if not ordered:
        random.Random(SEED).shuffle(names)
    assert read(pages(names, 7)) == names


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("again", [0, 1, 3])
def test_an_object_that_comes_again(ordered, again):
    """A listing that shows an object twice is refused: a page is repeated or shifted, so another may be missing."""
    names = [f"{n:03}" for n in range(40)]
    if not ordered:
        random.Random(SEED).shuffle(names)
    whole = pages(names, 7)
    for repeated in (whole[again].replace(b"<NextContinuationToken>t", b"<NextContinuationToken>u"), whole[again]):
        with pytest.raises(InvalidAnswerError):
            read([*whole[:4], repeated])


def test_a_token_that_comes_again():
    """A listing that repeats any earlier token is refused: else it would never end."""
    whole = pages([f"{n:03}" for n in range(40)], 7)
    whole[3] = whole[3].replace(b"t21<", b"t0<")
    with pytest.raises(InvalidAnswerError, match="continues where"):
        read(whole)


def test_a_page_that_is_refused_leaves_no_trace():
    """A refused page does not change the listing, which then goes on with the next page."""
    whole = pages([f"{n:03}" for n in range(21)], 7)
    listing = Listing()
    keys = [info.key for info in listing.add(read_page(whole[0], ""))]
    with pytest.raises(InvalidAnswerError):
        listing.add(read_page(whole[0], ""))
    for body in whole[1:]:
        keys += [info.key for info in listing.add(read_page(body, ""))]
    assert keys == [f"{n:03}" for n in range(21)]
