"""The verbs stats, du, estimate and report: what takes the space, what a run costs, and a page about it."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import InvalidInputError
from ..text import counted, human_bytes
from .app import PARTIAL, Place, Shell, UsageError, verb
from .output import line, note, note_left_out, spinner, table

if TYPE_CHECKING:
    from ..engine.rates import Rates
    from ..inspect.estimate import Estimate, Run
    from ..inspect.report_page import RunReport
    from ..inspect.stats import StatsResult
    from ..inspect.usage import UsageResult

#: The names of the given rates, in the order of `Rates`.
_RATES = ("write", "read", "encode", "decode", "copy")


@verb("snapstore stats --json")
def stats(shell: Shell) -> int | None:
    """Count snapshots, chunks, and bytes by group and codec.

    Exit code 3: some records are unreadable or gone, and their snapshots are not counted.
    """
    with shell.repository() as repository, spinner("counting"):
        found = repository.stats()
    shell.show({**asdict(found), "ratio": found.ratio}, _print_stats, found)
    return PARTIAL if note_left_out(found.unknown) else None


def _print_stats(found: StatsResult) -> None:
    frees = f"{human_bytes(found.unneeded_bytes)}; 'snapstore gc' frees them"
    facts = {
        "snapshots": found.snapshots,
        "state": human_bytes(found.logical_bytes),
        "stored": f"{human_bytes(found.stored_bytes)} in {counted(found.packs, 'pack')} and all manifests",
        "ratio": f"{found.ratio:.2f}x",
        "chunks": f"{found.chunks}, {found.unique_chunks} of them different",
        "bases": f"{human_bytes(found.base_only_bytes)} needed only as the base of a delta",
        "unneeded": "not known: some records are unreadable or gone" if found.unknown else frees,
    }
    for name, value in facts.items():
        line(f"{name:<9} {value}")
    if found.groups:
        line()
        rows = [[name, human_bytes(g.logical_bytes), human_bytes(g.stored_bytes)] for name, g in found.groups.items()]
        table(["group", ">logical", ">stored"], rows)
    if found.codecs:
        line()
        table(["codec", ">stored"], [[name, human_bytes(size)] for name, size in found.codecs.items()])
    if found.depths:
        line()
        table([">depth", ">chunks"], found.depths.items())


@verb("snapstore du exp")
def du(
    shell: Shell,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="This run alone, snapshot by snapshot.")] = None,
    by: Annotated[str, typer.Option(metavar="WHAT", help="run, snapshot, part or tensor.")] = "",
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", help="Only the N largest; 0: all.")] = 0,
) -> int | None:
    """Show what takes the space, and what would be freed if one run or snapshot alone were forgotten.

    "unshared" is what nothing else needs; "freed" of it is in files that gc deletes whole: compact frees the rest.
    """
    with shell.repository() as repository, spinner("counting"):
        found = repository.du(cast(Any, by or ("snapshot" if run else "run")), run=run)
    if limit > 0:
        found = replace(found, rows=sorted(found.rows, key=lambda row: -row.stored_bytes)[:limit])
    shell.show(asdict(found), _print_usage, found)
    return PARTIAL if note_left_out(found.unknown) else None


def _print_usage(found: UsageResult) -> None:
    table(found.columns, found.cells)
    line(f"{human_bytes(found.stored_bytes)} stored; 'snapstore gc' frees {human_bytes(found.unneeded_bytes)} now")


@verb("snapstore estimate --params 7e9 --ranks 8 --step-time 2")
def estimate(
    shell: Shell,
    params: Annotated[str, typer.Option("--params", metavar="N", help="Parameters, such as 7e9, 350M or 7B.")],
    place: Place = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, or bfloat16 with fp32 masters.")] = "bfloat16",
    optimizer: Annotated[str, typer.Option(help="adamw, momentum, sgd or none.")] = "adamw",
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks of the job; each writes its share.")] = 1,
    step_time: Annotated[float, typer.Option(metavar="S", help="Seconds per step.")] = 1.0,
    interval: Annotated[int, typer.Option(metavar="STEPS", help="Between two snapshots; default: the best.")] = 0,
    mtbf: Annotated[float, typer.Option(metavar="HOURS", help="Between job failures; default: 50,677 / ranks.")] = 0.0,
    restart: Annotated[float, typer.Option(metavar="S", help="Seconds from a failure to the restore.")] = 300.0,
    keep: Annotated[int, typer.Option(metavar="N", help="Snapshots that stay; 0: all.")] = 3,
    codec: Annotated[str, typer.Option(help="portable, raw or auto.")] = "portable",
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="NAME=RATE", help="write, read, encode, decode or copy, such as encode=8G."),
    ] = None,
    storage_price: Annotated[float, typer.Option(metavar="USD", help="Price of a GB per month.")] = 0.023,
    put_price: Annotated[float, typer.Option(metavar="USD", help="Price of a thousand PUTs.")] = 0.005,
) -> None:
    """Estimate bytes, stall, money and the best interval of a run, before it starts.

    Measures this machine and the place (--repo), for two seconds, unless all rates are given.
    """
    from ..inspect import estimate as planning

    given = _given(rates or [])
    if place is None and shell.url is None and not {"write", "read"} <= given.keys():
        raise UsageError("name a place to measure (a URL or --repo), or pass --rate write=... and --rate read=...")
    run = planning.Run(
        parameters=_count(params),
        dtype=dtype,
        optimizer=optimizer,
        ranks=ranks,
        step_s=step_time,
        interval_steps=interval,
        failure_s=3600 * mtbf,
        restart_s=restart,
        keep=keep,
        codec=codec,
    )
    with spinner("measuring"):
        found = _measured(given, shell.chosen(place))
    result = planning.estimate(run, found, storage_price=storage_price, put_price=put_price)
    document = {"run": asdict(run), "rates": asdict(found), "given": sorted(given), "estimate": asdict(result)}
    shell.show(document, _print, run, found, given, result)


@verb("snapstore report exp -o run.html")
def report(
    shell: Shell,
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; default: all.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = "",
    values: Annotated[bool, typer.Option("--values", help="Also read the values of at most 50 steps.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    storage_price: Annotated[float, typer.Option(metavar="USD", help="Price of a GB per month.")] = 0.023,
    put_price: Annotated[float, typer.Option(metavar="USD", help="Price of a thousand PUTs.")] = 0.005,
) -> int | None:
    """Write a page about runs: lineage, bytes, stalls, metrics, what changed, cost. It needs no network.

    Needs the extra "report". Exit code 3: the page lacks steps or records that cannot be read.
    """
    from ..convert.files import check_new, publish

    if not output:
        raise UsageError("no output named; pass -o run.html")
    path = Path(output)
    check_new(path, force=force)
    with shell.repository() as repository, spinner("reading"):
        prices = {"storage_price": storage_price, "put_price": put_price}
        found = repository.report(runs or [], values=values, **prices)
        page = found.html.encode()
        publish(path, lambda temp: temp.write_bytes(page), force=force)
    document = {key: value for key, value in asdict(found).items() if key != "html"}
    shell.show({"output": output, "bytes": len(page), **document}, _print_report, output, len(page), found)
    for ref, why in found.unread.items():
        note(f"snapstore: warning: {ref} could not be read: {why}")
    return PARTIAL if note_left_out(found.unknown) or found.unread else None


def _print_report(output: str, nbytes: int, found: RunReport) -> None:
    of = f"{counted(found.snapshots, 'snapshot')} of {counted(len(found.runs), 'run')}"
    line(f"wrote {output}, {human_bytes(nbytes)}: {of}")
    sampled = f"{counted(found.sampled, 'step')} sampled: {counted(found.manifests, 'manifest')}"
    line(f"{sampled}, {counted(found.packs, 'list')} of blobs, {human_bytes(found.read_bytes)} read")


def _measured(given: dict[str, float], url: str | None) -> Rates:
    """Return the given rates; measure the others."""
    from ..engine.rates import Rates, measure
    from ..storage.urls import open_store

    if given.keys() == set(_RATES):
        return Rates(**given)
    needs_store = not {"write", "read"} <= given.keys()
    return replace(measure(open_store(url) if url is not None and needs_store else None), **given)


def _given(texts: list[str]) -> dict[str, float]:
    """Parse texts of the form NAME=RATE; return the rates by name [bytes/s].

    Raises:
        UsageError: a text has another form.
    """
    from ..chunks.limits import parse_size

    found: dict[str, float] = {}
    for text in texts:
        name, _, rate = text.partition("=")
        try:
            number = float(parse_size(rate))
        except InvalidInputError:
            number = 0.0
        if name not in _RATES or number <= 0:
            raise UsageError(f"--rate {text!r}: expected one of {', '.join(_RATES)} and bytes per second, as encode=8G")
        found[name] = number
    return found


def _count(text: str) -> float:
    """Parse a number of parameters, such as 7e9, 350M or 7B.

    Raises:
        UsageError: it is not such a number.
    """
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        number = math.nan
    if not number > 0:
        raise UsageError(f"--params {text!r}: expected a number such as 7e9, 350M or 7B")
    return number


def _print(run: Run, rates: Rates, given: dict[str, float], found: Estimate) -> None:
    shown = [
        f"{name} {human_bytes(int(rate))}/s{'' if name in given else ' (measured)'}"
        for name, rate in asdict(rates).items()
    ]
    every_s = found.interval_steps * run.step_s

    def size(nbytes: float) -> str:
        return human_bytes(int(nbytes))

    line(f"rates of one rank: {', '.join(shown)}")
    line(f"state:     {size(found.state_bytes)}, {size(found.state_bytes / run.ranks)} a rank")
    line(f"stored:    {size(found.first_bytes)} the first, {size(found.next_bytes)} each later one")
    line(f"codec:     {found.codec}; auto would choose {found.auto_codec}")
    line(f"failures:  one in {_time(found.failure_s)}; best interval {_time(found.best_interval_s)}")
    every = counted(found.interval_steps, "step")
    line(f"interval:  {every}, {_time(every_s)}: {100 * found.lost_share:.2f} % of the time lost")
    line(f"a save:    stall {_time(found.stall_s)}, committed after {_time(found.save_s)}")
    line(f"a restore: {_time(found.restore_s)}")
    kept = f"{size(found.kept_bytes)} with {run.keep or 'all'} kept"
    money = f"{found.storage_usd:,.2f} USD of storage, {found.puts_usd:,.2f} USD of PUTs"
    line(f"a year:    {size(found.year_bytes)} if all stay; {kept}: {money}")


def _time(seconds: float) -> str:
    """Return a duration as text, in a unit that suits it."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s"
