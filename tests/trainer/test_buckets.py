"""DDP's bucket order: recorded, brought back, and the bits of the run that was never interrupted.

Four ranks live as long as this file's tests. They have a Gloo group for each world size, and run one function
of this module at a time.
"""

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from checkmate.trainer import buckets
from checkmate.trainer.buckets import Buckets

SEVERAL = {"bucket_cap_mb": 0.001}
VIEWS = {**SEVERAL, "gradient_as_bucket_view": True}
RANKS = 4
STEPS = 4


class Net(nn.Module):
    """Uses its layers in another order than it registers them, so buckets are not laid out as DDP guesses."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(24, 17), (17, 24), (24, 24), (24, 3), (16, 24)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (4, 2, 0, 1, 3)) -> torch.Tensor:
        for i in use:
            x = torch.tanh(self.layers[i](x))
        return x


@dataclass(frozen=True)
class Case:
    """One way to train with DDP."""

    ranks: int
    options: dict[str, Any] = field(default_factory=lambda: SEVERAL)
    micro_batches: int = 1  # all but the last of a step under no_sync
    frozen: tuple[str, ...] = ()
    zero_grad: str = "before backward"  # or "after step", "after ckpt.step"
    set_to_none: bool = True
    skip_a_layer: bool = False  # on odd steps layer 2 gets no gradient
    seed: int = 20


class Run:
    """A training run of one rank, from given or fresh parameters."""

    def __init__(self, case: Case, rank: int, group: dist.ProcessGroup) -> None:
        self.case, self.rank, self.step = case, rank, 0
        net = Net()
        for name, param in net.named_parameters():
            param.requires_grad_(name not in case.frozen)
        self.ddp = DDP(net, process_group=group, **case.options)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.buckets = Buckets(self.ddp, {param: name for name, param in net.named_parameters()})

    def train(self, until: int) -> "Run":
        case = self.case
        for step in range(self.step, until):
            if case.zero_grad == "before backward":
                self.optimizer.zero_grad(case.set_to_none)
            use = (4, 0, 1, 3) if case.skip_a_layer and step % 2 else (4, 2, 0, 1, 3)
            for micro in range(case.micro_batches):
                seed = (case.seed * 100 + step) * 100 + micro * RANKS + self.rank
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
                last = micro == case.micro_batches - 1
                with contextlib.nullcontext() if last else self.ddp.no_sync():
                    self.ddp(x, use).square().sum().backward()
            self.optimizer.step()
            if case.zero_grad == "after step":
                self.optimizer.zero_grad(case.set_to_none)
            self.step = step + 1
            buckets = [self.buckets.state()]
            if self.step == until:
                dist.broadcast_object_list(buckets, group=self.ddp.process_group, group_src=0)
                states = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                self.saved = {"step": until, "buckets": buckets[0], **copy.deepcopy(states)}
            if case.zero_grad == "after ckpt.step":
                self.optimizer.zero_grad(case.set_to_none)
        return self

    def load(self, state: dict[str, Any]) -> None:
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it keeps what it gets
        self.step = state["step"]

    def equals(self, other: "Run") -> bool:
        pairs = zip(self.ddp.parameters(), other.ddp.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


# -- what the ranks run ----------------------------------------------------------------------------------------


def interrupt(rank: int, group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """Stop after 1, 2 and 3 steps and go on in a new model: as it should be, and less well for comparison."""
    torch.manual_seed(case.seed)
    whole = Run(case, rank, group)
    whole.buckets.record()
    saved = [whole.train(stop).saved for stop in (1, 2, 3)]
    whole.train(STEPS)

    def resume(saved: dict[str, Any], buckets: dict[str, Any] | None) -> tuple[Run, str | None]:
        run = Run(case, rank, group)
        reason = run.buckets.restore(buckets) if buckets else None
        run.buckets.record()
        run.load(saved)
        return run, reason

    def is_exact(run: Run) -> bool:
        return run.train(STEPS).equals(whole)

    resumed = [resume(s, s["buckets"]) for s in saved]
    again = resume(saved[1], saved[1]["buckets"])[0].train(3).saved
    swapped = [{**s["buckets"], "views": not s["buckets"]["views"]} for s in saved if case.options == VIEWS]
    return {
        "state": saved[0]["buckets"],
        "reasons": [reason for _, reason in resumed],
        "exact": [is_exact(run) for run, _ in resumed],
        "exact twice": is_exact(resume(again, again["buckets"])[0]),
        "without restore": [is_exact(resume(s, None)[0]) for s in saved],
        "other views": [is_exact(resume(s, b)[0]) for s, b in zip(saved, swapped, strict=False)],
    }


def compare_with_ddp(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[list[str], list[str]]:
    run = Run(case, rank, group)
    run.buckets.record()
    run.train(3)
    names = [name for name, param in run.ddp.module.named_parameters() if param.requires_grad]
    of_ddp = run.ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return run.buckets.order or [], [names[int(i)] for i in of_ddp.replace(",", "").split()]


def look_for_traces(rank: int, group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """What `record` and `restore` leave behind in a model whose user watches it."""
    run = Run(case, rank, group)
    run.buckets.record()
    recorded_before = run.buckets.order
    state = run.train(1).saved["buckets"]
    params = list(run.ddp.parameters())
    hooks = len(run.ddp._forward_hooks) + sum(len(p._post_accumulate_grad_hooks or ()) for p in params)

    new = Run(case, rank, group)
    seen: list[torch.Tensor] = []
    for i, param in enumerate(new.ddp.parameters()):
        param.register_hook(seen.append)
        param.register_post_accumulate_grad_hook(seen.append)
        param.grad = None if i % 2 else torch.full_like(param, rank)
    grads = [param.grad for param in new.ddp.parameters()]
    values = [param.detach().clone() for param in new.ddp.parameters()]
    rng = torch.get_rng_state()
    with torch.no_grad():
        reason = new.buckets.restore({**state, "views": False})
    return {
        "recorded before": recorded_before,
        "hooks": hooks,
        "reason": reason,
        "seen": len(seen),
        "rng": torch.equal(rng, torch.get_rng_state()),
        "grads": all(p.grad is g for p, g in zip(new.ddp.parameters(), grads, strict=True)),
        "grad values": all(g is None or bool((g == rank).all()) for g in grads),
        "values": all(map(torch.equal, new.ddp.parameters(), values)),
        "rebuilt": new.ddp._has_rebuilt_buckets,
        "kept": new.buckets.order == state["order"],
    }


def forward_decides(rank: int, group: dist.ProcessGroup, case: Case) -> list[list[str] | None]:
    """DDP reduces in a backward if its forward was synchronised, wherever the backward itself stands."""
    run = Run(case, rank, group)
    run.buckets.record()
    orders = []
    x = torch.ones(2, 16)
    with run.ddp.no_sync():
        loss = run.ddp(x).sum()
    loss.backward()  # not reduced
    orders.append(run.buckets.order)
    with torch.no_grad():
        run.ddp(x)
    run.ddp.module(x, (4, 0, 1, 3)).sum().backward()  # not DDP's at all
    orders.append(run.buckets.order)
    loss = run.ddp(x).sum()
    with run.ddp.no_sync(), torch.no_grad():
        run.ddp(x)
    with run.ddp.no_sync():
        loss.backward()  # reduced
    orders.append(run.buckets.order)
    return orders


def decline(rank: int, group: dist.ProcessGroup, case: Case) -> dict[str, str | None]:
    """Everything that `restore` turns down, each followed by a step of training."""
    order = [name for name, _ in Net().named_parameters()]
    reasons: dict[str, str | None] = {}

    def attempt(what: str, run: Run, order: list[str] | None) -> None:
        reasons[what] = run.buckets.restore({"order": order, "views": False})
        if what not in ("sparse", "thawed"):
            run.train(run.step + 1)

    attempt("fresh", Run(case, rank, group), order)
    attempt("provisional", Run(case, rank, group), [])
    attempt("not recorded", Run(case, rank, group), None)
    attempt("renamed", Run(case, rank, group), ["other", *order[1:]])
    attempt("fewer", Run(case, rank, group), order[1:])
    attempt("twice", Run(case, rank, group), [*order[1:], order[1]])
    attempt("static", Run(replace(case, options={"static_graph": True}), rank, group), order)

    hooked = Run(case, rank, group)
    hooked.ddp.register_comm_hook(object(), compress)
    attempt("stateful hook", hooked, order)
    hooked = Run(case, rank, group)
    hooked.ddp.register_comm_hook(group, reduce_in)
    attempt("stateless hook", hooked, order)

    late = Run(case, rank, group).train(1)
    late.buckets.record()
    attempt("late", late, late.buckets.order)
    live = Run(case, rank, group)
    live.buckets.record()
    recorded = live.train(1).saved["buckets"]["order"]
    attempt("live, own order", live, recorded)  # DDP has the order, but has not rebuilt yet
    attempt("live, own order again", live, recorded)
    attempt("live, other order", live, order)
    attempt("live, step 0", live, [])
    again = Run(case, rank, group)
    again.buckets.restore({"order": recorded, "views": False})
    attempt("restored, same order", again, recorded)

    thawed = Run(replace(case, frozen=("layers.0.bias",)), rank, group)
    thawed.ddp.module.layers[0].bias.requires_grad_(True)
    attempt("thawed", thawed, order)
    sparse = Run(case, rank, group)
    embedding = nn.Embedding(4, 4, sparse=True)
    sparse.ddp = DDP(embedding, process_group=group)
    sparse.buckets = Buckets(sparse.ddp, {embedding.weight: "weight"})
    attempt("sparse", sparse, ["weight"])

    missing = pytest.MonkeyPatch()
    missing.setattr(buckets, "_OF_REDUCER", (*buckets._OF_REDUCER, "_renamed_in_some_later_torch"))
    attempt("other torch", Run(case, rank, group), order)
    missing.undo()
    return reasons


def reduce_in(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def compress(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# -- the ranks -----------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    patience = timedelta(seconds=20)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in (2, 3, 4)}
    while work := pipe.recv():
        function, size, arguments = work
        try:
            pipe.send((function(rank, groups[size], *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()


Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Call a function of this module on the ranks that a case needs; returns what each of them returned."""
    store: Path = tmp_path_factory.mktemp("buckets") / "store"
    clean = torch.multiprocessing.get_context("forkserver")  # processes without threads, but with torch
    clean.set_forkserver_preload(["torch.distributed", "torch.nn.parallel", "torch._dynamo"])
    pipes = [clean.Pipe() for _ in range(RANKS)]
    processes = [
        clean.Process(target=rank_main, args=(rank, str(store), child), daemon=True)
        for rank, (_, child) in enumerate(pipes)
    ]
    for process in processes:
        process.start()

    def run(function: Callable[..., Any], case: Case) -> list[Any]:
        print(f"{case}")  # shown, with its seed, where a test fails
        used = [ours for ours, _ in pipes[: case.ranks]]
        for pipe in used:
            pipe.send((function, case.ranks, (case,)))
        answers = [pipe.recv() if pipe.poll(60) else (None, "no answer") for pipe in used]
        assert [error for _, error in answers if error] == []
        return [result for result, _ in answers]

    yield run
    for ours, _ in pipes:
        ours.send(None)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()


