"""Exchange: a chunk that several ranks of one node need is read once, by one of them, which sends it to the others.

In: the arrays that each rank wants, and the ranks of its node. Out: filled memory, to the bit as if each rank had read
by itself. A shared chunk has one reader, one of the ranks that need it; chunks with equal digests count as one. The
reader checks the digest. It sends only the wanted bytes of the chunk. `pipeline.load` reads a chunk that only one rank
needs.

All ranks of a node compute the same plan from the same lists, so they call the same collectives. They work in rounds:
what a rank reads, sends and receives in one, and reads ahead for the next, is at most ROUND_BYTES. Before each
collective the ranks tell each other by messages that they have reached it. So a rank that fails is noticed, and no rank
waits for it in a collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..arrays import Bytes, Column
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..distributed.base import Ranks
from ..distributed.joint_call import JointCall
from ..distributed.messages import Ready, decode, encode
from ..errors import RanksError
from ..protocol.liveness import boot_id, host_name
from ..state.fill.buffers import RestoreBuffers, Want
from ..state.values.arrays import Memory
from ..threads import msgpack_decoder
from .overlaps import Overlap, Shape
from .pipeline import load

if TYPE_CHECKING:
    from ..distributed.node_group import NodeGroup

#: A rank holds at most so much together: what it decodes, sends and receives in a round, and what it decodes meanwhile
#: for the next round, at most a quarter; one run of chunks may be more [bytes].
ROUND_BYTES = 256 * 1024 * 1024
#: A rank reads at most so much of neighbouring chunks before the turn of another rank [plain bytes].
RUN_BYTES = 8 * 1024 * 1024
#: The runs are so short that a round has at least so many for each rank of a set: so all of them read.
RUNS_A_ROUND = 4


class Exchange:
    """The exchanges of one manager with the other ranks of its node, one after the other.

    Call sequence, the same on all ranks: for each restore `call`, and in it `load`; at the end `close`.

    Args:
        ends: see `JointCall`.
    """

    def __init__(self, ranks: Ranks, ends: str) -> None:
        self._ranks, self._ends = ranks, ends
        self._group: NodeGroup | None = None
        self._old_group: NodeGroup | None = None  # of a call that failed; other ranks may still be in it
        self._call = self._last = JointCall(ranks, "", "", ends)

    @contextmanager
    def call(self, prefix: str) -> Iterator[None]:
        """Return the context of a restore: an error in it is raised on all ranks. Raises as `JointCall` does.

        Args:
            prefix: of the keys of this call alone.
        """
        self._last = self._call
        what = "all ranks to restore with read='exchange'"
        with JointCall(self._ranks, prefix, what, self._ends) as self._call:
            yield

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell the other ranks of an error inside before anything else is done about it."""
        try:
            yield
        except BaseException as error:
            self._call.fail(error)
            raise

    def close(self) -> None:
        """Destroy the process groups. It may be called twice."""
        groups, self._group, self._old_group = (self._group, self._old_group), None, None
        for group in filter(None, groups):
            group.close()

    @property
    def has_begun(self) -> bool:
        """Return whether the ranks already exchange, so this rank cannot begin again by itself."""
        return self._call.has_begun

    @property
    def has_heard(self) -> bool:
        """Return whether another rank has failed."""
        return self._call.heard is not None

    def load(
        self,
        context: Context,
        wants: Sequence[Want],
        overlaps: Mapping[Want, Sequence[Overlap]],
        target: RestoreBuffers,
    ) -> None:
        """Read the wanted arrays; see `pipeline.load`, which raises the same.

        Raises:
            RanksError: a rank does not answer or does not restore, or a collective failed.
            SnapstoreError: the error of another rank.
        """
        mine = Needed(wants, overlaps)
        needs = mine.encoded()
        group = self._agreed_group()
        if len(group.ranks) == 1:
            load(context, wants, overlaps, target)
            return
        try:
            every = group.gather(needs, lambda: self._call.step(group.ranks))
            plan = Plan([decode_needs(data) for data in every], group.place)
            rounds = _Rounds(context, group, self._call, mine, plan, target)
            rounds.run()
        except BaseException:
            self._group, self._old_group = None, group  # in the middle of a collective? the next restore makes another
            raise
        left, rest = mine.rest(plan.is_shared[plan.of_rank(group.place)], rounds.completed)
        load(context, left, rest, target)

    def _agreed_group(self) -> NodeGroup:
        """Return the group of this node's ranks, when all ranks of the job have called this.

        If a rank has no group, all ranks make new ones.

        Raises:
            InvalidInputError, CapabilityError: this job cannot exchange.
        """
        from ..distributed.node_group import NodeGroup, require_whole_job

        require_whole_job(self._ranks)
        ready = Ready(boot_id() or host_name(), self._group is not None)
        decided = self._call.agree("ready", encode(ready), _nodes_of)
        nodes = decode(decided, list[list[int]])
        self._ranks.remove(self._last.posted)  # all ranks have left the last call
        if nodes or self._group is None:
            self.close()  # if other ranks have lost their group, this one may have kept its own
            self._group = NodeGroup(nodes, self._ranks.silent_s)
        return self._group


