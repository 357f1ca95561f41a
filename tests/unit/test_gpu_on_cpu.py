"""The host code of the GPU engine passes its tests on a CPU that imitates a GPU (tests/kit/fake_cuda.py)."""

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from kit import processes
from kit.samples import some

#: Three cases of eight, with both layouts.
SPARSE = some([f"[cuda-{size}-{layout}]" for size in (1, 2, 4, 8) for layout in (0, 1)], 3)
#: Each list runs in a process of its own, because all together take minutes on a busy machine.
RUNS = [
    ["gpu/test_nvcomp.py", "gpu/test_gpu_ans.py", "gpu/test_gpu_damage.py", "attacks/test_collisions.py"],
    ["gpu/test_gpu_memory.py", "gpu/test_gpu_changes.py", "gpu/test_gpu_reshard.py", "gpu/test_gpu_interrupts.py",
     "gpu/test_gpu_unchanged.py"],
    [
        "gpu/test_gpu_staging.py", "gpu/test_gpu_first_save.py", "gpu/test_gpu_directions.py", "gpu/test_gpu_graphs.py",
        "gpu/test_gpu_ranks.py", "gpu/test_gpu_strides.py::test_they_come_back_on_each_device",
        "contract/test_engines.py::test_a_batch_of_every_shape_at_once[cuda]",
        "contract/test_engines.py::test_sparse_deltas_of_the_cpu_engine",
        *(f"contract/test_engines.py::{name}{case}" for case in SPARSE for name in (
            "test_sparse_deltas_of_every_kind",
            "test_chains_of_sparse_deltas",
            "test_the_engines_write_the_same_sparse_deltas",
        )),
        "contract/test_engines.py::test_sparse_deltas_that_contradict_themselves",
        "contract/test_engines.py::test_sparse_deltas_of_too_many_elements",
    ],
]  # fmt: skip

LEFT_OUT = {
    "a process of its own, which has no GPU": [
        "gpu/test_gpu_ans.py::test_recode_by_the_shell",
        "gpu/test_gpu_damage.py::test_forged_streams_under_right_checksums",
    ],
    "work that goes on while the host does something else": [
        "gpu/test_gpu_memory.py::test_memory_from_an_engine_may_be_used_at_once",
        "gpu/test_gpu_staging.py::test_save_waits_for_nothing_on_the_device",
        "gpu/test_gpu_graphs.py::test_graphs_are_captured_again_and_again_while_saves_run",
    ],
    "storages that can be resized": [
        "gpu/test_gpu_changes.py::test_memory_that_is_freed_while_a_synchronous_save_reads_it"
    ],
    "a size that the smaller states do not reach": [
        "gpu/test_gpu_memory.py::test_an_engine_without_memory_restores[{'above': 2097152}]"
    ],
    "time": [
        "gpu/test_nvcomp.py::test_there_and_back[700",
        "gpu/test_nvcomp.py::test_there_and_back[2100",
        "gpu/test_gpu_ans.py::test_there_and_back[1024]",
        "gpu/test_gpu_ans.py::test_recode_there_and_back[cpu]",
        "gpu/test_gpu_memory.py::test_small_chunks_take_little_memory",
        "gpu/test_gpu_memory.py::test_many_saves_keep_nothing[host]",
        "gpu/test_gpu_memory.py::test_memory_that_runs_out_at_any_level[allocator]",
        "gpu/test_gpu_memory.py::test_memory_that_runs_out_at_any_level[CuPy, driver]",
        "gpu/test_gpu_memory.py::test_copies_when_memory_runs_out[allocator-_gather]",
        "gpu/test_gpu_memory.py::test_copies_when_memory_runs_out[allocator-_device_rooms]",
        "gpu/test_gpu_staging.py::test_auto_decides_again_when_the_state_grows",
        "gpu/test_gpu_staging.py::test_many_tensors",
        "gpu/test_gpu_staging.py::test_several_managers_in_one_process",
        "gpu/test_gpu_staging.py::test_changes_right_after_save[False",
        "gpu/test_gpu_staging.py::test_changes_right_after_save[True-auto]",
        "gpu/test_gpu_directions.py::test_saved_on_the_gpu_restored_where_there_is_none",
        "gpu/test_gpu_directions.py::test_restored_onto_the_gpu",
        "gpu/test_gpu_directions.py::test_restored_into_tensors",
        "gpu/test_gpu_directions.py::test_a_repository_passes_check_on_both",
        "gpu/test_gpu_directions.py::test_packs_of_any_size[100000]",
        "gpu/test_gpu_directions.py::test_long_chains[repository",
        "gpu/test_gpu_directions.py::test_long_chains[manager-4096]",
    ],
}

