"""report: the figures of a page are those of the repository, and what cannot be read is named. The page itself in a
browser: tests/integration/test_report_page.py."""

import json
import re
import sys
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from kit import rank_saves
from kit.s3_stores import moto_bucket
from kit.shell import invoke
from snapstore import CapabilityError, InvalidInputError, KeepEvery, KeepLast, NotFoundError, SaveOptions
from snapstore.format.keys import manifest_key
from snapstore.inspect import changed_elements, report, report_figures
from snapstore.inspect.diff import diff
from snapstore.repository import Repository
from snapstore.storage.memory import MemoryStore

LAYERS = ("model.h.0", "model.h.1", "model.head", "model.frozen")


def made(place=None, **options):
    return Repository.create(place or MemoryStore(), chunk_bytes=8192, options=SaveOptions(threads=1, **options))


def states(count):
    """Yield states: of a layer few elements change, of another most, one is new each time, and one is frozen."""
    rng = np.random.default_rng(7)
    few, most, frozen = (rng.standard_normal(20_000).astype(np.float32) for _ in range(3))
    for step in range(count):
        if step:
            few = few.copy()
            few[rng.integers(0, few.size, 300)] += np.float32(1e-3)
            most = np.where(rng.random(most.size) < 0.9, most * np.float32(1.0001), most)
        new = rng.integers(0, 255, 9000, np.uint8)
        yield {"model": {"h.0.w": few, "h.1.w": most, "head.w": new, "frozen.w": frozen}, "step": step}


def history(repository, count=6, run="a"):
    for step, state in enumerate(states(count)):
        repository.save(state, run=run, step=10 * step, metrics={"loss": 1 / (1 + step)})


def collected(repository, runs=(), *, values=False):
    return report.collect(repository.context, runs, values=values)


