"""report: its page in a real browser. It draws all figures without any network, fits a phone, and no name runs as code.

SNAPSTORE_TEST_SCREENSHOTS=DIR keeps a picture of each page there.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kit.browser import opened
from snapstore import KeepLast, SaveOptions
from snapstore.repository import Repository
from snapstore.storage.memory import MemoryStore

HOSTILE = [
    "</script><script>document.title='hit'</script>",
    "<img src=x onerror=\"document.title='hit'\">",
    "<a href='https://example.com'>x</a> <b>bold</b> &lt; &amp; %{y} $x$",
    "\u202e right to left \u2028 line",
]


@pytest.fixture
def page(tmp_path):
    """Return the file of a page about two runs with hostile names of tensors and metrics; and its figures."""
    rng = np.random.default_rng(3)
    weights = {name: rng.standard_normal(4000).astype(np.float32) for name in [*HOSTILE, "h.0.w", "h.1.w"]}
    with Repository.create(MemoryStore(), chunk_bytes=4096, options=SaveOptions(threads=1)) as repository:
        for step in range(12):
            for name in weights:
                weights[name] = weights[name].copy()
                weights[name][rng.integers(0, 4000, 40)] += np.float32(1e-3)
            metrics = dict.fromkeys(HOSTILE, float(step)) | {"loss": 1 / (1 + step), "bad": float("nan")}
            run = "run" if step < 8 else "a-fork-with-a-rather-long-name.of-64-characters.as-trainers-make"
            repository.save(
                {"model": weights, HOSTILE[0]: {HOSTILE[1]: weights["h.0.w"] + step}}, run=run, step=step,
                metrics=metrics, parent="run@4" if step == 8 else None, tags=["best"] if step == 5 else [],
            )  # fmt: skip
        repository.forget(KeepLast(6), run="run")
        found = repository.report(values=True)
    file = tmp_path / "run.html"
    file.write_text(found.html, encoding="utf-8")
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', found.html, re.DOTALL)[1]
    return file, json.loads(figures)


@pytest.mark.slow
def test_page_in_a_browser(page, tmp_path):
    file, figures = page
    with opened(file) as browser:  # one browser: to start one takes seconds
        for width in (360, 1200):
            check_figures(browser, figures, width, Path(os.environ.get("SNAPSTORE_TEST_SCREENSHOTS") or tmp_path))
        check_names(browser)


def check_figures(browser, figures, width, folder):
    """Load the page, and check that all figures are there, in the width of the screen, without any request."""
    browser.load(width)
    shown = folder / f"report-{width}.png"
    browser.screenshot(shown)
    print(f"the page at {width} pixels: {shown}")  # pytest shows it if the test fails
    assert browser.evaluate("document.body.dataset.drawn") == "yes"
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("data:")] == []
    loaded = "[...document.querySelectorAll('[src],link[href]')].map(e => e.src || e.href)"
    assert [url for url in browser.evaluate(loaded) if not url.startswith("data:")] == []
    of_each = "e => [e.data.length, e.querySelectorAll('.main-svg').length]"
    drawn = browser.evaluate(f"[...document.querySelectorAll('.plot')].map({of_each})")
    assert [traces for traces, _ in drawn] == [len(figure["data"]) for figure in figures]
    assert len(figures) > 20
    assert all(surfaces for _, surfaces in drawn)
    for kind in ("scatter", "bar"):
        traces = [t for figure in figures for t in figure["data"] if t["type"] == kind and t["x"]]
        assert browser.evaluate(f"document.querySelectorAll('.plot .{kind}layer .trace').length") == len(traces), kind
    heat_maps = browser.evaluate("document.querySelectorAll('.plot .heatmaplayer .hm').length")
    assert heat_maps == 6, "changed elements, relative L2 and cosine, of two runs"
    assert browser.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    widths = browser.evaluate("[...document.querySelectorAll('.plot .svg-container')].map(e => e.offsetWidth)")
    assert all(width - 140 < one <= width for one in widths), widths
    assert shown.stat().st_size > 50_000


def check_names(browser):
    """Check that names of metrics, parts and layers are shown as they are, and that no code of theirs can run."""
    assert browser.evaluate("document.title").startswith("snapstore: ")
    headings = browser.evaluate("[...document.querySelectorAll('h3')].map(e => e.textContent)")
    for name in HOSTILE[:3]:
        assert name in headings, "a metric"
    assert "\\u202e right to left \\u2028 line" in headings
    labels = browser.evaluate("[...document.querySelectorAll('.plot text')].map(e => e.textContent)")
    assert any(text.startswith("</script><script>") for text in labels), "a part"
    assert any(text.startswith("model.<a href='https://") for text in labels), "a layer"
    for what in ("img", ".plot a", "main a", ".plot b"):
        assert browser.evaluate(f"document.querySelectorAll({json.dumps(what)}).length") == 0, what
    inline = "(() => { const s = document.createElement('script'); s.textContent = 'document.title = \"hit\"';"
    browser.evaluate(f"{inline} document.body.append(s) }})()")
    assert browser.evaluate("document.title") != "hit", "the policy of the page lets no other script run"
    browser.evaluate("fetch('https://example.com/').catch(() => 0)")
    assert any("Content Security Policy" in text for text in browser.problems), "nor load anything"
