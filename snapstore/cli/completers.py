"""Complete the last word of a command line: the runs, references, tags and metrics of the repository that it names.

In: the words before it, as typer has parsed them. Out: names that begin with it. typer speaks the protocols of the
shells. A key press must not wait, print or change anything: a completion opens a repository that is there, reads its
records, and gives up without a word after COMPLETE_WITHIN_S.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..catalog.history import View
    from ..format.records import Snapshot

#: A shell sets this variable to ask for completions.
VARIABLE = "_SNAPSTORE_COMPLETE"
#: A store that does not answer is given up after this time [s].
COMPLETE_WITHIN_S = 3.0
#: Metrics may have any names, so a script quotes what a shell would expand: no key press, and no finished line, may run
#: the `$(...)` in a name. bash splits words at `@`, `:` and `=`, and wants only what follows; but an `@` belongs to it.
BASH = r"""
_snapstore_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word plain cut reply
    word="${line##*[^\\][[:space:]]}"
    plain="${word//\\?/__}"
    cut="${plain%"${plain##*["${COMP_WORDBREAKS//[[:space:]]/}"]}"}"
    cut="${word:0:${#cut}}"
    cut="${cut%@}"
    COMPREPLY=()
    while IFS='' read -r reply; do
        if [[ $word == [\"\']* ]]; then
            [[ $reply == *[\!\"\$\'\\\`]* ]] && continue
        elif [[ $reply == *[[:space:]\!\"\#\$\&\'\(\)\*\;\<\>\?\[\\\^\`\{\|\}\~]* ]]; then
            printf -v reply %q "$reply"
        fi
        [[ -n $reply ]] && COMPREPLY+=("${reply#"$cut"}")
    done < <(COMP_LINE="$line" _SNAPSTORE_COMPLETE=complete_bash "$1" 2>/dev/null)
}
complete -o default -o nosort -F _snapstore_completion snapstore
"""
#: typer's own script evaluates the names. Each line of the form for fish is a name, a tab and its help.
ZSH = r"""
#compdef snapstore
_snapstore_completion() {
    local line name help
    local -a names
    while IFS='' read -r line; do
        name="${line%%$'\t'*}" help="${line#"$name"}"
        name="${${name//\\/\\\\}//:/\\:}"
        [[ -n $name ]] && names+=("$name${help/$'\t'/:}")
    done < <(_TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _TYPER_COMPLETE_FISH_ACTION=get-args \
        _SNAPSTORE_COMPLETE=complete_fish snapstore 2>/dev/null)
    if (( $#names )); then _describe snapstore names; else _files; fi
}
compdef _snapstore_completion snapstore
"""


def begin() -> None:
    """Prepare a process that a shell has started to ask for completions."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # its module is private

    completion_init()
    if os.environ[VARIABLE] == "complete_bash":  # typer wants the line, and the number of the word to complete
        line = os.environ.get("COMP_LINE", "")
        begins_word = line[-1:].isspace() and not line[:-1].endswith("\\")
        number = _count_words(line) - (not begins_word)
        os.environ.update(COMP_WORDS=line, COMP_CWORD=str(number))
    logging.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    timer = threading.Timer(COMPLETE_WITHIN_S, os._exit, [0])
    timer.daemon = True
    with suppress(RuntimeError):  # the process may start no thread
        timer.start()


def _count_words(line: str) -> int:
    """Return the number of words of a line, whose last word may be in quotes that are not closed yet."""
    for quote in ("", '"', "'"):
        with suppress(ValueError):
            return len(shlex.split(line + quote))
    return 0


def script(shell: str) -> str:
    """Return what a shell has to run once, to complete the arguments of `snapstore`: bash, zsh or fish."""
    if shell in ("bash", "zsh"):
        return (BASH if shell == "bash" else ZSH).strip()
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # its module is private

    return str(get_completion_script(prog_name="snapstore", complete_var=VARIABLE, shell=shell))


def _view(ctx: typer.Context) -> View | None:
    """Return the records of the repository that the line names, or the environment; None: there are none."""
    contexts = (ctx, ctx.find_root())
    url = next((context.params["repo"] for context in contexts if context.params.get("repo")), None)
    try:
        from ..repository import Repository

        with Repository.open(url or os.environ["SNAPSTORE_REPO"]) as repository:
            return repository.view()
    except Exception:  # noqa: BLE001 - there is nobody to tell
        return None


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin so."""
    view = _view(ctx)
    return [] if view is None else [run for run in view.runs() if run.startswith(incomplete)]


def references(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the references that begin so: of the only run that fits, else only the beginnings of the names."""
    view = _view(ctx)
    if view is None:
        return []
    states = ("forgotten",) if ctx.info_name == "unforget" else ("committed",)
    name, at, _ = incomplete.partition("@")
    fitting = [run for run in view.runs(states) if run == name or (not at and run.startswith(name))]
    found = [f"{run}@" for run in fitting] if len(fitting) != 1 else _of(view, fitting[0], states)
    return [reference for reference in found if reference.startswith(incomplete)]


def _of(view: View, run: str, states: tuple[str, ...]) -> list[str]:
    """Return the references of a run: words, tags, and steps, the newest first."""
    snapshots = view.snapshots(run, states)[::-1]
    names = dict.fromkeys(str(s.step) for s in snapshots)
    if "committed" in states:
        tags = sorted({tag for s in snapshots for tag in s.tags})
        best = (
            f"best:{metric}{':min' if metric.endswith((':min', ':max')) else ''}" for metric in _metrics_of(snapshots)
        )
        words = ["latest", "highest", *best]
        names = dict.fromkeys([*tags, *words, *names])
    return [f"{run}@{name}" for name in names]


def tags(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the tags that begin so: of the snapshot that `untag` names, or of its run."""
    view, ref = _view(ctx), ctx.params.get("ref") or ""
    if view is None:
        return []
    run = ref.partition("@")[0]
    snapshots = view.snapshots(run)
    if ctx.info_name == "untag":
        try:
            snapshots = [view.resolve(ref)]
        except Exception:  # noqa: BLE001 - an incomplete reference
            return []
    return sorted({tag for s in snapshots for tag in s.tags if tag.startswith(incomplete)})


def metrics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the metrics that begin so; of a list such as `loss,l`, the last of them."""
    view = _view(ctx)
    before, comma, last = incomplete.rpartition(",")
    names = _metrics_of(view.snapshots()) if view else []
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def _metrics_of(snapshots: Iterable[Snapshot]) -> list[str]:
    """Return the metrics that some snapshot has, without names that a terminal cannot show."""
    return sorted({name for s in snapshots for name in s.metrics if name.isprintable()})


#: The names of options and arguments in `--help`, and what completes them.
BY_METAVAR = {
    **dict.fromkeys(("REF", "[REF]...", "REF|RUN", "A", "B"), references),
    **dict.fromkeys(("R", "[RUN]"), runs),
    **dict.fromkeys(("METRIC", "NAME,...", "METRIC[:N[:min|max]]"), metrics),
    "TAG": tags,
}