@pytest.mark.parametrize("delta", ["difference", "xor"])
def test_share_of_changed_elements_is_that_of_the_values(delta):
    with made(delta=delta) as repository:
        history(repository)
        steps = collected(repository).sampled["a"]
        assert [step.snapshot.step for step in steps] == [0, 10, 20, 30, 40, 50]
        assert not steps[0].layers, "a first snapshot has no base"
        for before, step in pairwise(steps):
            found = diff(repository.context, before.snapshot, step.snapshot)
            of = {one.path: one.changed_share or 0.0 for one in found.tensors if one.path.startswith("model.")}
            shares = {name: step.layers[name].share for name in LAYERS}
            assert shares["model.frozen"] == 0
            assert shares["model.head"] is None, "it is written whole"
            for layer, path in (("model.h.0", "model.h.0.w"), ("model.h.1", "model.h.1.w")):
                if shares[layer] is not None:  # where every delta was read, and no chunk was written whole
                    assert shares[layer] == pytest.approx(of[path], abs=0.05), layer
        assert any(step.layers["model.h.0"].share for step in steps[1:]), "deltas were read"


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("delta", ["auto", "xor"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_elements_are_counted_exactly(itemsize, delta, share):
    rng = np.random.default_rng(itemsize)
    before = np.cumsum(rng.integers(0, 3, 8192 // itemsize)).astype(f"u{itemsize}")
    after = np.where(rng.random(before.size) < share, before + 1, before).astype(before.dtype)
    after[0] = before[0] + 1
    with made(delta=delta) as repository:
        repository.save({"w": before}, run="a", step=0, full=True)
        repository.save({"w": after}, run="a", step=1)
        (_, step) = collected(repository).sampled["a"]
        (layer,) = step.layers.values()
        if layer.delta_bytes:
            assert layer.share == (before != after).mean()
        else:
            assert layer.share is None
            assert share == 0.9


@pytest.mark.parametrize("is_swept", [False, True])
def test_shares_count_from_the_parent(is_swept):
    """A chain of deltas skips links at times, so the base of a delta may be older than the parent."""
    rng = np.random.default_rng(1)
    weights = {f"h.{number}": rng.standard_normal(20_000).astype(np.float32) for number in range(1, 4)}
    changed = {}
    with made() as repository:
        for step in range(18):
            before = {name: value.copy() for name, value in weights.items()}
            for number, value in enumerate(weights.values(), 1):
                value[rng.integers(0, value.size, 300 * number)] *= np.float32(1.001)
            changed |= {(step, name): (before[name] != weights[name]).mean() for name in weights}
            repository.save(weights, run="a", step=step)
        if is_swept:
            repository.forget(KeepEvery(3), run="a")
            repository.gc()
        (first, *steps) = collected(repository).sampled["a"]
        found = {(step.snapshot.step, name): layer.share for step in steps for name, layer in step.layers.items()}
        assert first.snapshot.step == 0
        assert found == {key: share and pytest.approx(changed[key], abs=0.02) for key, share in found.items()}
        assert 2 * sum(share is not None for share in found.values()) > len(found)


def test_a_layer_of_which_much_was_written_whole_has_no_share():
    rng = np.random.default_rng(0)
    before = rng.standard_normal(100 * 2048).astype(np.float32)
    after = before.copy()
    after[: 40 * 2048] = rng.standard_normal(40 * 2048)
    with made() as repository:
        repository.save({"w": before}, run="a", step=0)
        repository.save({"w": after}, run="a", step=1)
        layer = collected(repository).sampled["a"][1].layers["w"]
        assert layer.whole_bytes + layer.delta_bytes == 40 * 8192
        assert layer.share is None, "not 0"


def test_a_run_that_went_back_has_a_gap_and_its_steps_are_sorted():
    with made() as repository:
        for step in (0, 10, 20, 30, 15, 20):
            parent = "a@10" if step == 15 else None
            repository.save({"w": np.full(3000, step)}, run="a", step=step, parent=parent, metrics={"loss": step})
        figures = json.loads(figures_of(repository.report().html))
        (line,) = next(f for f in figures if f["layout"]["yaxis"].get("ticksuffix") == "B")["data"]
        assert line["x"] == [0, 10, 20, 30, None, 15, 20]
        assert line["y"][4] is None
        assert [step.snapshot.step for step in collected(repository).sampled["a"]] == [0, 10, 15, 20, 30]
        bars = [f["data"][0]["x"] for f in figures if f["data"][0]["type"] == "bar"]
        assert bars == [["0", "10", "15", "20", "30"]] * 2


def test_figures_without_values_are_left_out():
    with made() as repository:
        for step in range(2):
            repository.save({"n": step}, run="a", step=step)
        page = repository.report(values=True)
        assert all(figure["data"] for figure in json.loads(figures_of(page.html)))
        assert ">Changed elements by layer<" not in page.html
        assert ">Ratio<" not in page.html


def test_colours_of_distances_are_logarithmic():
    values = [[1e-30, None, 0.0], [2e-3, 50.0, 1e-3]]
    found = report_figures._logarithmic({"z": values, "hovertemplate": "%{z:.2~g}", "colorbar": {"thickness": 12}})
    assert found["z"] == [[-6, None, -6], [pytest.approx(-2.69897), pytest.approx(1.69897), -3]]
    assert found["customdata"] == values
    assert found["hovertemplate"] == "%{customdata:.2~g}"
    assert (found["zmin"], found["zmax"]) == (-6, 2)
    assert found["colorbar"]["ticktext"][::4] == ["1e-06", "0.01", "100"]
    assert report_figures._logarithmic({"z": [[0.0, None]]}) == {}


def test_a_delta_of_another_chunk_is_refused():
    with made() as repository:
        history(repository, 2)
        step = collected(repository).sampled["a"][1]
        place = step.layers["model.h.0"].deltas[0]
        data = repository.store.get_range(f"packs/{place.pack[:2]}/{place.pack}", place.offset, place.length)
        with pytest.raises(Exception, match="not the delta that the manifest names"):
            changed_elements.changed_elements(data, place.chunk_bytes + 4, "here")


def test_bytes_by_part_and_codec_are_those_of_the_packs():
    with made() as repository:
        history(repository)
        found = collected(repository)
        stats = repository.stats()
        by_codec = {name: sum(step.codecs.get(name, 0) for step in found.sampled["a"]) for name in stats.codecs}
        assert by_codec == pytest.approx(stats.codecs)
        assert found.stored_bytes == stats.stored_bytes
        for step in found.sampled["a"]:
            assert step.packs
            assert 0 < sum(step.codecs.values()) <= sum(step.parts.values()) <= step.snapshot.stored_bytes
            assert all(0 < stored <= plain for stored, plain in step.planes.values())
        assert found.manifests[0] == sum(len(s.manifests) for s in repository.snapshots())


def test_values_move_as_numpy_says():
    with made() as repository:
        history(repository, 3)
        data = [state["model"]["h.1.w"].astype(np.float64) for state in states(3)]
        found = collected(repository, values=True).moved["a"]
        assert [(one.before.step, one.snapshot.step) for one in found] == [(0, 10), (10, 20)]
        for one, (a, b) in zip(found, pairwise(data), strict=True):
            assert one.layers["model.h.1"].relative_l2 == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
            assert one.layers["model.h.1"].cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            assert one.layers["model.frozen"].relative_l2 == 0


def test_values_that_are_not_finite_have_no_distance():
    with made() as repository:
        for step, value in enumerate((1.0, float("nan"), float("inf"), 0.0, 0.0)):
            repository.save({"w": torch.full((3000,), value)}, run="a", step=step)
        found = collected(repository, values=True)
        moves = [one.layers["w"].relative_l2 for one in found.moved["a"]]
        assert [report_figures.rounded(move) for move in moves] == [None, None, None, None]
        assert "NaN" not in figures_of(repository.report(values=True).html), "JSON has none"


def test_states_and_reasons_of_snapshots():
    with made() as repository:
        history(repository, 8)
        repository.forget(KeepLast(6), run="a")
        repository.gc()
        repository.set_policies("a", KeepLast(3))
        repository.tag("a@20", "good")
        repository.forget(KeepLast(4), run="a")
        page = repository.report()
        found = collected(repository)
        reasons = {s.step: (s.state, found.reasons[s.id]) for s in found.snapshots}
        assert reasons[0] == ("swept", "kept by no policy; KeepLast(6)")
        assert reasons[30] == ("forgotten", "kept by no policy; KeepLast(4)")
        assert reasons[20] == ("committed", "tag good")
        assert reasons[40] == ("committed", "no policy keeps it: the next forget drops it")
        assert reasons[70] == ("committed", "last 3; newest")
        traces = {trace["name"]: trace for trace in json.loads(figures_of(page.html))[0]["data"]}
        by_name = {name: traces[name]["x"] for name in ("kept", "forgotten", "swept", "tagged")}
        assert by_name == {"kept": [20, 40, 50, 60, 70], "forgotten": [30], "swept": [0, 10], "tagged": [20]}


def test_forks_are_branches():
    with made() as repository:
        history(repository, 4)
        for step in (20, 30):
            repository.save({"w": np.arange(9)}, run="b", step=step, parent="a@10" if step == 20 else None)
        repository.save({"w": np.arange(9)}, run="a", step=15, parent="a@10")
        branches = report_figures._branches(collected(repository).snapshots)
        assert [[s.ref for s in branch] for branch in branches] == [
            ["a@0", "a@10", "a@20", "a@30"],
            ["a@15"],
            ["b@20", "b@30"],
        ]
        (lineage, *_) = json.loads(figures_of(repository.report().html))
        fork = next(trace for trace in lineage["data"] if trace["name"] == "fork")
        assert fork["x"] == [10, 15, None, 10, 20, None]
        aborted = msgspec.structs.replace(repository.snapshot("a@0"), id="f" * 32, state="aborted", parent=None)
        found = collected(repository)
        found.snapshots.insert(0, aborted)
        assert report_figures._branches(found.snapshots) == [[*branches[0], aborted], *branches[1:]]
        assert len(report_figures.over_steps(found, lambda s: s.stall_s)[0][1]) == 5, "it is no save"
        alone = collected(repository, ["b"])
        assert [s.ref for s in alone.snapshots] == ["b@20", "b@30"]


def figures_of(page):
    return re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)[1]


def test_many_snapshots_are_sampled_and_thinned(monkeypatch):
    monkeypatch.setattr(report, "SAMPLED_STEPS", 5)
    monkeypatch.setattr(report_figures, "MOST_POINTS", 10)
    monkeypatch.setattr(report_figures, "MOST_NODES", 10)
    with made() as repository:
        history(repository, 30)
        page = repository.report()
        assert (page.snapshots, page.sampled) == (30, 5)
        assert "5 of 30 kept snapshots" in page.html
        assert "10 of 30 points are drawn" in page.html
        assert "of 30 snapshots are drawn" in page.html
        stored = json.loads(figures_of(page.html))[1]["data"][0]
        assert stored["x"][0] == 0
        assert stored["x"][-1] == 290
        assert len(stored["x"]) == 10


def test_the_sample_of_many_runs_is_limited():
    with made() as repository:
        for run, count in (("a", 9), ("b", 5), ("c", 1), ("d", 2)):
            for step in range(count):
                repository.save({"w": np.arange(9) + step}, run=run, step=step)
        kept = {run: list(repository.snapshots(run)) for run in "abcd"}
        found = {run: [s.step for s in some] for run, some in report._spread(kept, 10).items()}
        assert found == {"a": [0, 4, 8], "b": [0, 4], "c": [0], "d": [0, 1]}


def test_a_damaged_manifest_is_named_and_the_rest_is_shown(tmp_path):
    with made(tmp_path / "r") as repository:
        history(repository)
        damaged = repository.snapshot("a@30")
        key = manifest_key(damaged.manifests[0].sha256)
    file = tmp_path / "r" / key
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with Repository.open(tmp_path / "r") as repository:
        page = repository.report()
        assert list(page.unread) == ["a@30"]
        assert "a@30" in page.html.split("Steps that could not be read")[1]
        assert page.sampled == 5
        assert page.snapshots == 6
    out = tmp_path / "run.html"
    result = invoke(["report", "-o", str(out), "--repo", str(tmp_path / "r"), "--json"])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["unread"] == page.unread
    assert "a@30 could not be read" in result.stderr
    assert out.stat().st_size == json.loads(result.stdout)["bytes"]


def test_a_snapshot_that_a_gc_deletes_meanwhile_is_named(monkeypatch):
    with made() as repository:
        history(repository)
        read = report.read_tensors

        def forgetting(context, snapshot):
            if snapshot.step == 20 and repository.snapshot("a@20").state == "committed":
                repository.forget_snapshots(["a@20"])
                repository.gc()
                repository.save({"w": np.arange(5)}, run="a", step=60)
            return read(context, snapshot)

        monkeypatch.setattr(report, "read_tensors", forgetting)
        page = repository.report()
        assert list(page.unread) == ["a@20"]
        assert "deleted by a gc" in page.unread["a@20"]
        assert page.sampled == 5


def test_bad_input(tmp_path, monkeypatch):
    with made(tmp_path / "r") as repository:
        with pytest.raises(NotFoundError, match="no snapshots"):
            repository.report()
        history(repository, 2)
        with pytest.raises(NotFoundError, match=r"run 'b': has no snapshots in this repository; runs: a"):
            repository.report(["b"])
        with pytest.raises(InvalidInputError, match="storage_price"):
            repository.report(storage_price=-1)
        with pytest.raises(InvalidInputError, match="runs"):
            repository.report("a")
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        with pytest.raises(CapabilityError, match=r'pip install "snapstore\[report\]"'):
            repository.report()


def test_the_shell_refuses_an_output(tmp_path):
    with made(tmp_path / "r") as repository:
        history(repository, 2)
    out, repo = tmp_path / "run.html", ["--repo", str(tmp_path / "r")]
    assert "pass -o" in invoke(["report", *repo]).stderr
    assert "is not a folder" in invoke(["report", "-o", str(tmp_path / "no" / "run.html"), *repo]).stderr
    assert "is a folder" in invoke(["report", "-o", str(tmp_path), *repo]).stderr
    assert "run 'b'" in invoke(["report", "b", "-o", str(out), *repo]).stderr
    assert not out.exists()
    result = invoke(["report", "a", "-o", str(out), *repo])
    assert result.exit_code == 0, result.output
    assert "2 steps sampled" in result.stdout
    page = out.read_bytes()
    assert "--force" in invoke(["report", "-o", str(out), *repo]).stderr
    assert out.read_bytes() == page
    assert invoke(["report", "-o", str(out), "--force", "--values", *repo]).exit_code == 0
    assert b"Relative L2" in out.read_bytes()


def test_names_of_layers():
    paths = {
        ("model", "h.3.attn.weight"): "model.h.3",
        ("model", "wte.weight"): "model.wte",
        ("optimizer", "state", 3, "exp_avg"): "optimizer.*.exp_avg",
        ("w",): "w",
        (): "",
    }
    assert {path: changed_elements.layer_of(path) for path in paths} == paths


def test_snapshots_of_several_ranks():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8192, generator=generator)
    with made() as repository:
        for step in range(3):
            changed = whole.clone()
            changed[: 90 * step] += 1e-3

            def make(value=changed):
                return {"w": value}

            rank_saves.save(repository, [make] * 4, step)
        steps = collected(repository, ["r"]).sampled["r"]
        assert [step.ranks for step in steps] == [4, 4, 4]
        shares = [step.layers["w"].share for step in steps[1:]]
        assert shares == [90 / 8192, 90 / 8192]
        stall_s = sum(step.snapshot.stall_s for step in steps)
        assert f"{4 * stall_s:,.4g} GPU s" in repository.report().html


def test_a_repository_on_s3(monkeypatch):
    with moto_bucket(monkeypatch, "reported") as url, made(url) as repository:
        history(repository, 3)
        page = repository.report(values=True)
        assert (page.sampled, page.valued, page.unread) == (3, 3, {})
        assert "s3://reported" in page.html
