"""Shows what snapstore does on a real training run: kill, resume, restore, fork, forget, collect.

Every claim is checked. It takes under three minutes on two cores. It ends with a line for each check, and with exit
code 1 if one of them failed.
"""

import argparse
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import caller
from rich import box
from rich.console import Console
from rich.table import Table
from train_gpt import digests

from snapstore import KeepEvery, KeepLast, Repository
from snapstore.storage.base import ObjectInfo, ObjectStore
from snapstore.storage.urls import open_store

STEPS, FORK_STEPS, SAVE_EVERY, KEEP_EVERY = 60, 50, 10, 30
KILL_FROM = 40  # the trainer is killed while it saves this step, or a later one
OLD_STEP, FORK_STEP = 20, 30
CELL = 12.2  # width of a character in the picture [px], at rich's font size of 20
TRAINER = Path(__file__).with_name("train_gpt.py")

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Proofs:
    """The claims, and whether each of them held."""

    lines: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, held: bool, claim: str) -> None:
        """Prints and remembers one claim."""
        self.lines.append((held, claim))
        console.print("  " + self.line(held, claim))

    def line(self, held: bool, claim: str) -> str:
        """PASS or FAIL, and the claim."""
        return f"{'[bold green]PASS[/]' if held else '[bold red]FAIL[/]'} {claim}"


@dataclass(frozen=True)
class Demo:
    """The places of the demo, and helpers of all its chapters."""

    folder: Path
    url: str  # the repository
    proofs: Proofs
    store: ObjectStore  # the same objects, seen from outside

    def file(self, name: str) -> Path:
        """A file beside the repository."""
        return self.folder / name

    @contextmanager
    def trainer(self, name: str, *options: object) -> Iterator[subprocess.Popen[bytes]]:
        """A trainer process that leaves NAME.losses and NAME.log; nothing of it is left running."""
        command = [sys.executable, TRAINER, "--save-every", SAVE_EVERY, *options]
        command += ["--losses", self.file(f"{name}.losses")]
        with self.file(f"{name}.log").open("ab") as log:
            process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def train(self, name: str, steps: int, *options: object) -> None:
        """Runs a trainer to its end."""
        began = time.monotonic()
        with self.trainer(name, "--steps", steps, *options) as process, console.status("") as status:
            while process.poll() is None:
                status.update(f"training: step {max(self.losses(name), default=0)} of {steps}")
                time.sleep(0.1)
        self.expect_exit(name, process.returncode, 0)
        loss = float.fromhex(self.losses(name)[steps])
        console.print(f"  trained to step {steps} in {time.monotonic() - began:.0f} s, last loss {loss:.4f}")

    def expect_exit(self, name: str, got: int, expected: int) -> None:
        """Ends the demo with the trainer's output if the trainer has another exit code."""
        if got != expected:
            log = self.file(f"{name}.log").read_text()
            raise SystemExit(f"{log}\ndemo: the trainer ended with {got}, expected {expected}; its output is above")

    def losses(self, name: str) -> dict[int, str]:
        """Step -> loss as a hex float; if a step was computed twice, the later loss."""
        file = self.file(f"{name}.losses")
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line.split() for line in lines if line.endswith("\n")]
        return {int(step): loss for step, loss in whole}

    def objects(self, prefix: str = "") -> list[ObjectInfo]:
        """The repository's objects, or those of one kind such as "packs/"."""
        return list(self.store.list(prefix))

    def counts(self) -> tuple[int, int]:
        """How many packs and records there are."""
        return len(self.objects("packs/")), len(self.objects("snapshots/"))

    def in_save(self, between_saves: tuple[int, int]) -> bool:
        """Whether a save has written packs and no record yet; `between_saves`: the counts before it."""
        packs, snapshots = self.counts()
        return bool(self.objects("sessions/")) and packs > between_saves[0] and snapshots == between_saves[1]


def reference(demo: Demo) -> None:
    """An uninterrupted run without snapshots. It notes its losses, and the digest of its state every ten steps."""
    demo.train("reference", STEPS, "--digests", demo.file("reference.digests"))


def kill(demo: Demo) -> None:
    """The same run with snapshots every ten steps. It gets SIGKILL when a save has just written its first pack."""
    with demo.trainer("gpt", "--steps", STEPS, *gpt_options(demo)) as process, console.status("") as status:
        between_saves, step = demo.counts(), 0
        while process.poll() is None and step < STEPS - SAVE_EVERY // 2:
            step = max(demo.losses("gpt"), default=0)
            status.update(f"training: step {step} of {STEPS}")
            if step >= KILL_FROM and demo.in_save(between_saves):
                process.send_signal(signal.SIGSTOP)  # so that the save cannot end before the kill
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if demo.in_save(between_saves):
                    break
                process.send_signal(signal.SIGCONT)
            elif not demo.objects("sessions/"):
                between_saves = demo.counts()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    demo.expect_exit("gpt", process.returncode, -signal.SIGKILL)
    step, sessions = max(demo.losses("gpt")), len(demo.objects("sessions/"))
    demo.proofs.add(sessions == 1, f"SIGKILL hit the trainer at step {step}, in the middle of a save")
    committed = ", ".join(str(snapshot.step) for snapshot in Repository.open(demo.url).snapshots("gpt"))
    console.print(
        f"  committed: steps {committed}; stored: {stored(demo)}, with {sessions} session of the dead process"
    )


