"""TorchRanks: the ranks of a torch.distributed job, over a TCPStore of its own.

In: a process group. Out: a `Ranks`. Rank 0 starts the server in its process: one for each attempt of the job, so keys
need not name the attempt. The ranks meet by polling the job's own store. No collective is called, then or later, so a
rank that does not come causes an error, not a hang.

`check`, `get` and `set` of a TCPStore never time out while its server's process is stopped (torch 2.13). So each client
has a thread that makes its calls, and each call is waited for at most `silent_s`, or ANSWER_S while the ranks meet. A
blocking call on the job's store would delay the training's calls on it, so only calls that do not block are made there.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch.distributed
from torch._C._distributed_c10d import TCPStore

from ..errors import CapabilityError, InvalidInputError, RanksError, SnapstoreError
from ..format.records import new_id
from ..text import log, quoted
from ..threads import Threads, msgpack_decoder
from .base import ENDED_PROCESSES, LINGER_S, ChannelError, ClosedError, named
from .process_ends import EndsListener, Tie
from .split_values import SplitValues

T = TypeVar("T")
#: It is an error if a rank has not come within this time [s].
COME_S = 60.0
#: Rank 0 names the ranks that are missing; the others wait so much longer for its message [s].
WORD_S = 15.0
CONNECT_S = 10.0
#: The longest wait for a server's answer while the ranks meet and connect [s].
ANSWER_S = 60.0
POLL_S = 0.02
#: A rank that closes waits at least so long for an answer to its last message, and for a call that runs to return [s].
END_S = 0.5
#: Longer times, such as infinity, count as this: three years, within what Python and torch take [s].
MAX_WAIT_S = 1e8
#: The word of a rank that has come, and has given up.
GIVEN_UP = b""


class _Rendezvous(msgspec.Struct, frozen=True):
    """Rank 0 asks who has come, and then answers: where its server listens, or which ranks have not come.

    Attributes:
        attempt: identifies this call of rank 0; "": rank 0 has not come.
        calls: by rank, the call that this answers; empty: rank 0 only asks.
        ends_port: of the `EndsListener`; 0: there is none.
    """

    hosts: list[str] = []
    port: int = 0
    attempt: str = ""
    missing: list[int] = []
    calls: dict[int, str] = {}
    ends_port: int = 0


class TorchRanks:
    """The ranks of a process group that save together. All of them make one, at the same place of the program.

    See `Ranks`.

    Args:
        group: the ranks that save together; None: all ranks of the job.
        silent_s: a rank without a heartbeat for so long counts as dead [s].
        total_s: the longest wait for messages of living ranks, such as their reports of a save [s].

    Raises:
        InvalidInputError: torch.distributed is not initialised, the group is none of the job, or lacks this rank, or a
            time is not positive.
        RanksError: ranks have not come within 60 s; the error names them. Or rank 0 cannot be reached.
    """

    def __init__(self, group: Any = None, *, silent_s: float = 600.0, total_s: float = 3600.0) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise InvalidInputError("TorchRanks: torch.distributed is not initialised; call init_process_group first")
        for name, value in (("silent_s", silent_s), ("total_s", total_s)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidInputError(f"{name} {quoted(value)}: expected a number of seconds above 0")
        try:
            self.rank, self.count = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(
                f"TorchRanks: group {quoted(group)}: expected a process group of this job"
            ) from error
        if self.rank < 0:
            raise InvalidInputError("TorchRanks: this rank is not in the given group; make one only on its ranks")
        self.silent_s, self.total_s = (float(min(value, MAX_WAIT_S)) for value in (silent_s, total_s))
        self.is_hosted = self.rank == 0
        ranks = torch.distributed.get_process_group_ranks(group)
        self.job_ranks: Sequence[int] | None = None if group is None else tuple(ranks)
        self._pid, self._closed = os.getpid(), False
        self._server: TCPStore | None = None
        self._listener: EndsListener | None = None
        self._tie: Tie | None = None
        self._heard: dict[int, tuple[bytes, float]] = {}  # each rank's count of heartbeats, and when it changed [s]
        self._heard_lock = threading.Lock()
        self._beat_count = 0
        try:
            place = self._meet(group)
            self.attempt = place.attempt
            self._messages, self._beats = self._client(place), self._client(place)
            self._values = SplitValues(lambda: self._open(self._messages))
            if self._listener is not None:
                self._listener.start()
            if self.rank and place.ends_port:
                self._tie = Tie(self._host, place.ends_port, place.attempt, self.rank)
            self.beat()
        except BaseException:
            self._close_ties()
            raise

    def __repr__(self) -> str:
        return f"TorchRanks(rank={self.rank}, count={self.count}, attempt={self.attempt[:8]!r})"

    # -- the ranks meet

    def _meet(self, group: Any) -> _Rendezvous:
        """Return where rank 0's server is, once all ranks have called this.

        Raises:
            RanksError: some have not.
        """
        store, prefix = _store_of(group)
        came, where = [f"{prefix}/came/{rank}" for rank in range(self.count)], f"{prefix}/place"
        with closing(_Client(partial(_cloned, store), ANSWER_S, *_host_of_store(group), self.rank)) as client:
            if self.rank == 0:
                place = self._gather(client, came, where, group)
            else:
                place = self._find(client, came, where)
        if place.missing:
            raise RanksError(
                f"{named(place.missing)} of {self.count}: did not come within {COME_S:.0f} s; make the SnapshotManager "
                "(or TorchRanks) on every rank, or with ranks=False on the one that saves alone",
                ranks=place.missing,
            )
        return place

    def _gather(self, client: _Client, came: Sequence[str], where: str, group: Any) -> _Rendezvous:
        """Tell the others where rank 0's server is, once all have come, or which ranks have not; return the same."""
        place = self._start_server(group)
        client.set(where, msgspec.msgpack.encode(place))
        client.set(came[0], _came(place.attempt, place.attempt))

        def calls() -> dict[int, str] | None:
            found = _calls(client.look_all(came) or (), place.attempt)
            return found if len(found) == self.count else None

        found = _polled(calls, COME_S)
        if found is None:
            found = _calls([client.look(key) for key in came], place.attempt)
        missing = [rank for rank in range(self.count) if rank not in found]
        place = msgspec.structs.replace(place, missing=missing, calls=found)
        client.set(where, msgspec.msgpack.encode(place))
        return place

    def _find(self, client: _Client, came: Sequence[str], where: str) -> _Rendezvous:
        """Return rank 0's answer to this call; if there is none, a place with the missing ranks."""
        call, seen = new_id(), list[str]()

        def look() -> _Rendezvous | None:
            data = client.look(where)
            place = msgpack_decoder(_Rendezvous).decode(data) if data is not None else _Rendezvous()
            if place.calls.get(self.rank) == call:
                return place
            if place.attempt not in seen[-1:]:
                client.set(came[self.rank], _came(place.attempt, call))
                seen.append(place.attempt)
            return None

        if (place := _polled(look, COME_S + WORD_S)) is not None:
            return place
        client.set(came[self.rank], GIVEN_UP)
        words = [client.look(key) for key in came]
        found = _calls(words, seen[-1])
        if len(seen) == 1:  # rank 0 has not called since
            found.pop(0, None)
        absent = [rank for rank, word in enumerate(words) if rank not in found and word != GIVEN_UP]
        return _Rendezvous(missing=absent or [0])

    def _start_server(self, group: Any) -> _Rendezvous:
        self._server = _tcp_store("localhost", 0, is_master=True)
        attempt = new_id()
        self._server.set("attempt", attempt)
        is_first = torch.distributed.get_rank() == 0
        try:
            self._listener = EndsListener(attempt, self.count, self._tell_ends)
        except OSError as error:
            log.warning("rank 0 cannot open a port (%s): it notices killed ranks only by missing heartbeats", error)
        ends_port = self._listener.port if self._listener is not None else 0
        return _Rendezvous(_own_hosts(is_first), self._server.port, attempt, ends_port=ends_port)

    def _tell_ends(self, ranks: Collection[int]) -> None:
        """Tell all ranks which processes have ended, given those whose connection is closed."""
        ended = [rank for rank in ranks if self.look(f"closed/{rank}") is None]
        self._open(self._messages).set(ENDED_PROCESSES, " ".join(map(str, ended)).encode())

    def _client(self, place: _Rendezvous) -> _Client:
        return _Client(partial(self._connect, place), self.silent_s, f"rank 0 of {self.count}", [0], self.rank)

    def _connect(self, place: _Rendezvous) -> TCPStore:
        """Return a connection to rank 0's server, by the first of its host names that works."""
        failures = []
        for host in ["localhost"] if self.rank == 0 else place.hosts:
            try:
                client = _tcp_store(host, place.port, is_master=False)
                if client.get("attempt").decode() == place.attempt:
                    self._host = host
                    return client
                failures.append(f"{host}: another server")
            except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
                failures.append(f"{host}: {str(error).splitlines()[0][:200]}")
        raise RanksError(
            f"rank {self.rank} cannot reach rank 0's server on port {place.port}: {'; '.join(failures)}", ranks=[0]
        )

    # -- messages

    def post(self, key: str, value: bytes) -> None:
        """Set a key, unless it is set; see `Ranks`."""
        self._values.post(key, value)

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, or None; see `Ranks`."""
        return self._values.whole(self._open(self._messages).look(key))

    def look_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of many keys, or None; see `Ranks`."""
        if not keys:
            return []
        found = self._open(self._messages).look_all(keys)
        values = [whole for value in found or () if (whole := self._values.whole(value)) is not None]
        return values if len(values) == len(keys) else None

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys; see `Ranks`."""
        names = self._values.all_keys(keys)
        self._open(self._messages).call(lambda store: [store.delete_key(name) for name in names])

    def beat(self) -> None:
        """Send a heartbeat: tell the other ranks that this one is alive."""
        self._beat_count += 1
        self._open(self._beats).set(f"beats/{self.rank}", str(self._beat_count).encode())
        if self._tie is not None:
            self._tie.renew()

    def silences(self, ranks: Collection[int]) -> list[float]:
        """Return for each of some ranks the time since its last heartbeat [s]; see `Ranks`.

        Heartbeats are counted, so no clock of another host is used. The first call for a rank returns 0.
        """
        found = self.look_all([f"beats/{rank}" for rank in ranks])
        if found is None:  # a rank has come, and has died before its first heartbeat
            found = [self.look(f"beats/{rank}") or b"0" for rank in ranks]
        now = time.monotonic()
        with self._heard_lock:
            for rank, beats in zip(ranks, found, strict=True):
                if self._heard.get(rank, (b"", now))[0] != beats:
                    self._heard[rank] = beats, now
            return [now - self._heard[rank][1] for rank in ranks]

    def _open(self, client: _Client) -> _Client:
        if os.getpid() != self._pid:
            raise InvalidInputError("these ranks were made before a fork; a child process is not a rank of the job")
        if self._closed:
            raise ClosedError("these ranks are closed")
        return client

    def close(self, limit_s: float = LINGER_S) -> None:
        """End the channel. Rank 0 waits up to `limit_s` for the others: its server ends with it.

        A server that does not answer is waited for no longer.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._messages.limit(max(END_S, limit_s))
        with suppress(SnapstoreError):
            self.post(f"closed/{self.rank}", b"1")
            if self.rank == 0:
                keys = [f"closed/{rank}" for rank in range(self.count)]
                _polled(lambda: self.look_all(keys), min(limit_s, self.silent_s))
        self._closed = True
        self._messages.close()
        self._beats.close()
        self._close_ties()
        self._server = None

    def _close_ties(self) -> None:
        for end in (self._tie, self._listener):
            if end is not None:
                end.close()


