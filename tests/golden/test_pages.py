"""The golden repository with pages of records restores to the bit, and its history goes on in the next page."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from kit.processes import run_python
from snapstore import Repository, SaveOptions
from snapstore.errors import NotFoundError
from snapstore.format.keys import page_key, parse_record_key
from snapstore.format.pages import STATES, read_page, read_volume, unpack_pasts
from snapstore.format.records import ABORTED, COMMITTED, FORGOTTEN, PAGES, SWEPT
from snapstore.protocol.joining import join

FOLDER = Path(__file__).with_name("v1-pages")
sys.path.insert(0, str(FOLDER.parents[2] / "tools"))

from make_golden import PAGED_STEPS, describe, few_changes, summary  # noqa: E402  (tools/ is no package)

EVERY = (COMMITTED, FORGOTTEN, SWEPT, ABORTED)
FIELDS = ("id", "run", "step", "seq", "state", "parent", "tags", "metrics", "depth", "logical_bytes")


@pytest.fixture
def golden(tmp_path):
    """A copy of the repository."""
    shutil.copytree(FOLDER, tmp_path / "repo")
    (tmp_path / "repo" / "expected.json").unlink()
    with Repository.open(tmp_path / "repo", options=SaveOptions(threads=2)) as repo:
        yield repo


def expected():
    return json.loads((FOLDER / "expected.json").read_text())["snapshots"]


def rows(repo):
    """Return what the log says of each snapshot."""
    return [{name: getattr(s, name) for name in FIELDS} for s in repo.view().snapshots(states=EVERY)]


def loose(repo):
    """Return the steps and revisions of the loose records of the run "paged"."""
    keys = [parse_record_key(info.key) for info in repo.store.list("snapshots/paged/")]
    return {(step, revision) for _, step, _, revision in keys}


def test_the_log_is_right(golden):
    assert rows(golden) == [{name: e[name] for name in FIELDS} for e in expected()]
    assert Counter((s.run, s.state) for s in golden.view().snapshots(states=EVERY)) == {
        ("paged", COMMITTED): 6, ("paged", FORGOTTEN): 2, ("paged", SWEPT): 3, ("paged", ABORTED): 2,
        ("second", COMMITTED): 2,
    }  # fmt: skip
    assert golden.snapshot("paged@0").metadata == {"step": 0}
    assert golden.snapshot("paged@8").metadata == [8, None]
    assert golden.snapshot("paged@start").step == 0
    assert golden.snapshot("paged@best").step == PAGED_STEPS
    assert golden.snapshot("second@start").step == 1
    assert golden.snapshot(f"id:{golden.snapshot('second@0').parent}").ref == "paged@10"


def test_it_restores_to_the_bit(golden):
    kept = [e for e in expected() if e["state"] in (COMMITTED, FORGOTTEN)]
    assert len(kept) == 10
    for e in kept:
        found = summary(describe(golden.restore(f"id:{e['id']}")))
        assert found == e["leaves"] == summary(describe(few_changes(e["step"])))


def test_the_shell_names_swept_snapshots(golden):
    """A page keeps the step, date, parent and metrics of each."""
    done = run_python("-m", "snapstore", "log", "--all", "--json", "paged", "--repo", golden.store.url)
    assert done.returncode == 0, done.stderr
    found = {line["step"]: line for line in json.loads(done.stdout)["snapshots"]}
    assert sorted(found) == list(range(PAGED_STEPS + 1))
    assert [step for step, line in found.items() if line["state"] == SWEPT] == [1, 3, 9]
    for step, loss, parent in ((1, 1 / 2, 0), (3, 1 / 4, 2), (9, 1 / 9, 0)):
        line = found[step]
        assert line["metrics"] == {"loss": loss}
        assert line["parent"] == found[parent]["id"]
        assert found[step - 1]["created"] < line["created"] < found[step + 1]["created"]
    text = run_python("-m", "snapstore", "log", "--all", "paged", "--repo", golden.store.url).stdout
    assert [line.split()[0] for line in text.splitlines() if " swept " in line] == ["paged@1", "paged@3", "paged@9"]


def test_check_finds_nothing(golden):
    result = golden.check("restore")
    assert result.ok, result.problems
    assert not result.problems
    assert len(result.restorable) == 10


def test_it_has_every_kind(golden):
    """As docs/design/freeze.md lists them."""
    assert golden.context.config.features == [PAGES]
    store, of_page = golden.store, []
    for number in (0, 1):
        page = read_page(store.get(page_key("paged", number)), page_key("paged", number))
        states = {record.step: record.state for record in page.live}
        pasts = unpack_pasts(page.packed_past, page.key)
        graves = {int(row["step"]): STATES[row["state"]] for row in page.graves}
        of_page.append((states, graves, {type(past.parent) for past in pasts}))
        (volume,) = (v for v in store.list("volumes/paged/") if f"/{number:09}-{number:09}." in v.key)
        assert [*read_volume(store.get(volume.key), volume.key)] == [page.data]
    assert of_page[0][0] == {0: COMMITTED, 2: FORGOTTEN, 3: COMMITTED, 4: COMMITTED, 7: ABORTED}
    assert of_page[0][1:] == ({1: SWEPT, 6: ABORTED}, {int, type(None)})
    assert of_page[1][0] == {2: COMMITTED, 4: FORGOTTEN, 5: COMMITTED, 8: COMMITTED, 10: COMMITTED}
    assert of_page[1][1:] == ({3: SWEPT, 9: SWEPT}, {int, str})
    assert [info.key for info in store.list("pages/second/")] == [page_key("second", 0)]
    void = {(3, 2), (4, 1), (9, 0), (9, 1), (9, 2)}
    assert loose(golden) == void | {(8, 2), (10, 1), (11, 0), (12, 0)}


def test_void_records_mean_nothing(golden, tmp_path):
    """One says that a swept snapshot is committed; the page has the same revision."""
    with pytest.raises(NotFoundError, match="cannot come back"):
        golden.unforget("paged@3")
    before = rows(golden)
    for pattern in ("*03-*", "*04-*", "*09-*"):
        for path in (tmp_path / "repo" / "snapshots" / "paged").glob(pattern):
            path.unlink()
    golden.rebuild_index()
    assert rows(golden) == before
    assert golden.check("restore").ok


def test_a_volume_stands_in_for_a_page(golden, tmp_path):
    before = rows(golden)
    (tmp_path / "repo" / page_key("paged", 0)).unlink()
    golden.rebuild_index()
    assert rows(golden) == before
    assert [p.key for p in golden.check("restore").problems] == [page_key("paged", 0)]
    assert golden.repair(apply=True).actions
    assert golden.check("restore").ok
    assert (tmp_path / "repo" / page_key("paged", 0)).read_bytes() == (FOLDER / page_key("paged", 0)).read_bytes()


def test_its_history_goes_on_in_the_next_page(golden):
    saved = golden.save(few_changes(13), run="paged", step=13, tags=["best"])
    assert (saved.seq, saved.parent) == (golden.snapshot("paged@12").seq + 1, golden.snapshot("paged@12").id)
    assert saved.depth > 0
    assert golden.snapshot("paged@12").tags == []
    golden.gc()  # sweeps paged@4, whose record is in a page, and paged@10, whose last one is loose
    result = join(golden.context, "paged", at_least=1)
    assert (result.pages, result.snapshots) == (1, 5)
    assert loose(golden) == {(13, 0)}
    page = read_page(golden.store.get(page_key("paged", 2)), page_key("paged", 2))
    assert {record.step for record in page.live} == {8, 11, 12}
    assert set(page.graves["step"].tolist()) == {4, 10}
    for step in (0, 2, 5, 8, 11, 12, 13):
        assert describe(golden.restore(f"paged@{step}")) == describe(few_changes(step))
    assert golden.check("restore").ok
