"""The memory limit follows the machine, its control groups and its resource limits."""

import resource

import pytest

from snapstore.chunks import limits
from snapstore.errors import CapabilityError, InvalidInputError
from snapstore.storage.memory import MemoryStore

GIB = 1024**3
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nSwapFree: 2097152 kB\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes files of /proc and /sys below a root and returns the available memory in GiB."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def available(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(text))
        found = limits.available_bytes(tmp_path)
        return None if found is None else found / GIB

    return available


def test_a_machine_gives_what_it_calls_available_and_its_swap(machine):
    """The available memory is MemAvailable, the free swap, and the part of the ZFS cache that can be freed."""
    assert machine({}) == 10
    assert machine({"proc/spl/kstat/zfs/arcstats": f"13 1 0x01\nc_min 4 {GIB}\nsize 4 {4 * GIB}\n"}) == 13


def test_available_memory_is_none_if_the_machine_does_not_report_it(machine):
    assert machine({"proc/meminfo": ""}) is None


GROUP = {"proc/self/cgroup": "0::/a.slice/b.scope\n"}


def test_a_control_group_and_its_parents(machine):
    """The limits of a control group and of its parents count. File cache and free swap of a group are available."""
    at = "sys/fs/cgroup/a.slice/"
    own = {f"{at}b.scope/memory.max": "max\n", f"{at}b.scope/memory.current": GIB}
    assert machine(GROUP | own) == 10
    above = {f"{at}memory.max": 4 * GIB, f"{at}memory.current": 3 * GIB, f"{at}memory.swap.max": 0}
    assert machine(GROUP | own | above) == 1
    cache = {
        f"{at}memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\nslab_reclaimable 0\nfile {9 * GIB}\n"
    }
    assert machine(GROUP | own | above | cache) == 3
    swap = {f"{at}memory.swap.max": GIB, f"{at}memory.swap.current": GIB // 2}
    assert machine(GROUP | own | above | cache | swap) == 3.5


def test_a_container_whose_group_is_at_the_top(machine):
    """In a container, the limit at the root of /sys/fs/cgroup counts."""
    own = {"sys/fs/cgroup/memory.max": 2 * GIB, "sys/fs/cgroup/memory.current": GIB, "sys/fs/cgroup/memory.swap.max": 0}
    assert machine({"proc/self/cgroup": "0::/../elsewhere\n", **own}) == 1


def test_control_groups_of_version_1(machine):
    at = "sys/fs/cgroup/memory/docker/x/"
    listed = {"proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"}
    unlimited = {f"{at}memory.limit_in_bytes": 2**63 - 4096, f"{at}memory.usage_in_bytes": GIB}
    assert machine(listed | unlimited) == 10
    limited = listed | {f"{at}memory.limit_in_bytes": 3 * GIB, f"{at}memory.usage_in_bytes": GIB}
    assert machine(limited) == 4
    stat = f"active_file 0\ninactive_file 0\ntotal_active_file 0\ntotal_inactive_file {GIB}\n"
    assert machine(limited | {f"{at}memory.stat": stat}) == 5, "usage includes the groups below, with their cache"


def test_an_empty_variable_sets_no_limit(monkeypatch):
    monkeypatch.setenv(limits.MEMORY, "")
    assert limits.from_environment(limits.MEMORY) is None


def test_resource_limits(machine, monkeypatch):
    pages = 2 * GIB // resource.getpagesize()
    files = {"proc/self/statm": f"{pages} 5 5 5 0 {pages // 2} 0"}
    for which, room in ((resource.RLIMIT_AS, 1), (resource.RLIMIT_DATA, 2)):
        soft = {which: 3 * GIB}
        monkeypatch.setattr(resource, "getrlimit", lambda name, soft=soft: (soft.get(name, resource.RLIM_INFINITY), 0))
        assert machine(files) == room
    monkeypatch.setattr(resource, "getrlimit", lambda name: (GIB, GIB))
    assert machine(files) == 0


def test_this_machine_has_some():
    assert limits.available_bytes() is None or limits.available_bytes() > 16 * 1024 * 1024


def test_a_restore_that_does_not_fit_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda: 2 * GIB)
    limits.require_memory(2 * GIB, "x")
    with pytest.raises(CapabilityError) as caught:
        limits.require_memory(2 * GIB + 1, "r@7: restoring 3 tensors")
    said = str(caught.value)
    assert said.startswith(
        "r@7: restoring 3 tensors: needs 2.1GB (2147483649 bytes) of memory, 2.1GB are available here"
    )
    for word in ("keys", "device", "tensors of your own", "SNAPSTORE_MAX_MEMORY=2147483649"):
        assert word in said
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "1T")
    limits.require_memory(1024 * GIB, "x")
    monkeypatch.setattr(limits, "available_bytes", lambda: None)
    monkeypatch.delenv("SNAPSTORE_MAX_MEMORY")
    limits.require_memory(2**62, "a system that does not say")


SIZES = {
    "0": 0,
    "17": 17,
    "10K": 10240,
    "5mib": 5 << 20,
    "3GB": 3 << 30,
    "2T": 2 << 40,
    "1P": 1 << 50,
    "1.5TiB": 3 << 39,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text, size):
    assert limits.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1.5.5G", "10E", "9" * 17, "1 G", "\u0661"])
def test_no_sizes(text):
    with pytest.raises(InvalidInputError, match="expected a number of bytes, or a size such as 500M"):
        limits.parse_size(text)


def test_a_budget_counts_what_it_lets_pass(monkeypatch):
    """A budget counts the work that it allows, and not the work that it refuses."""
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 100)
    store = MemoryStore()
    store.put("packs/00/x", bytes(10))
    budget = limits.Budget(store)
    budget.spend(100, "a")
    budget.spend(10 * limits.DECODED_RATIO, "b")
    with pytest.raises(CapabilityError, match=r"c: has to decode 82.0kB \(82021 bytes\), expected at most 82.0kB"):
        budget.spend(1, "c")
    assert budget.spent_bytes == 82020
    limits.Budget(store).spend(10**6, "d", free_bytes=10**6)
    with pytest.raises(CapabilityError, match="e: has to decode 11B"):
        limits.Budget(store, 10).spend(11, "e")


def test_a_budget_lists_as_many_packs_as_explain_the_work(monkeypatch):
    """A budget lists only as many packs as justify twice the work so far."""
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 100)
    listed = []

    class Store(MemoryStore):
        def list(self, prefix, key_only=None):
            for info in super().list(prefix, key_only):
                listed.append(info.size_bytes)
                yield info

    store = Store()
    for number in range(1000):
        store.put(f"packs/{number:04}", bytes(1))
    budget = limits.Budget(store)
    budget.spend(10 * limits.DECODED_RATIO, "a")
    assert len(listed) == 20  # the same amount may follow without another listing
    budget.spend(10 * limits.DECODED_RATIO, "b")
    assert len(listed) == 20
    for number in range(97):  # each listing lasts until the work has doubled
        budget.spend(10 * limits.DECODED_RATIO, f"c{number}")
    assert len(listed) < 20 + 100 + 200 + 400 + 800 + 1000
    budget.spend(10 * limits.DECODED_RATIO + 100, "all that is stored")
    with pytest.raises(CapabilityError, match="d: has to decode"):
        budget.spend(1, "d")
