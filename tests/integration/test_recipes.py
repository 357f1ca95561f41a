"""The scripts of docs/guides/recipes.md end with the same bits whether they are interrupted or not."""

import sys

import pytest

from kit.processes import ROOT
from kit.repositories import same


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("number", [0, 1, 2], ids=["loader", "average", "gradients"])
def test_a_recipe_resumes_to_the_bit(number, tmp_path, monkeypatch):
    if number == 0:
        pytest.importorskip("torchdata")
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    script = page.split("```python\n")[1 + number].split("```")[0]
    for interval in ("=100", "=30"):
        script = script.replace(f"interval_steps{interval}", "interval_steps=3")
    assert "interval_steps=3)" in script

    def end(folder, total):
        monkeypatch.setattr(sys, "argv", ["train.py", str(total)])
        names = {}
        exec(script.replace("/data/snapshots", str(tmp_path / folder)), names)
        parts = {name: value.value if name == "loader" else value for name, value in names["state"].items()}
        return {name: value.state_dict() for name, value in parts.items() if name != "loader"}

    whole = end("whole", 20)
    assert not same(end("parts", 11), whole)  # the last snapshot is of step 9
    assert same(end("parts", 20), whole)
