"""`tools/torture` counts a run as passed only if its harness tried something and skipped nothing without leave."""

from __future__ import annotations

import argparse

import pytest

from kit.processes import ROOT

TRIES = """
import os
from pathlib import Path

def test_tries():
    Path(os.environ["SNAPSTORE_TEST_TALLY"], "1.json").write_text('{"disks": 3}')
"""
SKIPS = """
import pytest

@pytest.mark.parametrize("_", range(2))
def test_skips(_):
    pytest.skip("no disk here")
"""
FAILS = "def test_fails(): assert 1 == 2\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "allowed", "tried", "skipped", "said"),
    [
        (TRIES + SKIPS, {"no disk here"}, {"disks": 3}, {"no disk here": 2}, None),
        (TRIES + SKIPS, {"no disk"}, {"disks": 3}, {"no disk here": 2}, "skipped 2 tests: no disk here"),
        (SKIPS, {"no disk here"}, {}, {"no disk here": 2}, "it tried nothing"),
        (TRIES + FAILS, set(), {"disks": 3}, {}, "E   assert 1 == 2"),
    ],
    ids=["may skip", "may not skip", "tries nothing", "fails"],
)
def test_a_run_passes_only_if_it_tried_all(tmp_path, monkeypatch, capsys, tests, allowed, tried, skipped, said):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import torture

    (tmp_path / "test_it.py").write_text(tests)
    monkeypatch.setattr(torture, "HARNESSES", {"disks": ([str(tmp_path / "test_it.py")], 1)})
    monkeypatch.setattr(torture, "ALLOWED_SKIPS", {"disks": allowed})
    report = torture.new_report()
    torture.run("disks", argparse.Namespace(examples=1, workers=0, out=tmp_path / "out.json"), report)
    last = report["last"]["disks"]
    assert (last["tried"], last["skipped"], last["failed"]) == (tried, skipped, said is not None)
    assert report["failed_runs"] == len(report["failures"]) == (said is not None)
    if said:
        assert said in report["failures"][0]["said"]
        assert said in capsys.readouterr().out


def test_skips_are_allowed_to_harnesses_that_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import torture

    assert torture.ALLOWED_SKIPS.keys() <= torture.HARNESSES.keys()
