"""Every class of object damaged in every way: check tells the truth, repair mends what it can and harms nothing."""

from __future__ import annotations

import damage
import pytest
from damage import CLASSES, PLACES, everyone, repository, restoring
from faults import OPTIONS, one_thread

from snapstore import Repository
from snapstore.check import LEVELS


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    one_thread(monkeypatch, index=False)


def looked_at(store, level):
    with Repository.open(store, options=OPTIONS, damaged=True) as found:
        return found.check(level)


def refs(snapshots):
    return {s.ref for s in snapshots}


#: What is not damage to anybody: nothing to report, nothing that suffers.
SILENT = {
    ("config", "replaced"),  # another repository's: readable, and nothing hangs on it but the size of new chunks
    ("record, an old revision", "missing"),
    ("record, tagged", "missing"),  # the tag is gone with it, and nobody but an index knows that there was one
    ("record, forgotten", "missing"),
    ("record", "missing"),
    ("record of the newest", "missing"),
    ("policy", "missing"),
    ("policy, an old revision", "missing"),
    ("session", "missing"),
    ("mark", "missing"),
    ("wait list", "missing"),
}
#: Known, and harmful to nobody.
NOTED = {"record, an old revision", "policy, an old revision"}
COMMANDS = {"policy": "snapstore forget --run a --keep-..."}


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


@pytest.mark.parametrize(("name", "how"), damage.cases())
def test_repair_mends_what_it_can(name, how):
    wanted = everyone(repository())
    objects, store, key = damage.damaged(name, how)
    kind, _ = CLASSES[name]
    before = restoring(store, wanted)
    if (kind, how) == ("record", "unreadable") and name not in NOTED:  # as above
        before = wanted.keys() - {ref for ref, s in wanted.items() if s.id in key}
    held = dict(objects._objects)
    with Repository.open(store, options=OPTIONS, damaged=True) as found:
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
    assert left <= {"policy", "session"}, again.problems  # those wait for a person, or for an hour
    assert ("session" in left) == any("sessions/" in line for line in report.open)
    with Repository.open(store, options=OPTIONS) as found:
        left = {a.kind for a in found.repair(apply=True).actions} - {"index"}
        # The note of a pack that is gone is needed no more once its snapshots are whole.
        released = how == "missing" and report.healed and not report.lost and kind == "pack"
        assert left == ({"release"} if released else set()), "nothing is left to do"


def gone(name, how):
    """Whom nobody can name, for want of an index."""
    lost = {"record": {"a@0"}, "record of the newest": {"a@3"}}
    return lost.get(name, set()) if how == "missing" else set()
