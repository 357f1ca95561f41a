"""The parts that all verbs share: the typer app, options that may stand before or after the verb, errors, exit codes.

A verb is a function of a `Shell` and its own options, registered by `@verb(example)`. It prints its data to stdout and
returns its exit code (None: 0). It raises errors; a traceback reaches the user only with -v.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer
from typer.core import TyperGroup

from ..errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutputError,
    SnapstoreError,
    UnknownFormatError,
)
from ..text import printable
from . import completers
from .output import discard_stdout, note, print_json, spinner, writing

if TYPE_CHECKING:
    from ..repository import Repository

P = ParamSpec("P")

OK, ERROR, USAGE, PARTIAL, NO_REPOSITORY, BUSY, CORRUPT, INTERRUPTED = 0, 1, 2, 3, 10, 11, 20, 130

Repo = Annotated[str | None, typer.Option("--repo", metavar="URL", help="The repository; default: SNAPSTORE_REPO.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print more on stderr, and tracebacks.")]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Print what would be done; change nothing.")]
Place = Annotated[str | None, typer.Argument(metavar="[URL]", help="The place; default: --repo or SNAPSTORE_REPO.")]
#: References, as `--help` explains them.
FORMS = "run@step, run@latest, run@highest, run@best, run@best:METRIC[:max], run@tag or an id"
Ref = Annotated[str, typer.Argument(metavar="REF", help=f"{FORMS}.")]
PerRank = Annotated[
    str | None,
    typer.Option("--per-rank", metavar="N|drop", help="Only rank N's own values, or none; default: all ranks'."),
]

#: In the order of `--help`.
VERBS = (
    "init",
    "save",
    "log",
    "show",
    "diff",
    "blame",
    "restore",
    "import",
    "export",
    "tag",
    "untag",
    "forget",
    "unforget",
    "gc",
    "check",
    "repair",
    "compact",
    "recode",
    "copy",
    "stats",
    "du",
    "estimate",
    "report",
    "index",
    "doctor",
    "completion",
    "demo",
)


@contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """Escape control characters in click's messages, which repeat arguments; a closed pipe is no error."""
    try:
        yield
    except BrokenPipeError as error:  # of a help text: the reader of stdout has closed it
        discard_stdout()
        raise typer.Exit(OK) from error
    except OSError as error:  # of a help text: the disk is full
        discard_stdout()
        note(f"snapstore: error: stdout: cannot be written: {error.strerror}")
        raise typer.Exit(ERROR) from error
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = printable(error.message)
        raise


class _Verbs(TyperGroup):
    """Lists the verbs in the order of VERBS, and prints no argument unescaped."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return sorted(super().list_commands(ctx), key=VERBS.index)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> Any:
        """Parse the arguments before the verb."""
        if not args:  # click raises the help as an error, which repeats no argument
            return super().make_context(info_name, args, *more, **options)
        with _printable_usage_errors():
            return super().make_context(info_name, args, *more, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of the verb, and run it."""
        with _printable_usage_errors():
            return super().invoke(ctx)


commands = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich help costs 50 ms
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class UsageError(SnapstoreError):
    """The command line is invalid."""


class _NoRepositoryError(Exception):
    """There is no repository at the URL; the cause of this error is the store's error."""


