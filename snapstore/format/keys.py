"""Keys: the keys of packs, manifests, records and notes in the store.

In: names. Out: keys, and back. A key is parsed only if all of it matches, so no other object is taken for one of these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ID_DIGITS = 32
#: The run of the aborted record of a damaged session: the real run is unknown.
UNKNOWN_RUN = "0-damaged-session"
_QUARANTINE_KEY = re.compile(r"gc/([0-9a-f]{64})(?:\.[0-9a-f]{32})?\.quarantine")
_NOTE_OF_GC = re.compile(r"gc/[0-9a-f]{32}\.(mark|wait|done)")
_LOST_KEY = re.compile(r"gc/([0-9a-f]{32})\.lost")
_POLICY_KEY = re.compile(rf"policies/({NAME.pattern})\.(0|[1-9]\d{{0,8}})")
#: Pages have numbers below this; so many of them are in one folder, which a listing need not show once it is full.
MAX_PAGES, PAGES_IN_FOLDER = 10**9, 100
_PAGE_KEY = re.compile(rf"pages/({NAME.pattern})/(\d{{7}})/(\d{{2}})")
_VOLUME_KEY = re.compile(rf"volumes/({NAME.pattern})/(\d{{9}})-(\d{{9}})\.([0-9a-f]{{32}})")
_NEXT_DIGIT = dict(zip("012345678", "123456789", strict=True))
_RECORD_KEY = re.compile(rf"snapshots/({NAME.pattern})/(\d{{12}})-([0-9a-f]{{32}})\.(0|[1-9]\d{{0,8}})")


def pack_key(sha256: str) -> str:
    """Return the key of a pack."""
    return f"packs/{sha256[:2]}/{sha256}"


def manifest_key(sha256: str) -> str:
    """Return the key of a manifest."""
    return f"manifests/{sha256[:2]}/{sha256}"


def record_key(run: str, step: int, snapshot_id: str, revision: int) -> str:
    """Return the key of a revision of a record."""
    return f"snapshots/{run}/{step:012d}-{snapshot_id}.{revision}"


def records_prefix(run: str | None = None) -> str:
    """Return the prefix of the keys of a run's records, and of no other run's; None: of all records."""
    return f"snapshots/{run}/" if run is not None else "snapshots/"


def parse_record_key(key: str) -> tuple[str, int, str, int] | None:
    """Return (run, step, id, revision) of a record's key, None for any other key."""
    match = _RECORD_KEY.fullmatch(key)
    return (match[1], int(match[2]), match[3], int(match[4])) if match else None


def page_key(run: str, number: int) -> str:
    """Return the key of a page."""
    return f"{pages_prefix(run)}{number // PAGES_IN_FOLDER:07d}/{number % PAGES_IN_FOLDER:02d}"


def pages_prefix(run: str | None = None) -> str:
    """Return the prefix of the keys of a run's pages; None: of all pages."""
    return f"pages/{run}/" if run is not None else "pages/"


def parse_page_key(key: str) -> tuple[str, int] | None:
    """Return (run, number) of a page's key, None for any other key."""
    match = _PAGE_KEY.fullmatch(key)
    return (match[1], int(match[2]) * PAGES_IN_FOLDER + int(match[3])) if match else None


def volume_key(run: str, first: int, last: int, volume_id: str) -> str:
    """Return the key of a volume of the pages `first` to `last`."""
    return f"volumes/{run}/{first:09d}-{last:09d}.{volume_id}"


def parse_volume_key(key: str) -> tuple[str, int, int] | None:
    """Return (run, first page, last page) of a volume's key, None for any other key."""
    match = _VOLUME_KEY.fullmatch(key)
    return (match[1], int(match[2]), int(match[3])) if match and int(match[2]) <= int(match[3]) else None


def parse_policy_key(key: str) -> tuple[str, int] | None:
    """Return (run, revision) of a policy's key, None for any other key."""
    match = _POLICY_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def name_of_record(key: str) -> str:
    """Return a record's key without its revision: run, step and, as its last ID_DIGITS characters, the id."""
    return key.rpartition(".")[0]


def superseded(keys: Collection[str]) -> set[str]:
    """Return the keys of records whose next revision is among the keys too.

    A next revision that ends in 0 is not looked for: this is only for speed.
    """
    there = set(keys)
    return {key for key in keys if key.count("/") == 2 and key[:-1] + _NEXT_DIGIT.get(key[-1], "/") in there}


def quarantined_names(keys: Iterable[str]) -> set[str]:
    """Return the keys of packs that notes among these keys put into quarantine."""
    return {pack_key(match[1]) for match in map(_QUARANTINE_KEY.fullmatch, keys) if match}


def lost_names(keys: Iterable[str]) -> set[str]:
    """Return the ids of snapshots that notes among these keys mark as lost."""
    return {match[1] for match in map(_LOST_KEY.fullmatch, keys) if match}


def notes_of_gc(keys: Iterable[str], kind: Literal["mark", "wait", "done"]) -> list[str]:
    """Return which of these keys are a gc's notes of one kind. Other programs' files may lie beside them."""
    return [key for key in keys if (match := _NOTE_OF_GC.fullmatch(key)) and match[1] == kind]


def is_note(key: str) -> bool:
    """Return whether a key below `gc/` is that of a note: of a gc, of quarantine or of a lost snapshot."""
    return any(form.fullmatch(key) for form in (_NOTE_OF_GC, _QUARANTINE_KEY, _LOST_KEY))


def sha256_names(joined: bytes) -> list[str]:
    """Return the hex names of concatenated raw SHA-256 values, 32 bytes each."""
    text = joined.hex()
    return [text[i : i + 64] for i in range(0, len(text), 64)]
