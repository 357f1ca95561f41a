"""The tables of docs/benchmarks.md match the records in docs/benchmarks/."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks"


@pytest.fixture
def tools(monkeypatch):
    """Return the modules of the benchmarks."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from benchmarks import gpu, gpu_page, page

    return SimpleNamespace(page=page, gpu_page=gpu_page, gpu=gpu)


@pytest.fixture
def copy(tools, monkeypatch, tmp_path):
    """Copy the page and the GPU's records to a folder that tests may change; return its path."""
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    for name in ("benchmarks.md", *(f"benchmarks/{name}.json" for name in tools.gpu_page.RECORDS)):
        (tmp_path / "docs" / name).write_bytes((ROOT / "docs" / name).read_bytes())
    monkeypatch.setattr(tools.page, "ROOT", tmp_path)
    monkeypatch.setattr(tools.gpu_page, "ROOT", tmp_path)
    return tmp_path / "docs"


def record(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


@pytest.mark.parametrize("bench", ["cpu", "compact", "history", "import", "ranks", "scale"])
def test_the_figures_of_the_page_match_the_record(tools, bench):
    assert tools.page.figures(record(bench)["figures"]) in tools.page.placed(bench)


def test_the_gpus_section_is_what_its_records_give(tools):
    assert tools.page.placed("gpu") == tools.gpu_page.section({n: record(n) for n in tools.gpu_page.RECORDS})


def test_the_table_of_resumed_trainings_matches_its_record(tools):
    from resume_matrix import record as resume

    there = (RECORDS / "resume.json").exists()  # a whole run takes long, so it is not made for each change
    assert tools.page.placed("resume") == (resume.table(record("resume")) if there else "")


def test_page_writes_the_gpus_section_again_and_nothing_else(tools, copy, monkeypatch):
    page = copy / "benchmarks.md"
    whole = page.read_text()
    tools.page.place("gpu", "stale\n")
    assert page.read_text() != whole
    monkeypatch.setattr(sys, "argv", ["tools/bench gpu", "--page"])
    tools.gpu.main()
    assert page.read_text() == whole
    page.write_text(whole.replace("<!-- end of gpu -->", ""))
    with pytest.raises(ValueError, match="two marks"):
        tools.page.place("gpu", "")
    assert tools.page.placed("scale")  # other sections still have their marks


def test_rows_of_an_earlier_run_keep_its_machine_and_versions(tools, copy, monkeypatch):
    monkeypatch.setenv("SNAPSTORE_THREADS", "2")  # compact sets it
    from benchmarks import compact

    monkeypatch.setattr(compact, "ROOT", copy.parent)
    monkeypatch.setattr(compact.torch, "set_num_threads", lambda _: None)
    (copy / "benchmarks" / "compact.json").write_text(json.dumps(record("compact")))
    monkeypatch.setattr(sys, "argv", ["tools/bench compact", "--survey"])
    monkeypatch.setattr(tools.page, "machine", lambda: "another machine")
    monkeypatch.setattr(compact, "surveyed", lambda *_: [tools.page.row("survey of 7 chunks", 1.0, "s")])
    monkeypatch.setattr(compact, "get_context", lambda _: SimpleNamespace(Pool=lambda _: Here()))
    for _ in range(2):  # the rows keep them in a later run, too
        compact.main()
        measured = json.loads((copy / "benchmarks" / "compact.json").read_text())
        *kept, new = measured["figures"]
        before = record("compact")
        of_run = {name: before[name] for name in ("machine", "versions")}
        assert kept == [of_run | one for one in before["figures"] if not one["name"].startswith("survey")]
        assert (new["name"], new.get("machine"), measured["machine"]) == ("survey of 7 chunks", None, "another machine")


class Here(SimpleNamespace):
    """A pool that works in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def apply(self, function, arguments):
        return function(*arguments)


@pytest.mark.parametrize("arguments", [["--tiny"], ["--tiny", "--only", "limits"], ["--out", "{}/other.json"]])
def test_a_run_that_is_not_the_whole_bench_leaves_the_page_alone(tools, copy, monkeypatch, tmp_path, arguments):
    tools.page.place("gpu", "of another run\n")
    before = (copy / "benchmarks.md").read_bytes()
    assert whole_bench(tools, copy, monkeypatch, tmp_path, arguments) == before


def test_the_whole_bench_writes_its_record_and_the_page(tools, copy, monkeypatch, tmp_path):
    page = whole_bench(tools, copy, monkeypatch, tmp_path, [])
    measured = json.loads((copy / "benchmarks" / "gpu.json").read_text())
    records = {"gpu": measured} | {name: record(name) for name in tools.gpu_page.RECORDS[1:]}
    assert measured["sections"] == {}
    assert tools.gpu_page.section(records) in page.decode()


def test_a_failed_section_leaves_the_record_and_the_page_alone(tools, copy, monkeypatch, tmp_path):
    before = [path.read_bytes() for path in sorted(copy.rglob("*.*"))]

    def run(bench, *_):
        bench.sections |= {"limits": {"status": "ok"}, "steps": {"status": "failed", "error": "RuntimeError: none"}}

    with pytest.raises(SystemExit, match=r"these sections failed.*: steps; see .*gpu.json"):
        whole_bench(tools, copy, monkeypatch, tmp_path, [], run)
    assert [path.read_bytes() for path in sorted(copy.rglob("*.*"))] == before


def test_a_section_that_does_not_exist_is_refused(monkeypatch, capsys, tools):
    monkeypatch.setenv("SNAPSTORE_THREADS", "2")  # cpu sets it
    from benchmarks import cpu

    monkeypatch.setattr(sys, "argv", ["tools/bench cpu", "--quick", "--only", "comapre"])
    with pytest.raises(SystemExit):
        cpu.main()
    assert "--only: no section comapre; sections: compare, engine, retained, memory, plain" in capsys.readouterr().err


def whole_bench(tools, copy, monkeypatch, tmp_path, arguments, run=lambda *_: None):
    """Run the GPU benchmark with sections that do nothing; return the page after it."""
    monkeypatch.setattr(sys, "argv", ["tools/bench gpu", *(a.format(tmp_path) for a in arguments)])
    monkeypatch.setattr(tools.gpu, "ROOT", copy.parent)
    monkeypatch.setattr(tools.gpu, "run", run)
    monkeypatch.setattr(tools.gpu.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(tools.gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tools.gpu, "head", lambda _: {k: record("gpu")[k] for k in ("date", "machine", "versions")})
    tools.gpu.main()
    return (copy / "benchmarks.md").read_bytes()


def test_figures_that_an_old_record_lacks_are_computed_from_its_sections(tools):
    old = record("gpu-slower-host")
    found = tools.gpu_page.figures(old)
    assert found["to_host_ratio"] == (pytest.approx(49.9077 / 55.242, abs=1e-5), False)
    waits = (1.003 + 0.562 + 0.538) / 50
    steps = (0.08154 + 0.08086 + 0.08185 + 0.08142 + waits) / (0.08013 + 0.08005 + 0.08016 + 0.08025)
    assert found["train_step_sustained_ratio"] == (pytest.approx(steps), None)
    old["figures"]["to_host_ratio"] = {"value": 1.06, "goal": ">= 1.05", "met": True, "how": "measured"}
    assert tools.gpu_page.figures(old)["to_host_ratio"] == (1.06, True)
    for name in ("engine", "steps"):  # sections that failed
        old["sections"][name] = {"status": "failed", "error": "RuntimeError: none"}
    del old["figures"]["to_host_ratio"]
    found = tools.gpu_page.figures(old)
    assert (found["to_host_ratio"], found["train_step_sustained_ratio"]) == ((None, False), (None, None))
    assert "| that / a raw pinned copy | >= 1.05 | - |  |" in tools.gpu_page.section({"old": old})


def test_the_page_compares_with_the_recipe_that_stores_less(tools):
    def row(who, gap, stored, **kinds):
        return {"regime": "r", "gap": gap, "who": who, "stored_bytes": stored, "share": stored / 100, "kinds": kinds}

    rows = [row("nvCOMP Zstd", 0, 90, p=0.9), row("nvCOMP ANS", 0, 80, p=0.8), row("nvCOMP ANS typed", 0, 1, p=0.01)]
    rows += [row("nvCOMP ANS", 1, 70, p=0.7), row("nvCOMP Zstd", 1, 60, p=0.5, m=0.7), row("zstd -1", 1, 65, p=0.65)]
    section = tools.gpu_page.section({"gpu": record("gpu") | {"sections": {"sizes": {"rows": rows}}}})
    assert "| r | full | p | - | - | 0.800 | - |\n| r | 1 | p | - | - | 0.600 (0.500 0.700) | 0.650 |\n" in section
    assert "| ans | nvCOMP ANS or nvCOMP Zstd | zstd -1 |" in section


def test_the_sustained_step_waits_for_every_save(tools, monkeypatch):
    """The sustained ratio counts the whole wait for a save, until it is committed.

    A step takes 1 s and a save 14 s. The loop waits for the first second of the save, and 10 steps later for 3 s more.
    """
    now, figures = [0.0], {}

    def train(steps):
        now[0] += steps

    def save(number, state):
        assert now[0] >= done[-1], "the previous save has ended"
        now[0] += 1
        done.append(now[0] + 13)
        return SimpleNamespace(result=lambda: now.__setitem__(0, max(now[0], done[-1])))

    done = [0.0]
    monkeypatch.setattr(tools.gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tools.gpu, "manager", lambda *_: Managed(save))
    bench = tools.gpu.Bench.__new__(tools.gpu.Bench)
    bench.device, bench.tiny, bench.folder = tools.gpu.torch.device("cpu"), True, None
    bench.live, bench.figure = dict, lambda name, value, how: figures.update({name: value})
    bench.trainer = SimpleNamespace(train=train)
    found = tools.gpu.section_steps(bench)
    assert figures == {"train_step_ratio": pytest.approx(1.1), "train_step_sustained_ratio": pytest.approx(1.4)}
    assert found["outlasted_s"] == [3, 3, 3, 3]
    assert now[0] == 2 * (14 + 5) + 4 * 10 + 4 * 14, "the steps of the blocks and of the first saves, and no others"


@pytest.mark.parametrize("peer", ["torch.save", "dcp.save, dcp.load"])
def test_peers_save_and_load_as_warm_as_snapstore(tools, monkeypatch, tmp_path, peer):
    """Each time is the median of three calls after a cold one, and each save finds nothing at its path."""
    import torch
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from benchmarks import gpu_limits, gpu_peers

    now, calls = [0.0], {"save": [], "load": []}

    def slow(verb, real):
        def call(*args, **options):
            calls[verb].append(sorted(tmp_path.rglob("*")))
            now[0] += [100.0, 1.0, 9.0, 2.0][len(calls[verb]) - 1]
            return real(*args, **options)

        return call

    saver, loader = (torch, torch) if peer == "torch.save" else (state_dict_saver, state_dict_loader)
    monkeypatch.setattr(saver, "save", slow("save", saver.save))
    monkeypatch.setattr(loader, "load", slow("load", loader.load))
    monkeypatch.setattr(gpu_peers, "coders", lambda _: ([], {}))
    for other in ("_dcp_async", "_dcp" if peer == "torch.save" else "_torch_save"):  # DCP calls torch.save, too
        monkeypatch.setattr(gpu_peers, other, lambda *_: {})
    monkeypatch.setattr(gpu_limits, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    state = {"p": {"w": torch.arange(8.0)}}
    rows = gpu_peers.times(state, torch.device("cpu"), tmp_path, lambda _: None)
    (row,) = (one for one in rows if one["peer"] == peer)
    assert (row["total_s"], row["load_s"]) == (2.0, 2.0), row
    assert calls["save"] == [[]] * 4
    assert len(calls["load"]) == 4


class Managed(SimpleNamespace):
    """A manager that only saves."""

    def __init__(self, save):
        super().__init__(save=save)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None
