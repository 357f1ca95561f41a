"""Any arguments of the shell cost at most an error: never a traceback, and never a tagged snapshot."""

import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kit.forge import little_memory, little_time
from kit.samples import SEED, THOROUGH, examples
from kit.shell import invoke
from kit.tally import EXAMPLES, tally
from snapstore import Repository, SaveOptions, cli

VERBS = {
    name: [param for param in command.params if param.name not in ("repo", "verbose")]
    for name, command in typer.main.get_command(cli.commands).commands.items()
    if name not in ("demo", "doctor")  # they train, and measure the machine
}
CODES = {0, 1, 2, 3, 10, 11, 20}
#: Arguments that some verb takes, tried with every verb.
TYPED = st.sampled_from(
    [
        *("r@0", "r@1", "r@latest", "r@kept", "r@-1", "r@999999999999999999999", "r", "@", "r@", "@0", "id:", "id:z"),
        *("r@1@2", "state.pt", "nothing.pt", ".", "repo", "repo/config", "out.pt", "out.safetensors"),
        *("rebuild", "portable", "ans", "metadata", "data", "0", "1", "-1", "3", "2.5", "10G", "-5M", "1e309", "nan"),
        *("inf", "10%", "101%", "99999999999999999999999", "12h", "7d", "-3s", "loss", "loss=1", "loss=nan", "loss="),
        *("=1", "loss:3:min", "loss:0:max", "loss:x", "1,2,x", ",", "", " ", "--", "-", "[bold]", "%s{0}"),
        *("s3://", "s3://x/../y", "memory://", "ftp://x", "file:///nowhere", "\u202e", "ü" * 300, "\0"),
    ]
)
values = TYPED | st.integers().map(str) | st.text(st.characters(exclude_characters="/"), max_size=12)


@st.composite
def lines(draw):
    """Draw a verb, some of its options or another verb's, and values for them."""
    verb = draw(st.sampled_from(sorted(VERBS)))
    args = [verb]
    params = VERBS[verb] if draw(st.integers(0, 9)) else VERBS[draw(st.sampled_from(sorted(VERBS)))]
    for param in draw(st.lists(st.sampled_from(params), max_size=5)):
        if param.opts[0].startswith("-"):
            args.append(draw(st.sampled_from(param.opts)))
        if not getattr(param, "is_flag", False):
            args.append(draw(values))
    return args


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a repository of two snapshots, one of them tagged, and a file to save."""
    folder = tmp_path_factory.mktemp("shell")
    with Repository.create(folder / "repo", chunk_bytes=1024, options=SaveOptions(threads=1)) as repository:
        for step in range(2):
            repository.save({"w": torch.full((500,), step)}, run="r", step=step, tags=["kept"] if step == 0 else [])
    torch.save({"w": torch.zeros(500)}, folder / "state.pt")
    return folder


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    """Make a copy the working directory: files that a line writes stay there for the lines after it."""
    folder = tmp_path_factory.mktemp("place") / "here"
    shutil.copytree(made, folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@settings(max_examples=examples(100 + 30 * EXAMPLES), deadline=None)
@given(lines())
@example(["forget", "--run", "r", "--keep-last", "99999999999999999999999"])
@example(["compact", "--max-repack-size", "1e309"])
@example(["gc", "--fence-after", "nan"])
@example(["tag", "r@0", "r@0", "-v"])
@example(["estimate", "--params", "7e9"])
def test_any_line(made, place, args):
    """Mitigation: every value is checked where it is read; any other error ends as a message and an exit code."""
    tally("fuzz inputs")
    traced = THOROUGH or zlib.crc32(repr(args).encode()) % 5 == SEED % 5  # it takes five times as long
    with little_memory(128 * 1024 * 1024) if traced else little_time():  # modules that a verb imports first included
        result = invoke(args, env={"SNAPSTORE_REPO": str(place / "repo")})
    said = (args, result.exit_code, result.output[-2000:])
    assert result.exception is None or isinstance(result.exception, SystemExit), said
    assert result.exit_code in CODES, said
    asked = any(arg.startswith("-") and "v" in arg for arg in args)  # -v shows where an error comes from
    assert asked or "Traceback" not in result.output, said
    assert "this is a bug" not in result.output, said
    if not (place / "repo" / "config").is_file() or "untag" in args:
        shutil.rmtree(place / "repo", ignore_errors=True)
        shutil.copytree(made / "repo", place / "repo")
    with Repository.open(place / "repo", options=SaveOptions(threads=1)) as repository:
        np.testing.assert_array_equal(repository.restore("r@kept")["w"].numpy(), np.zeros(500))