# -- the tests -----------------------------------------------------------------------------------------------

CASES = {
    "several buckets": Case(3),
    "several buckets, 4 ranks": Case(4),
    "one bucket": Case(3, {}),
    "gradients zeroed in place": Case(3, set_to_none=False),
    "accumulation": Case(3, micro_batches=3),
    "frozen parameters": Case(3, frozen=("layers.1.weight", "layers.4.bias")),
    "views": Case(3, VIEWS),
    "views, accumulation": Case(3, VIEWS, micro_batches=2),
    "views, cleared after the step": Case(3, VIEWS, zero_grad="after step"),
    "views, zeroed in place": Case(3, VIEWS, set_to_none=False),
    "views, zeroed in place, accumulation": Case(3, VIEWS, set_to_none=False, micro_batches=2),
    "views, zeroed in place after the step": Case(3, VIEWS, zero_grad="after step", set_to_none=False),
    "views, zeroed in place after ckpt.step": Case(3, VIEWS, zero_grad="after ckpt.step", set_to_none=False),
    "views, zeroed in place, 4 ranks": Case(4, VIEWS, set_to_none=False),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_after_a_restart_has_the_bits_of_the_uninterrupted_run(ranks: Ranks, case: Case) -> None:
    for result in ranks(interrupt, case):
        assert result["reasons"] == [None] * 3
        assert result["without restore"] == [False] * 3
        assert result["exact"] == [True] * 3
        assert result["exact twice"]
        if case.options == VIEWS and not case.set_to_none:
            assert result["other views"] == [case.ranks == 4] * 3


@pytest.mark.processes
def test_clearing_gradients_after_ckpt_step_is_known_from_the_second_step_on(ranks: Ranks) -> None:
    """In the first step there is nothing to tell it by: the gradients still lie in the buckets at its end."""
    for result in ranks(interrupt, Case(3, VIEWS, zero_grad="after ckpt.step")):
        assert result["exact"] == [False, True, True]
        assert result["exact twice"]
        assert result["other views"] == [True, False, False]


@pytest.mark.processes
def test_two_ranks_add_alike_in_any_order(ranks: Ranks) -> None:
    for result in ranks(interrupt, Case(2, VIEWS, set_to_none=False)):
        assert result["state"] == {"order": None, "views": False}
        assert result["reasons"] == [None] * 3
        assert result["without restore"] == result["exact"] == [True] * 3


@pytest.mark.processes
@pytest.mark.parametrize("skip_a_layer", [False, True])
@pytest.mark.parametrize("options", [SEVERAL, VIEWS], ids=["", "views"])
def test_find_unused_parameters_keeps_its_buckets_and_is_exact_by_itself(
    ranks: Ranks, options: dict[str, Any], skip_a_layer: bool
) -> None:
    case = Case(3, {**options, "find_unused_parameters": True}, zero_grad="after step", skip_a_layer=skip_a_layer)
    for result in ranks(interrupt, case):
        assert not result["state"]["order"]
        assert result["reasons"] == [None] * 3
        assert result["without restore"] == result["exact"] == [True] * 3


@pytest.mark.processes
def test_find_unused_parameters_with_kept_views_is_called_drift(ranks: Ranks) -> None:
    case = Case(3, {**VIEWS, "find_unused_parameters": True}, set_to_none=False)
    for result in ranks(interrupt, case):
        assert all("find_unused_parameters" in reason for reason in result["reasons"])
        assert result["exact"] == [False] * 3


@pytest.mark.processes
def test_static_graph_is_called_drift_from_three_ranks_on(ranks: Ranks) -> None:
    for result in ranks(interrupt, Case(3, {**SEVERAL, "static_graph": True})):
        assert all("static_graph" in reason for reason in result["reasons"])
        assert not all(result["exact"])
    for result in ranks(interrupt, Case(2, {**SEVERAL, "static_graph": True})):
        assert result["reasons"] == [None] * 3
        assert all(result["exact"])


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [Case(3), Case(3, micro_batches=2), CASES["frozen parameters"]],
    ids=["plain", "accumulation", "frozen"],
)
def test_recorded_order_is_the_one_that_ddp_rebuilds_by(ranks: Ranks, case: Case) -> None:
    recorded, of_ddp = ranks(compare_with_ddp, case)[0]
    assert recorded == of_ddp
    registered = [name for name, _ in Net().named_parameters() if name not in case.frozen]
    assert recorded != registered[::-1]


