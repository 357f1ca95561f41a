"""Snapshots, repositories and results as a notebook shows them, and as data frames of pandas."""

import math
import shutil
import sys
from html.parser import HTMLParser

import pandas
import pytest
import torch

import snapstore
from kit.processes import ROOT, run_python
from snapstore import CapabilityError, Repository
from snapstore.storage.memory import MemoryStore
from snapstore.text import MOST_ROWS, html_table

HOSTILE = "<script>alert('&')</script>\n\x1b[2J"
SHOWN = "<script>alert('&')</script>\\n\\x1b[2J"


class Tables(HTMLParser):
    """Reads tables: their captions, and their rows of texts. Any other tag, or a tag that stays open, is an error."""

    def __init__(self, text):
        super().__init__()
        self.captions, self.rows, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "tr", "th", "td"), tag
        assert {name for name, _ in attrs} <= {"style"}
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "caption":
            self.captions.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] == "caption":
            self.captions[-1] += data
        else:
            self.rows[-1][-1] += data


def tables(thing):
    return Tables(thing._repr_html_())


@pytest.fixture
def repository():
    with Repository.create(MemoryStore()) as repository:
        for step in range(3):
            state = {"model": {"w": torch.full((3000,), float(step)), HOSTILE: torch.ones(5)}, "text": HOSTILE * step}
            metrics = {"loss": 0.5 / (step + 1), "step": 7.0} | ({HOSTILE: 3.0} if step == 2 else {})
            repository.save(state, run="exp1", step=step, metrics=metrics, tags=["first"] if step == 0 else [])
        repository.save({"w": torch.zeros(250_000)}, run="other", step=5)
        yield repository


def test_a_snapshot(repository):
    snapshot = repository.snapshot("exp1@2")
    found = tables(snapshot)
    assert found.captions == ["exp1@2"]
    facts = dict(found.rows)
    assert facts["id"] == snapshot.id
    assert facts["size"] == "12.0kB"
    assert facts["parent"] == repository.snapshot("exp1@1").id
    assert (facts["loss"], facts[SHOWN]) == ("0.166667", "3")
    assert facts["created"].endswith(" UTC")
    assert repr(snapshot).endswith("size='12.0kB', metrics=" + repr(f"loss=0.1667, step=7, {HOSTILE}=3") + ")")
    assert f"created='{facts['created'].removesuffix(' UTC')}Z'" in repr(snapshot)


def test_lists_of_snapshots(repository):
    found = tables(repository.snapshots("exp1"))
    assert found.captions == ["3 snapshots"]
    assert found.rows[0] == ["snapshot", "id", "created (UTC)", "size", "stored", "tags", "loss", "step", SHOWN]
    assert [(row[0], row[5], row[6], row[8]) for row in found.rows[1:]] == [
        ("exp1@0", "first", "0.5", ""),
        ("exp1@1", "", "0.25", ""),
        ("exp1@2", "", "0.1667", "3"),
    ]
    assert [row[0] for row in tables(repository.snapshots("exp1")[-2:]).rows[1:]] == ["exp1@1", "exp1@2"]
    assert tables(repository.children("exp1@1")).rows[1][0] == "exp1@2"
    assert repository.snapshots() == list(repository.snapshots())


def test_a_repository(repository, tmp_path):
    found = tables(repository)
    assert found.captions == [f"Repository {repository.url}: 2 runs"]
    assert [row[:3] for row in found.rows[1:]] == [["exp1", "3", "2"], ["other", "1", "5"]]
    assert found.rows[2][4] == "1.0MB"
    with Repository.create(tmp_path / "r") as empty:
        assert tables(empty).captions == [f"Repository {empty.url}: 0 runs"]
        empty.save({"n": 1}, run="a", step=1)
        (record,) = (tmp_path / "r" / "snapshots").rglob("*.*")
        record.write_bytes(b"x" * record.stat().st_size)
        with Repository.open(tmp_path / "r") as other:
            assert "1 unreadable record" in tables(other).captions[0]
        shutil.rmtree(tmp_path / "r")
        assert tables(empty).captions[0].startswith(f"Repository {empty.url}: ")


