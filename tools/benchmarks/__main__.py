"""Run one benchmark: `python -m benchmarks NAME [options]`; tools/bench prepares what it needs."""

import sys
from importlib import import_module

BENCHMARKS = ("cpu", "s3", "scale", "compact", "gpu", "ranks", "bytes", "import", "copies")


def main() -> None:
    """Run the benchmark that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        sys.exit(f"bench: expected one of {', '.join(BENCHMARKS)}, got '{name}'; see tools/bench --help")
    sys.argv[:2] = [f"tools/bench {name}"]
    import_module(f"benchmarks.{'importing' if name == 'import' else name}").main()


if __name__ == "__main__":
    main()
