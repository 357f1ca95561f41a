"""keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


_QUARANTINE_KEY = re.compile(r"gc/([0-9a-f]{64})(?:\.[0-9a-f]{32})?\.quarantine")


_LOST_KEY = re.compile(r"gc/([0-9a-f]{32})\.lost")


_RECORD_KEY = re.compile(rf"snapshots/({NAME.pattern})/(\d{{12}})-([0-9a-f]{{32}})\.(0|[1-9]\d{{0,8}})")


def pack_key(sha256: str) -> str:
    """Key of a pack."""
    return f"packs/{sha256[:2]}/{sha256}"


def manifest_key(sha256: str) -> str:
    """Key of a manifest."""
    return f"manifests/{sha256[:2]}/{sha256}"


def record_key(run: str, step: int, snapshot_id: str, revision: int) -> str:
    """Key of a revision of a record."""
    return f"snapshots/{run}/{step:012d}-{snapshot_id}.{revision}"


def parse_record_key(key: str) -> tuple[str, int, str, int] | None:
    """(run, step, id, revision) of a record's key, None for any other key."""
    match = _RECORD_KEY.fullmatch(key)
    return (match[1], int(match[2]), match[3], int(match[4])) if match else None


def quarantined_names(keys: Iterable[str]) -> set[str]:
    """Keys of the packs that the notes among these keys keep in quarantine."""
    return {pack_key(match[1]) for match in map(_QUARANTINE_KEY.fullmatch, keys) if match}


def lost_names(keys: Iterable[str]) -> set[str]:
    """Ids of the snapshots that the notes among these keys call lost."""
    return {match[1] for match in map(_LOST_KEY.fullmatch, keys) if match}


def sha256_names(joined: bytes) -> list[str]:
    """The hex names in a run of raw 32-byte SHA-256 values."""
    text = joined.hex()
    return [text[i : i + 64] for i in range(0, len(text), 64)]