#: Each of these takes a second or more, so a run takes only three of them. A run on a GPU takes all.
SLOW = [
    *(f"gpu/test_gpu_unchanged.py::{name}[{case}" for name, cases in {
        "test_what_is_frozen_is_copied_once": ("device", "host"),
        "test_a_dense_state_is_compared_once": ("device", "host"),
        "test_a_frozen_tensor_that_changes_is_copied_again": ("one element-", "all-", "other memory-"),
        "test_any_tensors_may_change_at_any_step": ("device", "host"),
        "test_the_base_of_what_was_not_copied_is_damaged": ("missing-", "all-"),
        "test_the_first_save_copies_only_what_no_base_has": ("state-", "prepare-", "restore_into-"),
    }.items() for case in cases),
    *(f"gpu/test_gpu_memory.py::{name}" for name in (
        "test_many_saves_keep_nothing[device]",
        "test_nvcomp_without_memory_saves[{'above': 0}]",
        "test_nvcomp_without_memory_saves[{'above': 100000}]",
        "test_nvcomp_without_memory_saves[{'first': 1}]",
        "test_nvcomp_without_memory_saves[{'first': 4}]",
        "test_an_engine_without_memory_saves[{'above': 2097152}]",
        "test_an_engine_without_memory_saves[{'first': 1}]",
        "test_an_engine_without_memory_saves[{'first': 3}]",
        "test_memory_that_runs_out_after_some_saves",
        "test_memory_that_runs_out_at_any_level[CuPy]",
        "test_memory_that_runs_out_at_any_level[beneath torch]",
        "test_small_tensors_share_page_locked_memory",
        "test_page_locked_memory_of_tensors_without_a_base",
    )),
    *(f"gpu/test_gpu_staging.py::{name}" for name in (
        "test_streams_are_not_used_up",
        "test_changes_right_after_save[True-device]",
        "test_changes_right_after_save[True-host]",
        "test_bases_across_changes_of_mode",
        "test_auto_looks_at_free_memory",
        "test_tensors_that_move_between_host_and_device",
        "test_a_failed_save_is_no_base[device]",
        "test_a_failed_save_is_no_base[host]",
        "test_a_synchronous_manager[device]",
        "test_a_synchronous_manager[host]",
    )),
    *(f"gpu/test_gpu_directions.py::{name}" for name in (
        "test_long_chains[manager-65536]",
        "test_a_state_on_both",
        "test_a_full_snapshot_and_no_depth_at_all",
        "test_packs_of_any_size[4096]",
        "test_states_larger_than_any_batch[1]",
        "test_states_larger_than_any_batch[3000]",
        "test_states_larger_than_any_batch[70000]",
    )),
    *(f"gpu/test_gpu_ans.py::{name}" for name in (
        "test_a_background_save",
        "test_recode_there_and_back[cuda]",
        "test_chains_of_both_codecs",
        "test_refused_where_there_is_no_gpu",
        "test_there_and_back[4096]",
        "test_there_and_back[1048576]",
    )),
    *(f"gpu/test_gpu_damage.py::{name}" for name in (
        "test_every_way_to_verify_saves_the_same[full]",
        "test_every_way_to_verify_saves_the_same[off]",
        "test_every_way_to_verify_saves_the_same[sample]",
        "test_a_flipped_bit_anywhere_in_a_pack",
        "test_a_bit_that_flips_in_a_background_save",
        *(f"test_a_bit_that_flips_while_saving_is_found_before_the_commit[{verify}-flip_{where}]"
          for verify in ("full", "sample") for where in ("in_blobs", "in_planes", "on_the_way")),
    )),
    *(f"gpu/test_gpu_changes.py::{name}" for name in (
        "test_the_save_after_a_change[asynchronous, device]",
        "test_the_save_after_a_change[asynchronous, host]",
        "test_another_form_at_the_same_address[asynchronous, device]",
        "test_another_form_at_the_same_address[asynchronous, host]",
    )),
    "gpu/test_gpu_first_save.py::test_the_first_save_locks_the_memory_of_the_second",
    "gpu/test_gpu_first_save.py::test_prepare_locks_the_memory_of_the_first_save",
    "gpu/test_gpu_first_save.py::test_without_kernels_the_cpu_saves_what_lies_on_the_device[False]",
    "gpu/test_gpu_first_save.py::test_without_kernels_the_cpu_saves_what_lies_on_the_device[True]",
    "gpu/test_gpu_first_save.py::test_a_save_does_not_wait_for_kernels[device]",
    "gpu/test_gpu_first_save.py::test_a_save_does_not_wait_for_kernels[host]",
    "gpu/test_gpu_graphs.py::test_a_whole_save_while_a_graph_is_captured[device]",
    "gpu/test_gpu_graphs.py::test_a_whole_save_while_a_graph_is_captured[host]",
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for this CPU")
@pytest.mark.parametrize("names", RUNS, ids=["codecs", "memory", "staging"])
def test_the_gpu_engine_on_a_cpu(tmp_path, names):
    others = set(SLOW) - set(some(SLOW, 3))
    left_out = [f"--deselect=tests/{name}" for names in (*LEFT_OUT.values(), others) for name in names]
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "kit.fake_cuda", "-p", "no:cacheprovider", "-m", "gpu", "-q",
            f"--junitxml={report}", *left_out, *(f"tests/{name}" for name in names),
        ],
        cwd=processes.ROOT, env=environment(), capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-20_000:]}\n{done.stderr[:6000]}"
    counts = Counter(outcome(case) for case in ElementTree.parse(report).iter("testcase"))
    assert counts["passed"] > 20
    assert set(counts) == {"passed"}, done.stdout[-3000:]


def environment():
    """Return the environment of this process without the variables of its pytest run and of coverage."""
    dropped = ("PYTEST_", "COV_", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in processes.environment().items() if not name.startswith(dropped)}


def outcome(case):
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