def collect_leftovers(demo: Demo) -> None:
    """Without a time-out: gc knows that the session's process is dead, and deletes what it has left."""
    before, repository = stored(demo), Repository.open(demo.url)
    first, second = repository.gc(), repository.gc()
    console.print(f"  stored before gc: {before}, after: {stored(demo)}; objects deleted: {first.deleted_objects}")
    demo.proofs.add(
        first.deleted_objects > 0
        and second.deleted_objects == 0
        and not first.waiting_for
        and not demo.objects("sessions/"),
        "gc reclaimed the dead save's leftovers at once",
    )


def resume(demo: Demo) -> None:
    """Started again with the same arguments, it finds its newest committed snapshot by itself."""
    newest = Repository.open(demo.url).snapshot("gpt@latest").step
    demo.train("gpt", STEPS, *gpt_options(demo))
    resumed = f"resumed after step {newest}" in demo.file("gpt.log").read_text()
    demo.proofs.add(resumed, f"the restarted trainer resumed after step {newest}, its newest committed snapshot")

    expected, got = demo.losses("reference"), demo.losses("gpt")
    table = Table("step", "loss of the reference", "loss after kill and resume", "", box=None, padding=(0, 2))
    for step in sorted({newest, newest + 1, STEPS}):
        table.add_row(str(step), expected[step], got[step], "=" if expected[step] == got[step] else "differs")
    console.print(table)
    same = sum(expected[step] == got.get(step) for step in expected)
    demo.proofs.add(expected == got, f"{same} of {len(expected)} losses equal the reference's to the last bit")


def restore_old_step(demo: Demo) -> None:
    """Compare every tensor and value of an old step with the digests that the reference run noted."""
    noted = map(json.loads, demo.file("reference.digests").read_text().splitlines())
    expected = next(entry["digests"] for entry in noted if entry["step"] == OLD_STEP)
    began = time.monotonic()
    got = digests(Repository.open(demo.url).restore(f"gpt@{OLD_STEP}"))
    console.print(f"  restored and hashed gpt@{OLD_STEP} in {time.monotonic() - began:.1f} s")
    for path in sorted(expected.keys() | got.keys()):
        if expected.get(path) != got.get(path):
            console.print(f"  differs: {path}")
    demo.proofs.add(expected == got, f"step {OLD_STEP} restored bit for bit: {len(got)} values with equal SHA-256")


def fork(demo: Demo) -> None:
    """A second run starts from an old step of the first, with a lower learning rate."""
    origin = f"gpt@{FORK_STEP}"
    demo.train("fork", FORK_STEPS, "--repo", demo.url, "--run", "fork", "--from", origin, "--lr", 3e-4)
    repository = Repository.open(demo.url)
    first, parent = repository.snapshot(f"fork@{FORK_STEP}"), repository.snapshot(origin)
    demo.proofs.add(first.parent == parent.id, f"fork@{FORK_STEP} descends from {origin}")
    demo.proofs.add(
        first.stored_bytes < first.logical_bytes / 50,
        f"fork@{FORK_STEP} shares its chunks: {mib(first.logical_bytes)} of state in {mib(first.stored_bytes)}",
    )
    own, theirs = demo.losses("fork"), demo.losses("gpt")
    demo.proofs.add(own[FORK_STEPS] != theirs[FORK_STEPS], "the fork went its own way")


