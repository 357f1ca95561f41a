"""The write path of one save: session -> bases -> packs and manifests (writer.py) -> the record -> the index.

In: a state's parts, already safe to read. Out: a committed Snapshot, or an exception and none. The order is the
protocol's: everything a record needs is durable before it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from ..context import Context
from ..format.manifest import Manifest
from ..format.records import SaveRequest, Snapshot
from ..protocol.session import Session
from ..state.arrays import Memory
from ..state.flatten import Part
from ..text import human_bytes
from . import writer
from .bases import Bases
from .staging import Staging
from .writer import Plan, Written

log = logging.getLogger("snapstore")


def save(
    context: Context, request: SaveRequest, parts: Sequence[Part], plan: Plan, *,
    staging: Staging, copies: list[list[Memory]] | None, at_hand: Mapping[str, Manifest], started: float,
    stall_s: float | None = None,
) -> tuple[Snapshot, dict[str, Manifest]]:  # fmt: skip
    """Store a state and commit it.

    Args:
        parts: what `state.flatten` gave.
        staging: holds the plain bytes of the prior snapshot, and afterwards those of this one.
        copies: per part and tensor its bytes, copied by `staging.copy`; None: the caller waits, read the state itself.
        at_hand: manifests in memory by SHA-256.
        started: when the caller began [s, time.monotonic].
        stall_s: how long the caller waited; None: until now.

    Returns:
        The snapshot, and its manifests by SHA-256.
    """
    staging.landed()
    with Session(context, request.run, request.step, parent=request.parent, also=request.bases) as session:
        bases = writer.load_bases(context.store, session, at_hand, plan.chunk_bytes, context.engines.digest_seed)
        try:
            written = _write(context, session, parts, copies, bases, staging, plan)
        except writer.BaseDamagedError as damage:
            log.warning("run=%s step=%d a base is damaged, saving in full: %s", request.run, request.step, damage)
            session.used_bases, bases = [], Bases()
            written = _write(context, session, parts, copies, bases, staging, plan)
        if plan.verify == "full":
            session.confirm(written.sizes)
        total_s = time.monotonic() - started
        snapshot = session.commit(
            manifests=written.manifests, tags=request.tags, metrics=request.metrics,
            metadata_node=request.metadata_node, created=time.time(), generation=bases.generation,
            depth=written.depth, chunks=written.chunks, new_chunks=written.new_chunks,
            logical_bytes=written.logical_bytes, stored_bytes=written.stored_bytes,
            stall_s=total_s if stall_s is None else stall_s, total_s=total_s,
        )  # fmt: skip
    staging.commit(snapshot.id, parts, written.unpaid, copied=copies is not None)
    context.index.add(snapshot, written.headers)
    log.info(
        "run=%s step=%d logical=%s stored=%s new=%d/%d chunks stall=%.0fms total=%.2fs", snapshot.run, snapshot.step,
        human_bytes(snapshot.logical_bytes), human_bytes(snapshot.stored_bytes), snapshot.new_chunks,
        snapshot.chunks, 1000 * snapshot.stall_s, snapshot.total_s,
    )  # fmt: skip
    return snapshot, {ref.sha256: m for ref, m in zip(written.manifests, written.in_memory, strict=True)}


def _write(
    context: Context, session: Session, parts: Sequence[Part], copies: list[list[Memory]] | None,
    bases: Bases, staging: Staging, plan: Plan,
) -> Written:  # fmt: skip
    """Packs and manifests, from the copies or from the state itself."""
    plain = staging.base(bases.snapshot.id if bases.snapshot else None, parts)
    plan = dataclasses.replace(plan, no_delta=staging.no_delta(parts))
    if copies is not None:
        return writer.write(context, session, parts, lambda p, t: copies[p][t], bases, plain, plan)
    keep = staging.overwrite(parts)
    return writer.write(
        context, session, parts, lambda p, t: parts[p].arrays[t].memory(context.engines.memory_of), bases, plain, plan,
        on_run=keep, confirm=lambda p, t: parts[p].arrays[t].confirm(),
    )  # fmt: skip
