"""Listings: parse the pages of a listing, and refuse a page that contradicts itself or an earlier one.

In: XML. Out: objects, and where the listing continues. botocore accepts an empty body as an empty listing, any word but
"true" as false, and the answer to another operation as a page with missing fields. If a wrong page were believed, live
objects would look deleted, and a gc would delete data that they need.

No order is required: directory buckets, and servers that walk a file system, do not sort as S3 does. An object that
comes twice is an error: once names do not ascend, each name is compared with all earlier ones.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from ..base import ObjectInfo
from .transport import InvalidAnswerError

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing.

    Attributes:
        objects: Their keys are whole names; their times are whole seconds, as in an answer to HEAD.
        token: Where the listing continues; None on the last page.
    """

    objects: list[ObjectInfo]
    token: str | None


def read_page(body: bytes, prefix: str, token: str | None = None) -> Page:
    """Parse `body` as a page of the listing of `prefix` that continues at `token`.

    Raises:
        InvalidAnswerError: It is not a page, not of this listing, or contradicts itself.
    """
    if b"<!" in body:  # a document type with entities, or a comment: S3 sends neither
        raise InvalidAnswerError("a page with declarations")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError):  # not XML, or in an unknown encoding
        raise InvalidAnswerError("a page that is not XML") from None
    fields, entries = _fields(root, {"Contents", "CommonPrefixes"})
    if _local(root.tag) != "ListBucketResult":
        raise InvalidAnswerError("an answer to another request")
    encoding = fields.get("EncodingType", "")
    if encoding not in ("", "url"):
        raise InvalidAnswerError("a page with names in an unknown encoding")
    for name, wanted in (("Prefix", prefix), ("ContinuationToken", token or "")):
        got = fields.get(name, wanted)
        if got != wanted and not (encoding and unquote_plus(got) == wanted):
            raise InvalidAnswerError(f"a page of another listing (its {name} differs)")
    objects = [_object(entry, prefix, encoding == "url") for entry in entries]
    if len({info.key for info in objects}) < len(objects):
        raise InvalidAnswerError("a page that shows an object twice")
    if "KeyCount" in fields and fields["KeyCount"] != str(len(objects)):
        raise InvalidAnswerError(f"a page of {len(objects)} objects that claims another number")
    truncated, following = fields.get("IsTruncated"), fields.get("NextContinuationToken", "")
    if truncated not in ("true", "false"):
        raise InvalidAnswerError("a page that does not say whether it is the last")
    if truncated == "true" and not following:
        raise InvalidAnswerError("a page that is not the last, and does not say where to continue")
    if truncated == "false" and following:
        raise InvalidAnswerError("a page that is the last, and says where to continue")
    if following and not objects:
        raise InvalidAnswerError("a page without objects that is not the last")
    return Page(objects, following or None)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _fields(element: ElementTree.Element, repeated: set[str]) -> tuple[dict[str, str], list[ElementTree.Element]]:
    """Return (text by name, elements that may come more than once)."""
    fields: dict[str, str] = {}
    entries = []
    for child in element:
        name = _local(child.tag)
        if name in repeated:
            entries.append(child)
        elif fields.setdefault(name, child.text or "") != (child.text or ""):
            raise InvalidAnswerError(f"a page with two of {name[:40]}")
    return fields, entries


def _object(entry: ElementTree.Element, prefix: str, encoded: bool) -> ObjectInfo:
    fields, _ = _fields(entry, {"ChecksumAlgorithm"})
    name = unquote_plus(fields["Key"]) if encoded and "Key" in fields else fields.get("Key", "")
    if not name or not name.startswith(prefix) or _local(entry.tag) != "Contents":
        raise InvalidAnswerError("a page with an entry that is not an object under the prefix")
    size, when = fields.get("Size", ""), fields.get("LastModified", "")
    try:
        modified = datetime.fromisoformat(when)
    except ValueError:
        modified = None
    if not _NUMBER.fullmatch(size) or modified is None or modified.tzinfo is None:
        raise InvalidAnswerError("a page with an object whose size or date cannot be read")
    return ObjectInfo(name, int(size), float(int(modified.timestamp())), fields.get("ETag", "").strip('"'))


class Listing:
    """The objects that one listing has returned so far; 8 bytes of memory per object while names ascend."""

    def __init__(self) -> None:
        self._tokens: set[str] = set()
        self._last = ""
        self._hashes = array("q")
        self._known: set[int] | None = None  # from the first name that does not ascend

    def add(self, page: Page) -> Iterator[ObjectInfo]:
        """Return the objects of the next page.

        Raises:
            InvalidAnswerError: It repeats an object or a token of an earlier page; nothing is added then.
        """
        names = [info.key for info in page.objects]
        if page.token in self._tokens:
            raise InvalidAnswerError("a page that continues where an earlier one did")
        hashes = list(map(hash, names))
        ascends = all(one < other for one, other in zip([self._last, *names], names, strict=False))
        if self._known is None and not ascends:
            self._known = set(self._hashes)
        if self._known is not None:
            if not self._known.isdisjoint(hashes):
                raise InvalidAnswerError("a page with objects that an earlier one has")
            self._known.update(hashes)
        else:
            self._hashes.extend(hashes)
        self._last = max(names, default=self._last)
        if page.token is not None:
            self._tokens.add(page.token)
        return iter(page.objects)
