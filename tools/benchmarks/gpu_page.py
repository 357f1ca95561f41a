"""The figures of `tools/bench gpu` with their goals, and its section of docs/benchmarks.md, from the records only.

The records after the first are of other hosts, or of some sections, written with `--out`; a record that is not there
has no column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from benchmarks.gpu_peers import better_recipes
from benchmarks.page import ROOT, place, table

RECORDS = (
    "gpu", "gpu-slower-host", "gpu-third-host", "gpu-newest", "gpu-h100", "gpu-32-cores", "gpu-llamas", "gpu-sparse",
    "gpu-peers", "gpu-h100-llamas",
)  # fmt: skip
Record = Mapping[str, Any]


class Goal(NamedTuple):
    """A figure: its label on the page, the factor from its value to the unit, and its goal."""

    label: str
    scale: float
    unit: str
    goal: str = ""
    sign: Literal["<=", ">=", ""] = ""
    bound: float = 0

    def met(self, value: float | None, bound: float | None = None) -> bool | None:
        """Return None if there is no goal, False if there is no value; `bound` replaces the goal's own."""
        if not self.sign:
            return None
        bound = self.bound if bound is None else bound
        return value is not None and (value <= bound if self.sign == "<=" else value >= bound)


#: stall_device_s and stall_host_s have bounds that are measured as well.
GOALS: dict[str, Goal] = {
    "stall_device_s": Goal("the loop waits, staging on the device", 1e3, "ms", "<= 2 x copy_floor_s + 0.002", "<="),
    "copy_floor_s": Goal("copy_floor_s: that copy at the device's speed", 1e3, "ms"),
    "stall_host_s": Goal("the loop waits, staging on the host", 1e3, "ms",
                         "<= 1.2 x a raw pinned copy of the same bytes", "<="),
    "stall_host_ratio": Goal("that / a raw pinned copy", 1, "x", "<= 1.2", "<=", 1.2),
    "digest_GBps": Goal("digests", 1, "GB/s", ">= 1500", ">=", 1500),
    "delta_planes_GBps": Goal("delta and planes", 1, "GB/s", ">= 1000", ">=", 1000),
    "encode_portable_GBps": Goal("encode, portable, by device time", 1, "GB/s", ">= 60", ">=", 60),
    "encode_ans_GBps": Goal("encode, ANS, by device time", 1, "GB/s", ">= 150", ">=", 150),
    "sparse_encode_GBps": Goal("encode a sparse delta, by device time", 1, "GB/s", ">= 100", ">=", 100),
    "sparse_decode_GBps": Goal("restore a sparse delta, by device time", 1, "GB/s", ">= 500", ">=", 500),
    "to_host_GBps": Goal("state, its compressed bytes in pinned memory", 1, "GB/s", ">= 58", ">=", 58),
    "to_host_ratio": Goal("that / a raw pinned copy", 1, "x", ">= 1.05", ">=", 1.05),
    "save_ratio": Goal("save to disk / raw writer of the same bytes, 8 threads, fsyncs", 1, "x", ">= 0.9", ">=", 0.9),
    "restore_portable_GBps": Goal("restore, portable, depth 0, page cache", 1, "GB/s", ">= 15", ">=", 15),
    "restore_ans_GBps": Goal("restore, ANS, depth 0, page cache", 1, "GB/s", ">= 35", ">=", 35),
    "stored_smaller_everywhere": Goal("cases with fewer stored bytes than the nvCOMP recipe", 100, "%",
                                      "all cases", ">=", 1),
    "train_step_ratio": Goal("training step with a snapshot every 50 steps / without", 1, "x", "<= 1.03", "<=", 1.03),
    "train_step_sustained_ratio": Goal("the same, the wait for the save before within", 1, "x"),
    "extra_memory_device_x": Goal("device memory, staging on the device, by the driver's count", 1, "x the state",
                                  "<= 2.1 x the state", "<=", 2.1),
    "stall_over_goal": Goal("Llamas, experts: stall / (1.5 x copy + 2 ms + 1 us a tensor), worst", 1, "x",
                            "<= 1", "<=", 1),
    "memory_every_save_x": Goal("Llamas, experts: device memory, the most of any save", 1, "x the state",
                                "<= 2.1 x the state", "<=", 2.1),
    "first_stall_ms": Goal("the first save of the first process on a machine", 1, "ms", "<= 150 ms", "<=", 150),
    "first_restore_over_dcp": Goal("the first restore of a process / the first dcp.load", 1, "x"),
    "new_machine_restore_over_dcp": Goal("the same on a machine that has never compiled the kernels", 1, "x"),
    "second_host_stall_ratio": Goal("second save staged on the host / a raw pinned copy", 1, "x", "<= 1.2", "<=", 1.2),
    "prepared_host_stall_ratio": Goal("first one after prepare() / a raw pinned copy", 1, "x", "<= 1.2", "<=", 1.2),
    "restored_host_stall_ratio": Goal("first one after restore_into / a raw pinned copy", 1, "x", "<= 1.2", "<=", 1.2),
    "lora_stored_x": Goal("tenth LoRA run on one base, first save: stored / its own tensors", 1, "x",
                          "<= 1.1", "<=", 1.1),
    "lora_memory_x": Goal("its device memory / (2.1 x what changes + 0.5 GB)", 1, "x", "<= 1", "<=", 1),
    "lora_stall_s": Goal("the loop waits longer for a frozen base, beyond its digests", 1e3, "ms", "<= 1", "<=", 0.001),
    "extra_memory_host_GiB": Goal("device memory, staging on the host", 1, "GiB", "<= 1 GiB", "<=", 1),
}  # fmt: skip