def show(demo: Demo) -> None:
    """Show the contents of the repository."""
    snapshots = sorted(Repository.open(demo.url).snapshots(), key=lambda snapshot: snapshot.created)
    names = {snapshot.id: f"{snapshot.run}@{snapshot.step}" for snapshot in snapshots}
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("snapshot", no_wrap=True)
    table.add_column("parent", no_wrap=True)
    for column in ("depth", "logical\nMiB", "stored\nMiB", "ratio", "stall\nms", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tags")
    for snapshot in snapshots:
        ratio = snapshot.logical_bytes / max(1, snapshot.stored_bytes)
        table.add_row(
            names[snapshot.id],
            names.get(snapshot.parent, "forgotten") if snapshot.parent else "",
            str(snapshot.depth),
            f"{snapshot.logical_bytes / 2**20:.1f}",
            f"{snapshot.stored_bytes / 2**20:.1f}",
            f"{ratio:.2f}" if ratio < 100 else ">99",
            f"{snapshot.stall_s * 1000:.0f}",
            f"{snapshot.metrics['loss']:.3f}" if "loss" in snapshot.metrics else "",
            ", ".join(snapshot.tags),
        )
    console.print(table)
    logical = sum(snapshot.logical_bytes for snapshot in snapshots)
    console.print(f"  {len(snapshots)} snapshots, {mib(logical)} of state in {stored(demo)}")


def forget(demo: Demo) -> None:
    """Policies choose what stays and say why; gc then frees what is not needed any more."""
    repository = Repository.open(demo.url)
    repository.tag(f"gpt@{FORK_STEP + SAVE_EVERY}", "paper")
    before_bytes = stored_bytes(demo)
    result = repository.forget([KeepLast(1), KeepEvery(steps=KEEP_EVERY)], run="gpt")
    for snapshot, reasons in result.kept:
        console.print(f"  keep   gpt@{snapshot.step}: {', '.join(reasons)}")
    for snapshot in result.forgotten:
        console.print(f"  forget gpt@{snapshot.step}")
    collected = repository.gc()
    after_bytes = stored_bytes(demo)
    console.print(
        f"  stored before gc: {mib(before_bytes)}, after: {mib(after_bytes)}; "
        f"objects deleted: {collected.deleted_objects}"
    )
    demo.proofs.add(
        collected.deleted_bytes > 0 and after_bytes < before_bytes,
        f"gc freed {mib(before_bytes - after_bytes)} of {len(result.forgotten)} forgotten snapshots",
    )
    left = {snapshot.id for snapshot in repository.snapshots()}
    check = repository.check("restore")
    demo.proofs.add(
        check.ok and left <= {snapshot.id for snapshot in check.restorable},
        f"all {len(left)} snapshots that stayed restore: every chunk decoded and hashed again",
    )


def gpt_options(demo: Demo) -> list[object]:
    """Keeps all steps for now, and lets save know which ones will stay for long."""
    return ["--repo", demo.url, "--run", "gpt", "--keep-last", 100, "--keep-every", KEEP_EVERY]


def stored_bytes(demo: Demo) -> int:
    return sum(info.size_bytes for info in demo.objects())


def stored(demo: Demo) -> str:
    return mib(stored_bytes(demo))


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def portable_svg(picture: str) -> str:
    """Return rich's picture such that every viewer shows the same.

    rich puts blanks at the start of a text element. librsvg and others drop them, and the text moves to the left, into
    what stands before it. Here each run of words is an element of its own, at its own place. No font is fetched.
    """

    def split(found: re.Match[str]) -> str:
        before, x, y, after, text = found.groups()
        return "".join(
            f'<text {before}x="{float(x) + words.start() * CELL:g}" y="{y}" textLength="{len(words[0]) * CELL:g}"'
            f"{after}>{html.escape(words[0])}</text>"
            for words in re.finditer(r"\S+(?: \S+)*", html.unescape(text).replace("\xa0", " "))
        )

    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", "monospace").replace(": arial", ": sans-serif")
    return re.sub(r'<text ([^>]*)x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+"([^>]*)>(.*?)</text>', split, picture)


STORY: list[tuple[str, Callable[[Demo], None]]] = [
    (f"A reference run: {STEPS} steps, uninterrupted, without snapshots", reference),
    ("The same run with snapshots, killed with SIGKILL in a save", kill),
    ("gc after the kill", collect_leftovers),
    ("Start it again", resume),
    (f"Restore step {OLD_STEP}", restore_old_step),
    (f"A second run forks from step {FORK_STEP}", fork),
    ("What is stored", show),
    ("Forget by policy, and collect", forget),
    ("What is left", show),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=caller.path,
        help="leave logs, losses and (not of S3) the repository in this new folder",
    )
    parser.add_argument(
        "--s3", action="store_true", help="on a real S3 server, which tools/demo starts; else in a folder"
    )
    parser.add_argument(
        "--svg", metavar="FILE", type=caller.path, help="save a picture of the output, such as docs/demo.svg"
    )
    args = parser.parse_args()
    if args.svg:
        console.record, console.width = True, 108
    began = time.monotonic()
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep}: expected a new or empty folder")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="snapstore-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    url = f"{os.environ['SNAPSTORE_TEST_S3']}/demo-{uuid4().hex[:8]}" if args.s3 else str(folder / "repository")
    demo = Demo(folder, url, Proofs(), open_store(url, create=True))
    try:
        for number, (title, chapter) in enumerate(STORY, start=1):
            console.print(f"\n[bold]{number}. {title}[/] [dim]({time.monotonic() - began:.0f} s)[/]")
            chapter(demo)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        if not args.keep:
            shutil.rmtree(folder)

    failed = sum(not held for held, _ in demo.proofs.lines)
    console.print(f"\n[bold]Summary[/] after {time.monotonic() - began:.0f} s")
    for held, claim in demo.proofs.lines:
        console.print(demo.proofs.line(held, claim))
    if args.keep and not args.s3:
        console.print(f"The repository is in {demo.url}")
    console.print(
        f"[red]{failed} of {len(demo.proofs.lines)} proofs failed[/]" if failed else "[green]All proofs hold[/]"
    )
    if args.svg:
        args.svg.write_text(portable_svg(console.export_svg(title="tools/demo", font_aspect_ratio=CELL / 20)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