def test_a_diff(repository):
    result = repository.diff("exp1@0", "exp1@2")
    found = tables(result)
    assert found.captions == ["exp1@0 -> exp1@2: 1 changed, 1 same", "plain values"]
    assert found.rows[1] == ["model.w", "changed", "100.00%", "inf", ""]
    assert found.rows[3] == ["text", "''", repr(HOSTILE * 2)]
    frame = result.to_pandas()
    assert list(frame.columns) == ["path", "status", "changed_share", "relative_l2", "note"]
    assert frame.status.tolist() == ["changed", "same"]
    assert frame.relative_l2[0] == math.inf
    assert math.isnan(frame.changed_share[1])
    assert tables(repository.diff("exp1@0", "other@5")).captions[0].endswith("2 removed, 1 added")


def test_stats(repository):
    result = repository.stats()
    found = tables(result)
    assert found.captions[0].startswith("4 snapshots: 1.0MB of state in ")
    assert [row[0] for row in found.rows if row[0] in ("model", "w")] == ["model", "w"]
    frame = result.to_pandas()
    assert frame.set_index("group").logical_bytes.to_dict() == {"model": 3 * 12_020, "w": 1_000_000}
    assert frame.stored_bytes.sum() <= result.stored_bytes


def test_snapshots_as_a_data_frame(repository):
    frame = repository.snapshots().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.step.tolist() == [0, 1, 2, 5]
    assert frame.loss.tolist()[:3] == [0.5, 0.25, 0.5 / 3]
    assert math.isnan(frame.loss[3])
    assert frame["metrics.step"].tolist()[:3] == [7.0] * 3
    assert frame.logical_bytes.tolist()[3] == 1_000_000
    assert str(frame.created.dtype).endswith("UTC]")
    assert abs(frame.created[0].timestamp() - repository.snapshots()[0].created) < 0.001
    assert frame.parent[1] == frame.id[0]
    assert frame.tags[0] == ["first"]
    assert len(repository.snapshots("exp1").to_pandas()) == 3
    assert len(Repository.create(MemoryStore("empty")).snapshots().to_pandas()) == 0


def test_the_guide_runs(repository, tmp_path):
    page = (ROOT / "docs" / "guides" / "reading.md").read_text()
    block = page.partition("## 7. In a notebook")[2].partition("```python\n")[2].partition("```")[0]
    with Repository.create(tmp_path / "snapshots", like=repository) as copy:
        repository.copy(["exp1@0", "exp1@1", "exp1@2"], to=copy.store)
    names = {}
    exec(block.replace("/data/snapshots", str(tmp_path / "snapshots")), names)
    with names["repository"]:
        assert names["best"].step == 2
        assert names["frame"].loss.idxmin() == 2
        assert names["changes"].b.ref == "exp1@2"


def test_pandas_is_optional(repository, monkeypatch):
    """Without it an error says what to install; tables of HTML need none, and nothing imports it unasked."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    for thing in (repository.snapshots(), repository.diff("exp1@0", "exp1@1"), repository.stats()):
        assert tables(thing).rows
        with pytest.raises(CapabilityError, match=r"pandas: not installed here.*'pip install pandas'"):
            thing.to_pandas()
    code = "import sys, snapstore; snapstore.Repository, snapstore.SnapshotList; sys.exit('pandas' in sys.modules)"
    assert run_python("-c", code).returncode == 0


def test_a_long_table_is_cut():
    rows = [[number] for number in range(MOST_ROWS + 1)]
    found = Tables(html_table("t", ["n"], rows))
    assert len(found.rows) == 1 + MOST_ROWS + 1
    assert [found.rows[at][0] for at in (1, MOST_ROWS // 2, MOST_ROWS // 2 + 1, -1)] == ["0", "29", "...", "60"]
    assert len(Tables(html_table("t", ["n"], rows[1:])).rows) == 1 + MOST_ROWS


def test_dir_has_only_public_names():
    """Also after submodules were imported."""
    code = (
        "import snapstore, snapstore.dcp, snapstore.cli, snapstore.integrations\n"
        "snapstore.Repository\n"
        "print([n for n in dir(snapstore) if n != '__version__' and not hasattr(type(snapstore)('m'), n)])"
    )
    done = run_python("-c", code)
    inner = {"__all__", "__builtins__", "__cached__", "__dir__", "__file__", "__getattr__", "__path__"}
    names = [name for name in eval(done.stdout) if name not in inner]
    assert names == snapstore.__all__, done.stderr
    assert not {"annotations", "import_module", "Any", "TYPE_CHECKING"} & set(names)