def to_host_ratio(engine: Record, limits: Record) -> float:
    """Return the bytes of state whose blobs reach pinned memory in the time of one raw byte."""
    return float(engine["to_host_GBps"] / limits["pinned_to_host_GBps"])


def sustained_ratio(steps: Record, block: int) -> float:
    """Return the time of blocks with a save, each with the wait for its save, over the time of blocks without."""
    spent = sum(steps["with_s"]) * block + sum(steps["outlasted_s"])
    return float(spent / len(steps["with_s"])) / (sum(steps["without_s"]) * block / len(steps["without_s"]))


def figures(record: Record) -> dict[str, tuple[float | None, bool | None]]:
    """Return (value, met) of every figure; a figure that an old record lacks comes from its sections."""
    found = {name: (figure["value"], figure["met"]) for name, figure in record["figures"].items()}
    sections, older = record["sections"], dict[str, float]()
    with suppress(KeyError):
        older["to_host_ratio"] = to_host_ratio(sections["engine"], sections["limits"])
    with suppress(KeyError):
        older["train_step_sustained_ratio"] = sustained_ratio(sections["steps"], 50)  # the steps of their blocks
    made = {name: (value, GOALS[name].met(value)) for name, value in older.items()}
    return {name: found.get(name) or made.get(name) or (None, GOALS[name].met(None)) for name in GOALS}


def section(records: Mapping[str, Record]) -> str:
    """Machines and figures of all records; stored bytes and peers of the newest that has them."""
    newest, peers = (
        max(records.values(), key=lambda record: (name in record["sections"], record["date"]))
        for name in ("sizes", "peers")
    )
    return "\n".join(["", _machines(records), _figures(records), _stored(newest), _peers(peers), ""])


def _machines(records: Mapping[str, Record]) -> str:
    rows = (
        (f"[{name}](benchmarks/{name}.json)", record["date"][:16], f"{record['seconds']:.0f} s",
         record["machine"]["device"], record["machine"]["cores"])
        for name, record in records.items()
    )  # fmt: skip
    return table(("record, with the versions of all packages", "begun (UTC)", "took", "device", "cores"), rows)


def _figures(records: Mapping[str, Record]) -> str:
    """A row for every figure: for each kind of device the least and the greatest value, and how many met the goal."""
    devices: dict[str, list[dict[str, tuple[float | None, bool | None]]]] = {}
    for record in records.values():
        devices.setdefault(record["machine"]["device"].split(" 80GB")[0], []).append(figures(record))
    rows = []
    for name, goal in GOALS.items():
        cells = []
        for found in devices.values():
            values = sorted(value for figure in found if (value := figure[name][0]) is not None)
            ends = dict.fromkeys(_number(value, goal.scale) for value in values[:1] + values[-1:])
            met = [figure[name][1] for figure in found if figure[name][0] is not None]
            count = f"**{sum(map(bool, met))}** of {len(met)}" if met.count(False) else f"{len(met)} of {len(met)}"
            cells += [f"{' - '.join(ends)} {goal.unit}" if ends else "-", count if met and goal.sign else ""]
        rows.append((goal.label, goal.goal, *cells))
    return table(("figure", "goal", *(title for device in devices for title in (device, "met by"))), rows)


def _number(value: float | None, scale: float = 1) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _stored(record: Record) -> str:
    """A row for every regime and gap; each cell has the share of all, and of every kind of tensor."""
    rows: Sequence[Record] = record["sections"].get("sizes", {}).get("rows", [])
    recipes = better_recipes(rows)
    cases: dict[tuple[str, int], dict[str, Record]] = {}
    for row in rows:
        cases.setdefault((row["regime"], row["gap"]), {})[row["who"]] = row
    body = []
    for (regime, gap), whose in cases.items():
        shown = [whose.get("snapstore portable"), whose.get("snapstore ans"), recipes.get((regime, gap)),
                 whose.get("zstd -1")]  # fmt: skip
        body.append((regime, gap or "full", " ".join(next(iter(whose.values()))["kinds"]), *map(_shares, shown)))
    best = " or ".join(sorted({row["who"] for row in recipes.values()})) or "nvCOMP"
    return table(("regime", "steps since its base", "kinds", "snapstore portable", "ans", best, "zstd -1"), body)


def _shares(row: Record | None) -> str:
    if row is None:
        return "-"
    kinds = [f"{share:.3f}" for share in row["kinds"].values()]
    return f"{row['share']:.3f}" + (f" ({' '.join(kinds)})" if len(kinds) > 1 else "")


def _peers(record: Record) -> str:
    """Return the table of peers [s]; if the first save differs from warm ones, it follows in parentheses."""
    sections, body = record["sections"], []
    with suppress(KeyError):
        stall, size, restore = sections["stall_device"], sections["stall_device"]["state_bytes"], sections["restore"]
        load = size / restore["portable"]["median_GBps"] / 1e9
        body.append(
            ("snapstore portable", *map(_number, (size / stall["save_GBps"] / 1e9, *[stall["stall_s"]] * 2, load)))
        )
    for row in sections.get("peers", {}).get("rows", []):
        if why := row.get("error") or row.get("skipped"):
            body.append((row["peer"], f"not measured: {why}", "", "", ""))
            continue
        times = []
        for name in ("total_s", "wait_s", "safe_s"):
            text = _number(row.get(name, row["total_s"]))
            times.append(f"{text} ({_number(row[f'first_{name}'])})" if f"first_{name}" in row else text)
        body.append((row["peer"], *times, _number(row.get("load_s"))))
    return table(("who", "durable after [s]", "the loop waits", "the state may change after", "load"), body)


def write() -> None:
    """Write the section again from the records."""
    paths = {name: ROOT / "docs" / "benchmarks" / f"{name}.json" for name in RECORDS}
    place("gpu", section({name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}))
