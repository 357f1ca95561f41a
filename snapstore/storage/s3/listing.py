"""Pages of a listing, read from their bytes: a page that contradicts itself, or an earlier one, is no page.

In: XML. Out: objects, and where the listing goes on. botocore takes an empty body for an empty listing, any word but
"true" for false, and another operation's answer for whatever it lacks. A page that is believed too soon makes live
objects look deleted, and a gc deletes them.

No order is demanded: directory buckets, and servers that walk a file system, have another one than S3's. Every object
comes once: where names do not ascend, each is looked up among all before.
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
from .transport import OddAnswerError

_NUMBER = re.compile(r"[0-9]{1,18}")
_ECHOES = {"Prefix", "ContinuationToken"}


@dataclass(frozen=True, slots=True)
class Page:
    """One answer.

    Attributes:
        objects: with their whole names for keys, and times in whole seconds, since HEAD has no others.
        token: where the listing goes on; None: it is over.
    """

    objects: list[ObjectInfo]
    token: str | None


def read_page(body: bytes, prefix: str, token: str | None = None) -> Page:
    """The page that `body` is, as the answer to a listing of `prefix` from `token` on.

    Raises:
        OddAnswerError: it is none, or not of this listing, or does not hang together.
    """
    if b"<!" in body:  # a document type with entities, a comment: S3 sends none
        raise OddAnswerError("a page with declarations")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError):  # no XML, or in an encoding that nobody knows
        raise OddAnswerError("a page that is no XML") from None
    fields, entries = _fields(root, {"Contents", "CommonPrefixes"})
    if _local(root.tag) != "ListBucketResult":
        raise OddAnswerError("an answer to another request")
    encoding = fields.get("EncodingType", "")
    if encoding not in ("", "url"):
        raise OddAnswerError("names in an unknown encoding")
    for name, wanted in (("Prefix", prefix), ("ContinuationToken", token or "")):
        got = fields.get(name, wanted)
        if got != wanted and not (encoding and unquote_plus(got) == wanted):
            raise OddAnswerError(f"a page of another listing (its {name} differs)")
    objects = [_object(entry, prefix, encoding == "url") for entry in entries]
    if len({info.key for info in objects}) < len(objects):
        raise OddAnswerError("a page that shows an object twice")
    if "KeyCount" in fields and fields["KeyCount"] != str(len(objects)):
        raise OddAnswerError(f"a page of {len(objects)} objects that claims another number of them")
    truncated, following = fields.get("IsTruncated"), fields.get("NextContinuationToken", "")
    if truncated not in ("true", "false"):
        raise OddAnswerError("a page that does not say whether it is the last")
    if truncated == "true" and not following:
        raise OddAnswerError("there is more, and the page does not say where")
    if truncated == "false" and following:
        raise OddAnswerError("the page is the last, and says where to go on")
    if following and not objects:
        raise OddAnswerError("a page without objects that is not the last")
    return Page(objects, following or None)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _fields(element: ElementTree.Element, repeated: set[str]) -> tuple[dict[str, str], list[ElementTree.Element]]:
    """(text by name, the elements that may come more than once)."""
    fields: dict[str, str] = {}
    entries = []
    for child in element:
        name = _local(child.tag)
        if name in repeated:
            entries.append(child)
        elif fields.setdefault(name, child.text or "") != (child.text or ""):
            raise OddAnswerError(f"a page with two of {name[:40]}")
    return fields, entries


def _object(entry: ElementTree.Element, prefix: str, encoded: bool) -> ObjectInfo:
    fields, _ = _fields(entry, {"ChecksumAlgorithm"})
    name = unquote_plus(fields["Key"]) if encoded and "Key" in fields else fields.get("Key", "")
    if not name or not name.startswith(prefix) or _local(entry.tag) != "Contents":
        raise OddAnswerError("a page with an entry that is no object under the prefix")
    size, when = fields.get("Size", ""), fields.get("LastModified", "")
    try:
        modified = datetime.fromisoformat(when)
    except ValueError:
        modified = None
    if not _NUMBER.fullmatch(size) or modified is None or modified.tzinfo is None:
        raise OddAnswerError("a page with an object whose size or date cannot be read")
    return ObjectInfo(name, int(size), float(int(modified.timestamp())), fields.get("ETag", "").strip('"'))


class Listing:
    """What one listing has shown; memory: 8 bytes an object, as long as names ascend."""

    def __init__(self) -> None:
        self._tokens: set[str] = set()
        self._last = ""
        self._hashes = array("q")
        self._known: set[int] | None = None  # once they do not

    def add(self, page: Page) -> Iterator[ObjectInfo]:
        """The objects of the next page.

        Raises:
            OddAnswerError: it has some again, or goes on where the listing was before; nothing is added then.
        """
        names = [info.key for info in page.objects]
        if page.token in self._tokens:
            raise OddAnswerError("a page that goes on where the listing has been")
        hashes = list(map(hash, names))
        ascends = all(one < other for one, other in zip([self._last, *names], names, strict=False))
        if self._known is None and not ascends:
            self._known = set(self._hashes)
        if self._known is not None:
            if not self._known.isdisjoint(hashes):
                raise OddAnswerError("a page with objects that an earlier one has")
            self._known.update(hashes)
        else:
            self._hashes.extend(hashes)
        self._last = max(names, default=self._last)
        if page.token is not None:
            self._tokens.add(page.token)
        return iter(page.objects)