def _nodes_of(said: Sequence[bytes]) -> bytes:
    """Return the ranks of each node if a rank has no group yet, else an empty list; encoded."""
    ready = [decode(one, Ready) for one in said]
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(ready):
        nodes.setdefault(one.node, []).append(rank)
    return encode([] if all(one.has_group for one in ready) else [*nodes.values()])


class Needs(msgspec.Struct, array_like=True):
    """The needs of one rank: one row for each chunk of each overlap, as columns.

    Attributes:
        shapes: of the overlaps.
        counts: how many rows each has.
        digests, starts, lengths: of each chunk: its digest (16 bytes, as two int64), where it begins in the stored box,
            and its plain length [bytes].
        stored: how many bytes must be read for it.
        nbytes: how many of its bytes are wanted.
    """

    shapes: list[Shape]
    counts: Any
    digests: Any
    starts: Any
    lengths: Any
    stored: Any
    nbytes: Any


def decode_needs(data: bytes) -> Needs:
    """Return the needs that another rank has encoded; the columns are (n,) int64."""
    raw = msgpack_decoder(Needs).decode(data)
    columns = {name: np.frombuffer(getattr(raw, name), np.int64) for name in Needs.__struct_fields__[1:]}
    return msgspec.structs.replace(raw, **columns)


class Needed:
    """The needs of this rank, with their manifests and wants.

    Attributes:
        overlaps: the overlaps with chunks, in the order of the wants.
        wants: the want of each of these overlaps.
        counts: (n,) the number of rows of each.
        number: the overlap of each row.
        rows: the chunk of each row, as a row of its manifest's table.
        inline: by want, the overlaps without chunks.
    """

    def __init__(self, wants: Sequence[Want], overlaps: Mapping[Want, Sequence[Overlap]]) -> None:
        pairs = [(want, overlap) for want in wants for overlap in overlaps[want]]
        self._all = wants
        self.inline = {want: [overlap for overlap in overlaps[want] if not overlap.stored.chunks] for want in wants}
        self.wants = [want for want, overlap in pairs if overlap.stored.chunks]
        self.overlaps = [overlap for _, overlap in pairs if overlap.stored.chunks]
        self.counts = np.array([len(overlap.rows) for overlap in self.overlaps], np.int64)
        self.number = np.repeat(np.arange(len(self.overlaps)), self.counts)
        self.rows = _joined([overlap.rows for overlap in self.overlaps])

    def encoded(self) -> bytes:
        """Return the needs as bytes, for the other ranks of the node."""
        found = self.overlaps
        digests = [np.ascontiguousarray(o.stored.m.table.digests[o.rows]).view(np.int64).ravel() for o in found]
        columns = {
            "counts": self.counts,
            "digests": _joined(digests),
            "starts": _joined([o.starts for o in found]),
            "lengths": _joined([o.lengths for o in found]),
            "stored": _joined([o.stored.m.table.chain_bytes_of(o.rows) for o in found]),
            "nbytes": _joined([o.shape.nbytes_in(o.starts, o.lengths) for o in found]),
        }
        return msgspec.msgpack.encode(
            Needs([o.shape for o in found], **{name: column.tobytes() for name, column in columns.items()})
        )

    def rest(self, is_shared: Bytes, completed: set[Want]) -> tuple[list[Want], dict[Want, list[Overlap]]]:
        """Return the wants that are not complete, and their overlaps without the shared chunks.

        Args:
            is_shared: of each row of this rank.
        """
        found = {want: list(inline) for want, inline in self.inline.items() if want not in completed}
        ends = np.cumsum(self.counts)
        for want, overlap, end in zip(self.wants, self.overlaps, ends.tolist(), strict=True):
            own = ~is_shared[end - len(overlap.rows) : end]
            if own.any():
                found[want].append(replace(overlap, rows=overlap.rows[own], starts=overlap.starts[own]))
        return [want for want in self._all if want in found], found


