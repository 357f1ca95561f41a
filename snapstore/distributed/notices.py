"""Notices: a file, a URL or a function says that this machine is about to be taken away.

In: where to look. Out: one call of `tell`. A daemon thread looks every POLL_S; nobody waits for it. So a file system or
a server that hangs stalls neither the loop, nor the heartbeats, nor `close`, nor the end of the process. Each look has
a thread of its own, because nothing ends a call that hangs: after ANSWER_S the next look begins. A late answer counts.

Invariant: what cannot be read is no notice, and never ends a job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy

from ..errors import InvalidInputError
from ..text import log, quoted
from ..threads import no_threads

if TYPE_CHECKING:
    import urllib.request

#: Where a notice appears: a path, an http(s) URL, a Request with headers, or a function that returns a bool.
Notice = Union[str, Path, "urllib.request.Request", Callable[[], bool]]

#: The pause between two looks, and how long one is waited for before the next may begin [s].
POLL_S, ANSWER_S = 2.0, 2.0
#: So many looks may hang at the same time; then no new one begins before one of them ends.
MOST_HUNG = 4
#: No more is read of an answer [bytes].
BODY_BYTES = 64 * 1024
#: Bodies that say that nothing is to come, in upper case.
NOTHING = (b"", b"FALSE", b"NONE")
#: Azure lists its events here. The list is never empty text, so a plain look would end every job at its first step.
AZURE = "/metadata/scheduledevents"


class NoticePoller:
    """Looks for a notice in the background until it comes, or until it is closed.

    Args:
        notice: where to look.
        tell: called once, in another thread, when the notice has come.

    Raises:
        InvalidInputError: `notice` is none of these.
        CapabilityError: no thread can be started.
    """

    def __init__(self, notice: Notice, tell: Callable[[], object]) -> None:
        self._look, self._where = _look_of(notice)
        self._tell, self._has_come, self._has_warned = tell, False, False
        self._closed = threading.Event()
        try:
            threading.Thread(target=self._run, name="snapstore-notice", daemon=True).start()
        except RuntimeError as error:
            raise no_threads() from error

    def close(self) -> None:
        """Look no more. It waits for nothing."""
        self._closed.set()

    def _run(self) -> None:
        hung: list[threading.Thread] = []
        while not self._closed.is_set():
            hung = [thread for thread in hung if thread.is_alive()]
            if not self._has_come and len(hung) < MOST_HUNG:
                look = threading.Thread(target=self._look_once, name="snapstore-notice-look", daemon=True)
                try:
                    look.start()
                except RuntimeError as error:  # out of threads, or the interpreter ends
                    self._warn(str(error))
                else:
                    look.join(ANSWER_S)
                    hung.append(look)
                    if look.is_alive():
                        self._warn(f"no answer within {ANSWER_S:.6g} s")
            if self._has_come and not self._closed.is_set():
                log.warning("the notice %s has come", self._where)
                self._tell()
                return
            self._closed.wait(POLL_S)

    def _look_once(self) -> None:
        try:
            if self._look():
                self._has_come = True
        except BaseException as error:  # noqa: BLE001  a function of the user may raise anything: that is no notice
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        """Log once that the notice cannot be read."""
        if not self._has_warned and not self._closed.is_set():
            self._has_warned = True
            log.warning(
                "the notice %s cannot be read, so it does not end this job; the next look is in %.6g s; more failures "
                "are not logged: %s",
                self._where,
                POLL_S,
                why[:500],
            )


def _look_of(notice: Any) -> tuple[Callable[[], bool], str]:
    """Return the function that looks for a notice, and its name in the log, which has no secrets of a URL."""
    if isinstance(notice, str | os.PathLike) and not _is_url(os.fspath(notice)):
        path = os.fspath(notice)
        if not isinstance(path, str) or not path or "\0" in path or "://" in path:
            raise InvalidInputError(
                f"notice {quoted(notice)}: expected a path, an http(s) URL, a Request or a function"
            )
        file = Path(path).expanduser().absolute()
        return partial(_is_there, file), f"of the file {file}"
    import urllib.request

    if isinstance(notice, str):
        try:
            notice = urllib.request.Request(notice)
        except ValueError as error:
            raise InvalidInputError(f"notice {quoted(notice)}: {error}") from error
    if isinstance(notice, urllib.request.Request):
        return _look_at(notice)
    if callable(notice):
        return partial(_answer, notice), f"of {getattr(notice, '__qualname__', type(notice).__name__)}()"
    raise InvalidInputError(
        f"notice {quoted(notice)}: expected a path, an http(s) URL, a urllib.request.Request or a function that "
        f"returns a bool, got {type(notice).__name__}"
    )


def _is_url(text: str | bytes) -> bool:
    return isinstance(text, str) and text.lower().startswith(("http://", "https://"))


def _is_there(file: Path) -> bool:
    """Return whether a file or folder is there; an OSError says that nobody can know."""
    try:
        file.stat()
    except FileNotFoundError:
        file.parent.stat()  # a folder that is missing is rather a wrong path, or not mounted
        return False
    return True


def _answer(ask: Callable[[], Any]) -> bool:
    """Return what a function of the user says. Another type, such as a coroutine, is a mistake and no notice."""
    found = ask()
    if not isinstance(found, bool | numpy.bool_):
        raise TypeError(f"it returned {quoted(found)}: expected a bool, got {type(found).__name__}")
    return bool(found)


def _look_at(request: urllib.request.Request) -> tuple[Callable[[], bool], str]:
    """Return the function that asks a server, without proxies and redirects, and the URL without its secrets."""
    import encodings.idna  # noqa: F401  socket.getaddrinfo imports it; see threads.py
    import urllib.error
    import urllib.request as web

    if not _is_url(request.full_url) or not request.host:
        raise InvalidInputError(
            f"notice {quoted(request.full_url)}: expected a URL that begins with http:// or https://"
        )
    if "@" in request.host:
        raise InvalidInputError(
            "notice: expected a URL without a password, which the log would show; pass a urllib.request.Request with "
            "an Authorization header"
        )
    if AZURE in request.full_url.lower():
        raise InvalidInputError(
            f"notice {quoted(request.full_url)}: Azure answers with a list of events, which is a text also if no event "
            "is to come; pass a function that looks for your event in it: docs/guides/recipes.md has one"
        )
    opener = web.OpenerDirector()
    for handler in (web.HTTPHandler(), web.HTTPSHandler(), web.HTTPDefaultErrorHandler(), web.HTTPErrorProcessor()):
        opener.add_handler(handler)

    def look() -> bool:
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                if answer.status != 200:
                    raise OSError(f"HTTP status {answer.status}: expected 200, or 404 for no notice")
                body = answer.read(BODY_BYTES)
                if len(body) < BODY_BYTES and answer.length:  # a part of FALSE is not FALSE
                    raise OSError(f"the answer ends {answer.length} bytes early")
                return body.strip().upper() not in NOTHING
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return False
            raise OSError(f"HTTP status {error.code}: expected 200, or 404 for no notice") from None

    return look, f"of {request.type}://{request.host}{request.selector.partition('?')[0]}"
