"""check finds every damage to every class of object; repair restores what it can and harms nothing."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from functools import cache

import pytest
from msgspec import structs

from kit import damage
from kit.damage import CLASSES, DAMAGES, PLACES, everyone, refs, repository, restoring
from kit.faults import Crash, FaultStore, Unreadable, one_thread
from kit.objects import clone, keys_of
from kit.repositories import OPTIONS, created, opened, save, values, version_of
from kit.samples import sampled
from kit.shell import invoke
from snapstore import Repository
from snapstore.check.report import LEVELS
from snapstore.errors import IntegrityError, SnapstoreError, StorageError
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    one_thread(monkeypatch, index=False)


def looked_at(store, level):
    with opened(store, damaged=True) as found:
        return found.check(level)


#: Changes that `check` cannot notice without an index: it reports nothing.
SILENT = {
    ("record, an old revision", "missing"),
    ("record, tagged", "missing"),  # the tag is gone with it, and only an index knows that there was one
    ("record, forgotten", "missing"),
    ("policy", "missing"),
    ("policy, an old revision", "missing"),
    ("mark", "missing"),
    ("wait list", "missing"),
}
#: Without an index nothing names the object that is gone, but no record explains the packs that it left behind.
UNEXPLAINED = {("record", "missing"), ("record of the newest", "missing"), ("session", "missing")}
#: Damage that `check` notes and that harms no snapshot.
NOTED = {"record, an old revision", "policy, an old revision"}
GO_ON = (
    "to go on from it, name it in the restore, restore with fallback (--fallback), "
    "or run 'snapstore repair --apply --drop', which forgets what stays damaged"
)
NONE_WHOLE = "no older snapshot of run 'a' is whole"
COMMANDS = {"policy": "snapstore forget --run a --keep-...", "manifest": "snapstore repair --drop"}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "how"), damage.cases())
def test_check_tells_the_truth(name, how):
    wanted = everyone(repository())
    kind, _ = CLASSES[name]
    _, store, key = damage.damaged(name, how)
    whole = restoring(store, wanted)
    if kind == "record" and how == "unreadable" and name not in NOTED:
        # Without an index nothing can be looked up at all until it is repaired, and every verb says so.
        whole = wanted.keys() - {ref for ref, s in wanted.items() if s.id in key}
    for level in LEVELS:
        result = looked_at(store, level)
        about = f"{level}: {result.problems}"
        if (name, how) in SILENT:
            assert result.ok, about
            continue
        if (name, how) in UNEXPLAINED:
            assert [(p.kind, p.snapshots, p.command) for p in result.problems] == [("unexplained", (), "")], about
            assert refs(result.restorable) == whole, about
            continue
        if level == "metadata" and (how in PLACES or (kind == "pack" and how == "unreadable")):
            assert result.ok, about  # names and sizes are all that is looked at
            continue
        assert refs(result.restorable) == whole, about
        assert refs(result.damaged) == wanted.keys() - whole, about
        found = result.notes if name in NOTED else result.problems
        assert [(p.kind, p.key) for p in found if p.kind != "chunk"] == [(kind, key)], about
        assert {p.command for p in found} == {"" if name in NOTED else COMMANDS.get(kind, "snapstore repair")}, about
        suffering = {name for p in result.problems for name in p.snapshots}
        assert suffering == {wanted[ref].id for ref in wanted.keys() - whole}, about


def error_of(store, snapshot):
    with opened(store, damaged=True) as found:
        try:
            found.restore(f"id:{snapshot.id}")
        except SnapstoreError as error:
            return error
    return None


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "how"), damage.cases())
def test_the_error_of_a_damaged_newest_snapshot_names_the_newest_whole_one(name, how):
    wanted = everyone(repository())
    _, store, _ = damage.damaged(name, how)
    whole = restoring(store, wanted)
    for ref in ("a@2", "a@1", "a@0"):
        assert "whole" not in str(error_of(store, wanted[ref]))
    error = error_of(store, wanted["a@3"])
    if error is None or name == "record of the newest":  # nothing says that it is the newest
        return
    assert isinstance(error, StorageError if how == "unreadable" else IntegrityError)
    older = next((wanted[ref] for ref in ("a@1", "a@0") if ref in whole), None)  # a@2 is forgotten
    end = f"the newest whole snapshot of run 'a' is {older.ref} (id:{older.id[:12]}); {GO_ON}" if older else ""
    assert str(error).endswith(f"; {end or NONE_WHOLE}")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "how"), damage.cases())
def test_repair_restores_what_it_can(name, how):
    wanted = everyone(repository())
    objects, store, key = damage.damaged(name, how)
    kind, _ = CLASSES[name]
    before = restoring(store, wanted)
    if (kind, how) == ("record", "unreadable") and name not in NOTED:  # as above
        before = wanted.keys() - {ref for ref, s in wanted.items() if s.id in key}
    held = dict(objects._objects)
    with opened(store, damaged=True) as found:
        planned = found.repair()
        assert objects._objects == held, "a dry run has changed something"
        assert not planned.applied
        report = found.repair(apply=True)
    about = f"{report.actions} {report.open} {report.lost}"
    assert report.applied
    assert [a.kind for a in planned.actions] == [a.kind for a in report.actions], about
    assert [a.message for a in planned.actions if a.kind != "config"] == [
        a.message for a in report.actions if a.kind != "config"
    ]
    assert refs(planned.healed) == refs(report.healed)
    after = restoring(store, wanted)
    assert after == before | refs(report.healed), about
    assert refs(s for s, _ in report.lost) == wanted.keys() - after - gone(name, how), about
    assert held.keys() - objects._objects.keys() <= {key}, f"repair has deleted something; {about}"
    again = looked_at(store, "restore")
    assert {i for p in again.problems for i in p.snapshots} == {s.id for s, _ in report.lost}, again.problems
    left = {p.kind for p in again.problems if not p.snapshots}
    left -= {"unexplained"} if (name, how) in UNEXPLAINED else set()  # only a person knows whether it is lost
    assert left <= {"policy", "session"}, again.problems  # those wait for a person, or for an hour
    assert ("session" in left) == any("sessions/" in line for line in report.open)
    with opened(store) as found:
        left = {a.kind for a in found.repair(apply=True).actions} - {"index"}
        # The note of a pack that is gone is not needed any more once its snapshots are whole.
        released = how == "missing" and report.healed and not report.lost and kind == "pack"
        assert left == ({"release"} if released else set()), "nothing is left to do"


@cache
def source_of_copies():
    """Return a run in which a save died and was fenced, a@0 was collected, and a@1 and a@2 were compacted."""
    store = created()
    with opened(store) as found:
        for step in range(3):
            save(found, "a", step, step)
    damage.die_in_a_save(store, 7)
    with opened(store) as found:
        found.forget_snapshots(["a@0"])
        assert found.gc().fenced
        assert found.compact().rewritten
        found.gc()
        for step in range(3, 6):
            save(found, "a", step, step)
    return store


@cache
def copy_of_it():
    """Return a copy of it. The copy of a@4 died, was fenced and made again; a@2 was swept and copied again."""
    target = MemoryStore()
    with opened(source_of_copies()) as found:
        found.copy(["a@1", "a@2", "a@3"], to=target)
        dry = FaultStore(clone(target))
        found.copy(["a@4"], to=dry)
        number = next(i for i, (verb, key) in enumerate(dry.log) if verb == "put" and key.startswith("manifests/"))
        with pytest.raises(Crash):
            found.copy(["a@4"], to=FaultStore(target, number, "crash-after"))
    with opened(target) as there:
        there.forget_snapshots(["a@2"])
        assert there.gc().fenced
    with opened(source_of_copies()) as found:
        for ref in ("a@4", "a@5", "a@2"):
            assert not found.copy([ref], to=target).failed
    return target


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("made", [source_of_copies, copy_of_it])
def test_any_record_of_a_run_with_fences_rewrites_and_copies(made, how):
    """Damage each record alone, and the last records of all. Repair brings every snapshot back in its place.

    A ruling record that is missing leaves only objects that nothing explains: then nothing may be deleted.
    """
    wanted, keys = everyone(made()), keys_of(made(), "snapshots/")
    before = [s.ref for s in sorted(wanted.values(), key=lambda s: s.seq)]
    ruling = {s.key for s in wanted.values()}
    for victims in [[key] for key in keys] + ([sorted(ruling)] if how != "unreadable" else []):
        store, about = clone(made()), f"{how}: {victims}"
        for key in victims:
            harm(store, key, how)
        seen = Unreadable(store, victims[0]) if how == "unreadable" else store
        packs = keys_of(store, "packs/")
        with opened(seen, damaged=True) as found:
            found.repair(apply=True)
            with suppress(IntegrityError, StorageError):
                found.gc()
        lost = {ref for ref, s in wanted.items() if s.key in victims and how == "missing"}
        assert restoring(seen, wanted) >= wanted.keys() - lost, about
        if lost:
            assert keys_of(store, "packs/") == packs, about
        else:
            with opened(seen) as found:
                assert [s.ref for s in found.snapshots()] == before, about


def harm(store, key, how):
    """Damage a record in place: its date stays."""
    if how == "missing":
        store.delete([key])
        return
    data, info = store._objects[key]
    other = next(d for k, (d, _) in store._objects.items() if k.startswith("snapshots/") and k[:-2] != key[:-2])
    flipped = bytes([*data[:60], data[60] ^ 4, *data[61:]])
    changed = {"flip": flipped, "truncated": data[: len(data) // 2], "empty": b"", "replaced": other}.get(how, data)
    store._objects[key] = changed, structs.replace(info, size_bytes=len(changed))


def gone(name, how):
    """Return the snapshots that nothing names any more, since there is no index."""
    lost = {"record": {"a@0"}, "record of the newest": {"a@3"}}
    return lost.get(name, set()) if how == "missing" else set()


# --- where the advice leads


#: Besides the commands an operator may have nothing, a backup, or the state itself.
CHOICES = ("drop", "put a copy back", "save again")
ROUNDS = 6


class Operator:
    """Follows the advice that `check` prints, and the advice of the commands that it names."""

    def __init__(self, monkeypatch, name, how, choice):
        self.name, self.choice = name, choice
        self.objects, self.store, self.key = damage.damaged(name, how)
        self.wanted = everyone(repository())
        self.lost = set(gone(name, how))
        self.said = []
        opened = Repository.open

        def as_named(place, *, options=OPTIONS, damaged=False):
            return opened(self.store if place == "mem" else place, options=options, damaged=damaged)

        monkeypatch.setattr(Repository, "open", as_named)

    def run(self, command):
        """Run a command; return (exit code, output)."""
        # It deletes snapshots that are only forgotten: restore them before.
        if command in ("snapstore gc", "snapstore gc --unexplained"):
            self.all_but_the_lost_restore()
            self.wanted = {ref: s for ref, s in self.wanted.items() if s.state == "committed"}
        command = command.replace("--keep-...", "--keep-last 7")
        result = invoke(["--repo", "mem", *command.split()[1:]])
        self.said.append(f"$ {command} -> {result.exit_code}\n{result.output}")
        assert result.exit_code in (0, 3, 20), self.log
        if command.startswith(("snapstore check", "snapstore repair")):
            assert "run 'snapstore check" not in result.output, self.log
        self.lost |= set(re.findall(r"^lost(?:, and forgotten)?: (\S+@\d+):", result.output, re.MULTILINE))
        return result.exit_code, result.output

    @property
    def log(self):
        return "\n".join(self.said)

    def all_but_the_lost_restore(self):
        with_damage = restoring(self.store, self.wanted)
        assert with_damage >= self.wanted.keys() - self.lost, self.log

    def until_all_is_well(self):
        for _ in range(ROUNDS):
            code, text = self.run("snapstore check --restore")
            if code == 0:
                return
            if "'snapstore gc' frees" in text:
                code, _ = self.run("snapstore gc --dry-run")
                assert code == 0, self.log
            advice = re.findall(r"^To fix, run: (snapstore [^(\n]*)(?:\((.*)\))?$", text, re.MULTILINE)
            # The record is gone and there is no other machine: the operator gives its snapshot up, after the rest.
            given_up = re.findall(r"gone for good, '([^']*)' deletes them$", text, re.MULTILINE)
            advice += [(command, "") for command in given_up]
            assert advice, self.log
            for command, instead in advice:
                self.follow(command.strip(), instead)
        raise AssertionError(f"check has led nowhere:\n{self.log}")

    def follow(self, command, instead):
        if self.choice == "put a copy back" and "a copy of the" in instead:
            self.store.delete([self.key])  # a bad sector is no longer there
            self.objects.delete([self.key])
            self.objects.put(self.key, repository().get(self.key))
            self.lost.clear()
            command = "snapstore repair --apply" if "'snapstore repair --apply'" in instead else "snapstore check"
        elif self.choice == "save again" and "save the same content again" in instead:
            with Repository.open("mem") as found:
                for ref in sorted(self.lost):
                    run, version = version_of(self.wanted[ref])
                    found.save(values(run, version), run="again", step=version, metadata=[run, version])
            self.lost.clear()
            command = "snapstore repair --apply"
        _, text = self.run(command)
        if "pass --apply to do it" in text:
            _, text = self.run(f"{command} --apply")
        for untag in re.findall(r"^left open: .*run '(snapstore untag [^']*)'", text, re.MULTILINE):
            self.run(untag)
        if silent := re.search(r"once it was silent for (\d+) s", text):
            later = self.objects.clock() + int(silent[1]) + 1
            self.objects.clock = lambda: later


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CLASSES)
def test_the_commands_that_check_prints_lead_to_the_end(name, monkeypatch):
    """Follow the advice of check for some rounds: it ends, and no snapshot is lost that was not reported as lost."""
    choices = CHOICES if name.startswith(("manifest", "pack")) else CHOICES[:1]  # none is offered elsewhere
    cases = list(itertools.product([how for of, how in damage.cases() if of == name], choices))
    for i in sampled(len(cases), len(cases) if len(choices) > 1 else 1):
        with monkeypatch.context() as patch:
            operator = Operator(patch, name, *cases[i])
            operator.until_all_is_well()
            operator.all_but_the_lost_restore()
            offered = "a copy of the object" in operator.log or "save the same content" in operator.log
            assert not offered or cases[i][1] == "drop" or name.startswith("manifest") or not operator.lost, (
                operator.log
            )