@dataclass(frozen=True)
class Shell:
    """The options that stand before or after every verb."""

    url: str | None
    as_json: bool
    verbose: bool

    @contextmanager
    def repository(self, *, damaged: bool = False, create: bool = False) -> Iterator[Repository]:
        """Open the repository, and close it at the end of the block.

        Args:
            damaged: open it even if its config is damaged.
            create: make it if there is none.
        """
        from ..repository import Repository

        url = self.need_url()
        try:
            with spinner(f"opening {url}"):
                opened = Repository.open(url, damaged=damaged)
        except NotFoundError as error:
            if not create:
                raise _NoRepositoryError from error
            opened = Repository.open_or_create(self.need_url())
            note(f"created a repository at {opened.url}")
        with opened as repository:
            yield repository

    def show(self, document: dict[str, Any], text: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Print the result of a verb: with --json the document, else call `text`, which prints lines."""
        if self.as_json:
            print_json(document)
        else:
            text(*args, **kwargs)

    def chosen(self, given: str | None) -> str | None:
        """Return the URL that a verb was given, or else the one of the shell; None: neither names one."""
        return self.url if given is None else given

    def need_url(self, given: str | None = None) -> str:
        """Return the URL of the repository.

        Raises:
            UsageError: none is named.
        """
        if url := self.chosen(given):
            return url
        raise UsageError("no repository named; pass --repo URL or set SNAPSTORE_REPO")


def size_of(text: str, option: str) -> int:
    """Parse a size such as `10G` into bytes; K, M, G, T and P are powers of 1024.

    Raises:
        UsageError: it is not a size; the error names the option.
    """
    from ..chunks.limits import parse_size

    try:
        return parse_size(text)
    except InvalidInputError as error:
        raise UsageError(f"{option} {error}") from error


def per_rank_of(text: str | None) -> Literal["drop"] | int | None:
    """Return the `per_rank` of a restore that `--per-rank` asks for.

    Raises:
        UsageError: the text is neither the number of a rank nor `drop`.
    """
    if text is None or text == "drop":
        return None if text is None else "drop"
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UsageError(f"--per-rank {text!r}: expected the number of a rank, or drop")
    return int(text)


def _version(wanted: bool) -> None:
    if wanted:
        from ..engine.spans import engine_in_use
        from ..format.records import VERSION

        try:
            engine = engine_in_use()
        except SnapstoreError as error:
            engine = f"none: {error}"
        typer.echo(f"snapstore {VERSION} (CPU engine: {engine})")
        raise typer.Exit


@commands.callback()
def _before_the_verb(
    ctx: typer.Context,
    repo: Annotated[
        str | None, typer.Option("--repo", metavar="URL", envvar="SNAPSTORE_REPO", help="The repository.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep the history of training state: snapshots, deltas, retention.

    Example: snapstore log exp --repo /data/snapshots

    Every verb takes --repo, --json and -v as well. Exit codes: 0 ok, 1 error, 2 usage, 3 partial, 10 no repository,
    11 busy, 20 corruption found, 130 interrupted.
    """
    ctx.obj = Shell(repo, as_json, verbose)


def verb(example: str, **settings: Any) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a function as the verb with its name, without a trailing `_`.

    Args:
        example: a command line, for its `--help`.
        settings: for `Typer.command`.
    """

    def register(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, repo: str | None, as_json: bool, verbose: bool, **arguments: Any) -> None:
            before: Shell = ctx.obj
            shell = Shell(before.chosen(repo), as_json or before.as_json, verbose or before.verbose)
            code = _run(functools.partial(function, shell, **arguments), shell)
            if code:
                raise typer.Exit(code)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        for parameter in own:
            about = parameter.annotation.__metadata__[-1]
            about.autocompletion = completers.BY_METAVAR.get(about.metavar)
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            inspect.Parameter("repo", keyword, annotation=Repo, default=None),
            inspect.Parameter("as_json", keyword, annotation=Json, default=False),
            inspect.Parameter("verbose", keyword, annotation=Verbose, default=False),
        ]
        parameters = [parameter.replace(kind=keyword) for parameter in own] + shared
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        epilog = f"\b\nExample:\n  {example}"  # \b: typer wraps no line of this paragraph
        commands.command(function.__name__.rstrip("_"), epilog=epilog, **settings)(run)
        return run

    return register


class _ToStderr(logging.Handler):
    """Writes log lines to `sys.stderr`, which it looks up for each line, because the spinner replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"snapstore: {record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    log, handler = logging.getLogger("snapstore"), _ToStderr()
    level = log.level
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _run(function: Callable[[], int | None], shell: Shell) -> int:
    """Run a verb; return its exit code, or that of its error."""
    try:
        with _logging(shell.verbose):
            code = function()
            with writing():
                sys.stdout.flush()
            return code or OK
    except KeyboardInterrupt:
        note("snapstore: interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last line of defence: no traceback for users
        if shell.verbose:
            note(*_traceback_of(error))
        code, kind, message = _explain(error)
        note(*f"snapstore: error: {message}".split("\n"))
        if shell.as_json:
            with suppress(OutputError):  # it may be this error
                print_json({"error": {"kind": kind, "message": message}})
        return code


def _traceback_of(error: BaseException) -> list[str]:
    """Return the lines of a traceback; the message of an error that is not ours is escaped into one line."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = [*_traceback_of(cause), "", "This was the cause of the following error:", ""] if cause else []
    frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    message = str(error) if isinstance(error, SnapstoreError) else printable(str(error))
    return [
        *before,
        "Traceback (most recent call last):",
        *frames,
        *f"{type(error).__qualname__}: {message}".split("\n"),
    ]


def _explain(error: Exception) -> tuple[int, str, str]:
    """Return (exit code, kind, message) of an error; only errors of ours have messages of several lines."""
    if isinstance(error, _NoRepositoryError):
        return NO_REPOSITORY, "NoRepositoryError", str(error.__cause__)
    if isinstance(error, UsageError):
        return USAGE, "UsageError", str(error)
    if isinstance(error, ConflictError):
        code = BUSY
    elif isinstance(error, FormatError | IntegrityError) and not isinstance(error, UnknownFormatError):
        code = CORRUPT
    else:
        code = ERROR
    if isinstance(error, SnapstoreError):
        return code, type(error).__name__, str(error)
    if isinstance(error, OSError):
        return code, type(error).__name__, printable(str(error))
    if isinstance(error, MemoryError):
        return code, "MemoryError", "out of memory; restore less at a time with --keys, or use a larger machine"
    return (
        code,
        type(error).__name__,
        printable(f"{type(error).__name__}: {error}; this is a bug, -v shows the traceback"),
    )