class Plan:
    """Which rank reads which chunk, in which round. All ranks of a node compute the same.

    A row is a chunk of an overlap of a rank; rows of all ranks are joined, in the order of the ranks.

    Args:
        needs: of each rank of the node.
        place: of this rank among them.

    Attributes:
        rank, chunk, start, length, nbytes: (n,) of each row: who needs it, the number of its chunk, and as in `Needs`.
        shape: (n,) of each row, the position in `shapes`.
        is_shared: (n,) whether several ranks need the chunk.
        reader, round, order: (c,) of each shared chunk: the rank that reads it, in which round, and its place in the
            order of reading; -1 for other chunks.
        rounds: how many there are.
    """

    def __init__(self, needs: Sequence[Needs], place: int) -> None:
        self.place, self.count = place, len(needs)
        self.shapes = [shape for one in needs for shape in one.shapes]
        self.shape = np.repeat(np.arange(len(self.shapes)), _joined([one.counts for one in needs]))
        self.rank = np.repeat(np.arange(self.count), [len(one.starts) for one in needs])
        self.start, self.length = _joined([n.starts for n in needs]), _joined([n.lengths for n in needs])
        self.nbytes = _joined([one.nbytes for one in needs])
        digests = _joined([one.digests for one in needs]).reshape(-1, 2)
        _, first, self.chunk = np.unique(digests.view("V16").ravel(), return_index=True, return_inverse=True)
        self._first = first
        is_needed = np.zeros((len(first), self.count), bool)
        is_needed[self.chunk, self.rank] = True
        self.is_shared = (is_needed.sum(axis=1) > 1)[self.chunk]
        self._wanted = np.zeros((len(first), self.count), np.int64)  # bytes of each chunk that each rank wants
        np.add.at(self._wanted, (self.chunk, self.rank), self.nbytes)
        self.reader, self.round, self.order = (np.full(len(first), -1) for _ in range(3))
        self.rounds = self._assign(is_needed, _joined([one.stored for one in needs])[first])

    def of_rank(self, rank: int) -> Column:
        """Return the rows of a rank."""
        return np.flatnonzero(self.rank == rank)

    def _assign(self, is_needed: Bytes, stored: Column) -> int:
        """Give each run of shared chunks to the rank, among its needers, that reads least; return the rounds."""
        load, used, read = (np.zeros(self.count, np.int64) for _ in range(3))
        number, done, ahead = 0, 0, ROUND_BYTES // 4
        for who, chunks in self._runs(is_needed):
            reader = who[np.argmin(load[who])]
            load[reader] += stored[chunks].sum()
            moved, length = self._wanted[chunks].sum(axis=0), self.length[self._first[chunks]].sum()
            moved[reader] = moved.sum() - moved[reader] + length
            is_full = (used + moved).max() > ROUND_BYTES - ahead or read[reader] + length > ahead
            if used.any() and is_full:
                number, used, read = number + 1, np.zeros_like(used), np.zeros_like(read)
            used = used + moved
            read[reader] += length
            self.reader[chunks], self.round[chunks] = reader, number
            self.order[chunks] = np.arange(done, done + len(chunks))
            done += len(chunks)
        return number + 1 if done else 0

    def _runs(self, is_needed: Bytes) -> list[tuple[Column, Column]]:
        """Return (ranks that need them, chunks) of runs of shared chunks; the runs of all sets of ranks alternate."""
        found = []
        sets, which = np.unique(is_needed, axis=0, return_inverse=True)
        for number, members in enumerate(sets):
            who = np.flatnonzero(members)
            if len(who) < 2:
                continue
            chunks = np.flatnonzero(which.ravel() == number)
            chunks = chunks[np.argsort(self._first[chunks])]  # in the order in which one of the ranks wants them
            ends = np.cumsum(self.length[self._first[chunks]])
            most = min(RUN_BYTES, ROUND_BYTES // (RUNS_A_ROUND * len(who)), int(ends[-1]) // (RUNS_A_ROUND * len(who)))
            run = (ends - self.length[self._first[chunks]]) // max(most, 1)
            cuts = np.flatnonzero(np.diff(run)) + 1
            found += [
                (int(begin), number, who, part)
                for begin, part in zip(ends[[0, *cuts]], np.split(chunks, cuts), strict=True)
            ]
        return [(who, part) for _, _, who, part in sorted(found, key=lambda one: one[:2])]

    def sends(self, number: int) -> list[Column]:
        """Return, for each rank of the node, its rows that this rank reads in a round, in the order of reading."""
        return [self._rows(number, self.place, rank) for rank in range(self.count)]

    def receives(self, number: int) -> list[Column]:
        """Return, for each rank of the node, this rank's rows that it reads in a round, in the order of reading."""
        return [self._rows(number, rank, self.place) for rank in range(self.count)]

    def _rows(self, number: int, reader: int, rank: int) -> Column:
        return self._by_pair.get((number, reader, rank), _NO_ROWS)

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int, int], Column]:
        """Return the rows that this rank sends or receives by (round, reader, rank), in the order of the chunks."""
        reader, turn = self.reader[self.chunk], self.round[self.chunk]
        rows = np.flatnonzero(self.is_shared & ((self.rank == self.place) | (reader == self.place)))
        rows = rows[np.lexsort((rows, self.order[self.chunk[rows]], self.rank[rows], reader[rows], turn[rows]))]
        keys = np.stack([turn[rows], reader[rows], self.rank[rows]], axis=1)
        cuts = np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1
        groups = np.split(rows, cuts) if len(rows) else []
        return {tuple(keys[at].tolist()): group for at, group in zip([0, *cuts], groups, strict=False)}


