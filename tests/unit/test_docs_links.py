"""The pages for users are right: their links exist, their Python code compiles, and the shell knows their commands.

The code of the README and of the saving guide also runs.
"""

import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path

import click
import pytest
import torch
import typer

import snapstore
import snapstore.cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def without_code(text):
    """Return the prose of a page, without its code: brackets in code are no links."""
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problem(page, link):
    """Return what is wrong with a relative link; empty if nothing is."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target):
        return f"{link}: no such heading; there are: {', '.join(sorted(anchors(target)))}"
    return ""


def blocks(page):
    """Return the blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    relative = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    problems = [found for link in relative if (found := problem(page, link))]
    assert not problems


def test_a_link_that_leads_nowhere_is_found():
    page = ROOT / "README.md"
    assert problem(page, "docs/none.md") == "docs/none.md: no such file"
    assert "no such heading" in problem(page, "docs/concepts.md#none")
    assert not problem(page, "docs/concepts.md#words")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_item_of_a_list_begins_a_line(page):
    """An item that begins within a line is shown as a part of the item before."""
    assert not re.findall(r"[.:)] - [A-Z`].*", without_code(page.read_text()))


def test_python_blocks_compile():
    found = [(page, block) for page in PAGES for block in blocks(page)]
    assert len(found) >= 8
    for page, block in found:
        compile(block, str(page), "exec")


def test_the_readme_code_runs(tmp_path):
    (block,) = blocks(ROOT / "README.md")
    code = block.replace("/data/snapshots", str(tmp_path / "snapshots"))
    assert code != block
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []

    def train(model, optimizer, batch):
        steps.append(batch)
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    loader = torch.utils.data.DataLoader(torch.randn(202, 4), 2, shuffle=True)
    names = {"model": model, "optimizer": optimizer, "train": train, "loader": loader}
    exec(code, {**names, "total": 101})
    assert len(steps) == 101
    exec(code, {**names, "total": 201})  # resumes after step 100, with the last batch of the epoch
    assert len(steps) == 101 + 101
    assert torch.equal(steps[100], steps[101])
    with snapstore.Repository.open(tmp_path / "snapshots") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("exp1")] == [100, 200]
        assert all(snapshot.metrics["loss"] > 0 for snapshot in repository.snapshots("exp1"))


def test_the_script_of_the_saving_guide_runs(tmp_path, monkeypatch, capsys):
    """The script runs and resumes; its intervals are shorter here, since 100 steps are slow on a busy machine."""
    page = blocks(ROOT / "docs" / "guides" / "saving.md")[0]
    script = page.replace("/data/snapshots", str(tmp_path / "snapshots")).replace(
        "interval_steps=100", "interval_steps=2"
    )
    for total in ("3", "4"):
        monkeypatch.setattr(sys, "argv", ["train.py", total])
        exec(script, {})
    assert capsys.readouterr().out.splitlines() == ["starting at step 1", "starting at step 3"]


def test_the_demo_picture_has_no_blanks_at_the_edges_of_texts():
    """Viewers drop such blanks, so that a text moves and overlaps the one before it."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", (ROOT / "docs" / "demo.svg").read_text())
    assert "PASS" in texts
    assert not [text for text in texts if re.search(r"^(\s|&#160;)|(\s|&#160;)$|\s\s|&#160;", text)]


def test_the_shell_understands_the_commands_of_the_pages():
    group = typer.main.get_command(snapstore.cli.commands)
    found = [(page, line) for page in PAGES for line in re.findall(r"^ *\$ snapstore (.+)$", page.read_text(), re.M)]
    assert len(found) > 20
    problems = []
    for page, line in found:
        words = list(takewhile(lambda word: word not in ("|", ">", "&&", ";", "&"), shlex.split(line, comments=True)))
        name, *arguments = words or [""]
        try:
            if name not in ("-h", "--version"):
                group.commands[name].make_context(name, arguments, allow_interspersed_args=True)
        except (click.UsageError, KeyError) as error:
            problems.append(f"{page.name}: {line}: {error}")
        except click.exceptions.Exit:  # raised by --help
            pass
    assert not problems
