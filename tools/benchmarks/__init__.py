"""The benchmarks: every figure of docs/benchmarks.md, measured beside its peers in the same run.

`tools/bench` runs one of them: cpu.py, s3.py, scale.py, compact.py, gpu.py, ranks.py, bytes.py or importing.py. Each
has a `main`. They share data.py (states of real training runs), peers.py (the other ways to save a state) and page.py
(a figure, its record under docs/benchmarks/, its table in docs/benchmarks.md). The modules gpu_*.py belong to gpu.py,
ranks_*.py to ranks.py, bytes_*.py to bytes.py; history.py and history_write.py to scale.py; cpu_cores.py,
engine_stages.py, plain_state.py and small_tensors.py to cpu.py. Read page.py first.
"""