_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Read:
    """Chunks that this rank has read in a round.

    Attributes:
        memory: the bytes of all of them.
        at: where each chunk begins in `memory` [bytes], by the number of the chunk.
    """

    memory: Memory
    at: dict[int, int]


class _Rounds:
    """The rounds of one exchange on one rank.

    Attributes:
        completed: the wants that are filled completely.
    """

    def __init__(
        self,
        context: Context,
        group: NodeGroup,
        call: JointCall,
        mine: Needed,
        plan: Plan,
        target: RestoreBuffers,
    ) -> None:
        self._context, self._group, self._call = context, group, call
        self._mine, self._plan, self._target = mine, plan, target
        self._first = int(plan.of_rank(group.place)[0]) if len(mine.rows) else 0  # the first row of this rank
        self.completed: set[Want] = set()
        self._left: dict[Want, int] = dict.fromkeys(mine.wants, 0)  # rows that are not in place
        for want, count in zip(mine.wants, mine.counts.tolist(), strict=True):
            self._left[want] += count

    def run(self) -> None:
        """Read, exchange and place all shared chunks."""
        with closing(self._reads()) as reads:
            for number in range(self._plan.rounds):
                self._exchange(number, next(reads))

    def _reads(self) -> Generator[_Read]:
        """Yield the chunks that this rank reads in each round; they are read ahead."""
        counts = [len(self._chunks(number)) for number in range(self._plan.rounds)]
        begun: deque[_Read] = deque()
        nothing = _Read(np.empty(0, np.uint8), {})

        def wanted() -> Iterator[Wanted]:
            for number in range(self._plan.rounds):
                if counts[number]:
                    yield from self._wanted(self._chunks(number), begun)

        with closing(ChunkReader(self._context).rebuild(wanted())) as arriving:
            arrived = 0
            for count in counts:
                while arrived < count:
                    arrived += next(arriving)
                arrived -= count
                yield begun.popleft() if count else nothing

    def _chunks(self, number: int) -> Column:
        """Return a row of this rank for each chunk that it reads in a round."""
        rows = self._plan.sends(number)[self._group.place]
        return rows[np.sort(np.unique(self._plan.chunk[rows], return_index=True)[1])]

    def _wanted(self, rows: Column, begun: deque[_Read]) -> Iterator[Wanted]:
        """Yield chunks to be read into new memory; neighbours of one manifest are read together."""
        plan, mine = self._plan, self._mine
        ends = np.cumsum(plan.length[rows])
        starts = ends - plan.length[rows]
        memory = self._empty(int(ends[-1]))
        begun.append(_Read(memory, dict(zip(plan.chunk[rows].tolist(), starts.tolist(), strict=True))))
        own = rows - self._first
        manifests = [mine.overlaps[number].stored.m for number in mine.number[own].tolist()]
        first = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or manifests[end] is not manifests[first]:
                m = manifests[first]
                yield Wanted(m.table, m.header.pack_names, mine.rows[own[first:end]], memory, starts[first:end])
                first = end

    def _empty(self, nbytes: int) -> Memory:
        engines, device = self._context.engines, self._group.device
        return (engines.on(device) if engines.on_device(device) else engines.cpu).empty(nbytes)

    def _exchange(self, number: int, read: _Read) -> None:
        """Send the chunks that this rank has read to the ranks that need them; put its own needs in place."""
        plan, place = self._plan, self._group.place
        sends, receives = plan.sends(number), plan.receives(number)
        own, sends[place], receives[place] = receives[place], _NO_ROWS, _NO_ROWS
        sizes, back = ([int(plan.nbytes[rows].sum()) for rows in one] for one in (sends, receives))
        sent = self._empty(sum(sizes))
        at = 0
        for row in np.concatenate(sends).tolist():
            end, chunk = at + int(plan.nbytes[row]), _reached(self._chunk(read, row), sent)
            plan.shapes[plan.shape[row]].take(sent[at:end], chunk, int(plan.start[row]))
            at = end
        swap = self._group.swap(sent, sizes, back)
        self._call.step(self._group.ranks)
        try:
            received = swap()
        except RanksError as error:
            raise self._call.blame(error, self._group.ranks) from error
        for row in own.tolist():
            self._place(row, self._chunk(read, row), is_piece=False)
        rows = np.concatenate(receives)
        for row, end in zip(rows.tolist(), np.cumsum(plan.nbytes[rows]).tolist(), strict=True):
            self._place(row, received[end - int(plan.nbytes[row]) : end], is_piece=True)

    def _chunk(self, read: _Read, row: int) -> Memory:
        at = read.at[int(self._plan.chunk[row])]
        return read.memory[at : at + int(self._plan.length[row])]

    def _place(self, row: int, data: Memory, *, is_piece: bool) -> None:
        """Put a chunk, or the piece of it that is wanted, in place."""
        number = int(self._mine.number[row - self._first])
        want, overlap, first = self._mine.wants[number], self._mine.overlaps[number], int(self._plan.start[row])
        home = self._target.buffer(want)
        data = _reached(data, home)
        if is_piece:
            overlap.put_piece(home, data, first, first + int(self._plan.length[row]))
        else:
            overlap.put_span(home, data, first)
        self._left[want] -= 1
        if not self._left[want] and not self._mine.inline[want]:
            self._target.complete(want)
            self.completed.add(want)


def _reached(data: Memory, memory: Memory) -> Memory:
    """Return bytes from where they can be copied into `memory`: for host memory, a host copy of device memory."""
    if isinstance(memory, np.ndarray) and not isinstance(data, np.ndarray):
        return data.cpu().numpy()
    return data


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns).astype(np.int64, copy=False) if columns else np.empty(0, np.int64)
