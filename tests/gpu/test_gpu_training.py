"""Training resumed from a snapshot computes the same numbers: eager, with CUDA graphs, and compiled."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from kit.gpu_states import differing, drift, facts, floats, manager, tensors
from snapstore import Repository, RngState, SaveOptions
from snapstore.storage.memory import MemoryStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Net(nn.Module):
    """A model with tied weights, dropout and buffers."""

    def __init__(self, width=64, words=50):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.body(self.embed(ids))))


class Run:
    """A training run, with everything that a snapshot must hold."""

    def __init__(self, seed, dtype=torch.float32, **options):
        torch.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
        self.model = Net().to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.progress = {"step": 0, "losses": []}

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "rng": RngState(),
                "progress": self.progress}  # fmt: skip

    def train(self, steps, after=lambda: None):
        for _ in range(steps):
            ids = torch.randint(0, 50, (32,), device="cuda")
            loss = nn.functional.cross_entropy(self.model(ids).float(), ids)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.progress["step"] += 1
            self.progress["losses"].append(loss.item().hex())
            after()

    def facts(self):
        return facts([self.model.state_dict(), self.optimizer.state_dict(), self.progress])


VARIANTS = pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True, "dtype": torch.bfloat16}], ids=str
)


@VARIANTS
@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_restored_run_computes_the_very_same(mode, options):
    store = MemoryStore()
    with manager(mode, store=store) as made:
        run = Run(0, **options)
        run.train(10)
        made.save(10, run.state())
        run.train(10)
        made.save(20, run.state())
    with manager(mode, store=store) as made:
        again = Run(99, **options)
        again.train(3)  # the restore overwrites all of it
        made.restore_into(again.state(), 10)
        assert again.progress["step"] == 10
        again.train(10)
        assert differing(again.facts(), run.facts()) == []
        fresh = Run(7, **options)
        made.restore_into(fresh.state(), 20)
        assert differing(fresh.facts(), run.facts()) == []
        assert fresh.model.head.weight is fresh.model.embed.weight
        fresh.train(5)
        made.restore_into({"rng": RngState()}, 20, keys="rng.*")  # both runs use the generators of the process
        run.train(5)
        assert differing(fresh.facts(), run.facts()) == []


@pytest.mark.parametrize("mode", ["device", "host"])
def test_saves_change_nothing_of_the_training(mode):
    """A run with a background save at every step computes the same as a run without saves.

    Every snapshot holds the state of its step.
    """
    alone = Run(3)
    alone.train(12)
    run, wanted = Run(3), []
    with manager(mode) as made:

        def after():
            wanted.append(run.facts())
            made.save(run.progress["step"], run.state())

        run.train(12, after)
        assert differing(run.facts(), alone.facts()) == []
        for step in range(1, 13):
            fresh = Run(step)
            made.restore_into(fresh.state(), step)
            assert differing(fresh.facts(), wanted[step - 1]) == [], step


def test_the_save_after_a_restore_is_a_delta():
    store = MemoryStore()
    state = {"m": {str(i): floats(100_000, i, "cuda") for i in range(3)}, "small": floats(9, 7, "cuda")}
    with manager("device", store=store) as made:
        first = made.save(0, state).result(60)
        drift(state, 0)
        made.save(1, state)
    with manager("device", store=store) as made:
        snapshot = made.restore_into(state, 0)
        assert snapshot.id == first.id
        drift(state, 5)
        second = made.save(2, state).result(60)
        assert second.parent == first.id
        assert second.depth == 1
        assert second.stored_bytes < 0.5 * first.stored_bytes
        drift(state, 6)
        third = made.save(3, state).result(60)
        assert third.depth == 2
        assert differing(facts(made.restore(3, device="cuda")), facts(state)) == []


def test_a_restore_to_the_device_without_objects():
    """A restore without targets returns state dicts, on the device, that objects can load."""
    run = Run(1)
    run.train(4)
    with manager() as made:
        made.save(4, run.state())
        got = made.restore(4, device="cuda")
        assert all(t.is_cuda for t in tensors(got["model"]))
        fresh = Run(5)
        fresh.model.load_state_dict(got["model"])
        fresh.optimizer.load_state_dict(made.restore(4, keys="optimizer.*")["optimizer"])
        fresh.schedule.load_state_dict(got["schedule"])
        RngState().load_state_dict(got["rng"])
        fresh.progress = got["progress"]
        run.train(3)
        # both runs use the generators of the process: restore them again
        RngState().load_state_dict(got["rng"])
        fresh.train(3)
        assert differing(fresh.facts(), run.facts()) == []


# --- CUDA graphs


class Captured:
    """A training step that is captured as a CUDA graph. Its state is the memory of the graph."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True)
        self.data = torch.zeros(16, 64, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._step()

    def _step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.data).square().mean() + (self.model(self.data + 1) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self):
        """Return the tensors that the graph reads and writes."""
        parameters = list(self.model.parameters())
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": [self.optimizer.state[p] for p in parameters],
        }

    def run(self, step):
        self.data.copy_(torch.linspace(-1, 1, 64, device="cuda").expand(16, 64) * (step + 1))
        self.graph.replay()


