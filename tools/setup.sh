# Makes .venv in the repository root if it is missing, and installs snapstore with its development tools into it. Sourced
# by tools/demo and tools/test, or run by itself: bash tools/setup.sh. A moment's work where nothing has changed. A
# change of the C sources builds the extension again; without a C compiler there is none.
#
# Versions are those of tools/constraints.txt. A torch that the chosen Python has already (say, a CUDA build) is used as
# it is, but not that of another virtual environment; PYTHON=/path/to/python3 chooses another Python.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

snapstore_base_python() {
    local python candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [ -n "${PYTHON:-}" ] && candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
    echo "setup: snapstore needs Python 3.11 or later; ${candidates[0]}: $("${candidates[0]}" --version 2>&1)." >&2
    echo "setup: install one, or name it: PYTHON=/path/to/python3 $0" >&2
    return 1
}

snapstore_torch_version() { # of the interpreter $1; empty if it has none
    "$1" -c 'from importlib import metadata; print(metadata.version("torch"))' 2>/dev/null || true
}

snapstore_setup() {
    local stamp=.venv/snapstore-setup.stamp inputs base torch constraints=tools/constraints.txt
    inputs="$PWD $(cat pyproject.toml tools/constraints.txt tools/setup.sh snapstore/engine/native/* | cksum)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ] && [ -n "$(snapstore_torch_version .venv/bin/python)" ] && return

    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        base=$(snapstore_base_python) || return 1
        torch=$(snapstore_torch_version "$base")
        "$base" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' || torch= # .venv would not see its packages
        echo "setup: making .venv with $("$base" --version)${torch:+, which has torch $torch}"
        "$base" -m venv --clear ${torch:+--system-site-packages} .venv || {
            echo "setup: $base could not make .venv; on Debian and Ubuntu: apt install python3-venv" >&2
            return 1
        }
    fi

    torch=$(snapstore_torch_version .venv/bin/python)
    if [ -n "$torch" ]; then
        constraints=.venv/constraints.txt
        { sed '/^# torch:/,$d' tools/constraints.txt; echo "torch==$torch"; } >"$constraints"
        echo "setup: installing snapstore into .venv, beside torch $torch"
    else
        echo "setup: installing snapstore and torch (CPU) into .venv; this may take a few minutes"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' -c "$constraints" || {
        echo "setup: pip failed; run it again once the cause shown above is gone" >&2
        return 1
    }
    echo "$inputs" >"$stamp"
    echo "setup: .venv is ready"
}

snapstore_setup || exit 1