@pytest.mark.processes
@pytest.mark.parametrize("view", [False, True])
def test_recording_and_restoring_leave_no_trace(ranks: Ranks, view: bool) -> None:
    for traces in ranks(look_for_traces, Case(3, {**SEVERAL, "gradient_as_bucket_view": view})):
        assert traces == {
            "recorded before": [],
            "hooks": 0,
            "reason": None,
            "seen": 0,
            "rng": True,
            "grads": True,
            "grad values": True,
            "values": True,
            "rebuilt": True,
            "kept": True,
        }


@pytest.mark.processes
def test_only_a_backward_after_a_synchronised_forward_is_recorded(ranks: Ranks) -> None:
    for unsynchronised, foreign, synchronised in ranks(forward_decides, Case(3)):
        assert unsynchronised == foreign == []
        assert len(synchronised) == len(list(Net().parameters()))


@pytest.mark.processes
def test_what_cannot_be_brought_back_is_named_and_trains_on(ranks: Ranks) -> None:
    for reasons in ranks(decline, Case(3)):
        exact = {what for what, reason in reasons.items() if reason is None}
        assert exact == {
            "fresh",
            "provisional",
            "stateless hook",
            "live, own order",
            "live, own order again",
            "restored, same order",
        }
        assert reasons["not recorded"] == reasons["late"] == "the order of DDP's buckets was not recorded"
        assert "DDP reduces 10 parameters here" in reasons["renamed"]
        assert "recorded run (9)" in reasons["fewer"]
        assert "recorded run (10)" in reasons["twice"]
        assert "static_graph" in reasons["static"]
        assert "communication hook compress" in reasons["stateful hook"]
        assert reasons["live, other order"] == reasons["live, step 0"]
        assert "trained already" in reasons["live, step 0"]
        assert "unfrozen" in reasons["thawed"]
        assert "sparse" in reasons["sparse"]
        assert torch.__version__ in reasons["other torch"]


def test_torch_has_the_private_methods_that_restore_needs() -> None:
    assert [name for name in buckets._OF_REDUCER if not hasattr(dist.Reducer, name)] == []
    assert hasattr(DDP, "_build_params_for_reducer")