@pytest.mark.parametrize("mode", ["device", "host"])
def test_saves_between_replays(mode):
    captured, wanted, losses = Captured(0), {}, {}
    with manager(mode) as made:
        for step in range(12):
            captured.run(step)
            losses[step] = captured.loss.item().hex()
            if step % 3 == 0:
                wanted[step] = facts(captured.state())
                made.save(step, captured.state())
        last = facts(captured.state())
        for step, want in wanted.items():
            assert differing(facts(made.restore(step)), want) == [], step
        made.restore_into(captured.state(), 3)
        for step in range(4, 12):
            captured.run(step)
            assert captured.loss.item().hex() == losses[step], step
        assert differing(facts(captured.state()), last) == []


def test_saves_of_replays_that_are_still_running():
    """Replays and saves are enqueued without a wait: each snapshot holds the state between two replays."""
    captured, twin = Captured(1), Captured(1)
    assert differing(facts(captured.state()), facts(twin.state())) == []
    wanted = []
    for step in range(8):
        twin.run(step)
        wanted.append(facts(twin.state()))
    with manager("device") as made:
        torch.cuda._sleep(100_000_000)
        for step in range(8):
            captured.run(step)
            made.save(step, captured.state())
        for step in range(8):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step


# --- compiled


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model():
    pytest.importorskip("triton")
    import torch._inductor.config as config

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(16, 64, device="cuda")

    def train(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    with config.patch(compile_threads=1):
        compiled = torch.compile(model)
        try:
            train(compiled, optimizer, 1)
        except Exception as error:  # noqa: BLE001  for example, no compiler for its launchers
            pytest.skip(f"torch.compile does not work here: {error!s:.200}")
        with manager() as made:
            train(compiled, optimizer, 2)
            made.save(3, {"model": compiled, "optimizer": optimizer})
            losses = train(compiled, optimizer, 4)
            made.restore_into({"model": compiled, "optimizer": optimizer}, 3)
            assert train(compiled, optimizer, 4) == losses


# --- the same run, saved by both engines


def test_a_run_moves_to_the_host_and_back():
    run = Run(4)
    run.train(3)
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=4096, options=SaveOptions(threads=4)) as repo:
        repo.save(run.state(), run="r", step=3)
        before = run.facts()
        host = deepcopy(run.model).cpu()
        optimizer = torch.optim.AdamW(host.parameters(), lr=1e-3)
        repo.restore_into("r@3", {"model": host, "optimizer": optimizer}, keys=["model.*", "optimizer.*"])
        saved = repo.save({"model": host, "optimizer": optimizer}, run="r", step=4)
        assert saved.new_chunks == 0
        repo.restore_into("r@4", {"model": run.model, "optimizer": run.optimizer})
        assert differing(run.facts(), before) == []