class _Client:
    """A connection to a server, and the thread that calls it.

    Args:
        connect: makes the connection, in the thread.
        limit_s: the longest wait for an answer [s].
        server, ranks: who keeps the values: for errors, and as `RanksError.ranks`.
        rank: of this process, in errors.

    All methods but `close` raise:
        ChannelError: the server does not answer, or has ended, or the connection is broken; then it is not asked again.
        RanksError: `connect` has raised it.
        CapabilityError: the thread cannot be started.
    """

    def __init__(
        self, connect: Callable[[], Any], limit_s: float, server: str, ranks: Sequence[int], rank: int
    ) -> None:
        self._server, self._ranks, self._rank = server, ranks, rank
        self._limit_s, self._threads, self._is_stuck = min(limit_s, ANSWER_S), Threads(1), False
        self._broken = ""  # why the connection is; torch prints a trace at each call of it
        self._store: Any = None
        try:
            self._store = self.call(lambda _: connect())
        except BaseException:
            self.close()
            raise
        self._limit_s = limit_s

    def call(self, call: Callable[[Any], T]) -> T:
        """Return the result of `call`, which gets the connection."""
        if self._is_stuck:
            raise ChannelError.of(f"{self._server}: does not answer any more", self._ranks)
        if self._broken:
            raise ChannelError.of(self._broken, self._ranks)
        pending = self._threads.start(call, [self._store])
        try:
            if pending.ready(self._limit_s):
                return pending()[0]
        except RanksError:
            raise
        except Exception as error:  # torch raises RuntimeError and others
            why = str(error).partition("\n")[0][:200]
            text = f"{self._server}: has ended, or rank {self._rank} cannot reach it any more ({why})"
            if isinstance(error, torch.distributed.DistNetworkError):
                self._broken = text
            raise ChannelError.of(text, self._ranks) from error
        self._is_stuck = True
        raise ChannelError.of(
            f"{self._server}: has not answered for {self._limit_s:.6g} s, its process or host is stopped", self._ranks
        )

    def set(self, key: str, value: bytes) -> None:
        """Set a key, also if it has a value."""
        self.call(lambda store: store.set(key, value))

    def look(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
        return self.call(lambda store: store.get(key) if store.check([key]) else None)

    def look_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of many keys; None unless all have one."""
        names = list(keys)
        return self.call(lambda store: store.multi_get(names) if store.check(names) else None)

    def limit(self, limit_s: float) -> None:
        """Wait at most so long for each answer from now on [s]."""
        self._limit_s = min(self._limit_s, limit_s)

    def close(self) -> None:
        """End the thread, unless a call in it does not return."""
        if not self._is_stuck:
            with suppress(CapabilityError):  # the thread has never run
                self._is_stuck = not self._threads.start(lambda _: None, [None]).ready(END_S)
        if not self._is_stuck:
            self._threads.close()
            self._store = None


def _tcp_store(host: str, port: int, *, is_master: bool) -> TCPStore:
    timeout = timedelta(seconds=CONNECT_S)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _came(attempt: str, call: str) -> bytes:
    """Return the word of a rank that has come, and has seen an `attempt` of rank 0; "": none."""
    return f"{attempt} {call}".encode()


def _calls(came: Sequence[bytes | None], attempt: str) -> dict[int, str]:
    """Return by rank the calls of the ranks that have come, and have seen an attempt of rank 0.

    Args:
        came: the word of each rank. It may be of a call that was interrupted, or of a killed process: torchrun keeps
            the job's store when it starts the processes again.
    """
    said = {rank: data.decode().partition(" ") for rank, data in enumerate(came) if data}
    return {rank: call for rank, (seen, _, call) in said.items() if seen == attempt}


def _store_of(group: Any) -> tuple[Any, str]:
    """Return the job's store, and a prefix of the keys by which the ranks of a group meet.

    Rank 0 asks with a random name, the others repeat it beside a name of their own, and rank 0's answer repeats these.
    So no call takes a word of an earlier one, whichever processes have left it in the store.
    """
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    ranks = torch.distributed.get_process_group_ranks(group)
    return store, f"snapstore/{'all' if group is None else _name_of(ranks)}"


def _name_of(ranks: Sequence[int]) -> str:
    """Return a short name of some ranks of the job; no other ranks have the same one."""
    name = "-".join(map(str, ranks))
    return name if len(name) <= 64 else f"{ranks[0]}-to-{ranks[-1]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _cloned(store: Any) -> Any:
    """Return a separate client of a store, if it can make one: a call of the training may block the store itself."""
    with suppress(Exception):
        return store.clone()
    return store


def _host_of_store(group: Any) -> tuple[str, list[int]]:
    """Return who keeps the job's store, for errors, and the ranks of a group among these."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the job's store, which torchrun keeps on the first node", []
    ranks = torch.distributed.get_process_group_ranks(group)
    return "rank 0 of the job, which keeps its store", [ranks.index(0)] if 0 in ranks else []


def _polled(look: Callable[[], T | None], limit_s: float) -> T | None:
    """Return the first result of `look` that is not None; None if the time is over."""
    end = time.monotonic() + limit_s
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    return found


def _own_hosts(is_first: bool) -> list[str]:
    """Return the names under which other hosts may reach this one, the most likely first.

    Args:
        is_first: whether this is rank 0 of the job, which the others have reached as MASTER_ADDR.
    """
    master = os.environ.get("MASTER_ADDR", "")
    hosts = [master] if is_first and master else []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master or "192.0.2.1", 9))  # sends nothing; the address is for documentation (RFC 5737)
        hosts.append(probe.getsockname()[0])
    hosts += [socket.getfqdn(), socket.gethostname(), "localhost"]
    return list(dict.fromkeys(hosts))
