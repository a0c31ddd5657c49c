"""What cannot be shadowed is refused at attach or at the first step; the message names it, and says what to do instead.

A refused run leaves nothing behind: neither hooks on the optimizer nor a step at the shadow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate import ReplicasDiffer, Unsupported, UsageError
from checkmate.shadow.run import Limits

from .cases import using
from .conftest import Shadow
from .job import FEATURES, Case, Job
from .loops import plain
from .models import Net, in_dtype
from .pool import Pool

Attached = tuple[nn.Module, Any]


class Twice(optim.SGD):
    """Calls its closure twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class OwnSGD(optim.SGD):
    """Like SGD, but not in ``torch.optim``."""


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, FEATURES).t())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sum(1, keepdim=True)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def shared_by_two() -> Attached:
    net = nn.Linear(2, 2)
    return net, [optim.SGD(net.parameters(), 0.1), optim.Adam([net.bias])]


def outside() -> Attached:
    return nn.Linear(2, 2), optim.SGD(nn.Linear(3, 5).parameters(), 0.1)


def lazy() -> Attached:
    net = nn.LazyLinear(3)
    return net, optim.SGD(net.parameters(), 0.1)


def optimized(net: nn.Module, cls: Any, **options: Any) -> Attached:
    return net, cls(net.parameters(), **options)


AT_ATTACH: dict[str, tuple[Callable[[], Attached], type[Exception], list[str]]] = {
    "LBFGS": (lambda: optimized(nn.Linear(2, 2), optim.LBFGS), Unsupported, ["LBFGS", "closure several times"]),
    "SparseAdam": (
        lambda: optimized(nn.Embedding(4, 2, sparse=True), optim.SparseAdam),
        Unsupported,
        ["SparseAdam", "sparse=False"],
    ),
    "complex parameter": (
        lambda: optimized(Complex(), optim.SGD, lr=0.1),
        Unsupported,
        ["spectrum", "complex", "view_as_real"],
    ),
    "parameter in two optimizers": (shared_by_two, Unsupported, ["bias", "two optimizers"]),
    "parameter outside the model": (outside, Unsupported, ["(5, 3)", "not in the model", "nn.ModuleDict"]),
    "uninitialised parameter": (lazy, Unsupported, ["weight", "forward"]),
    "no optimizer": (lambda: (nn.Linear(2, 2), []), UsageError, ["no optimizer"]),
    "something else": (lambda: (nn.Linear(2, 2), "Adam"), UsageError, ["torch optimizer", "str"]),
}


@pytest.mark.parametrize("what", AT_ATTACH)
def test_attach_refuses_with_a_name_and_a_remedy(shadow: Shadow, what: str) -> None:
    make, kind, words = AT_ATTACH[what]
    model, optimizer = make()
    with pytest.raises(kind) as caught:
        checkmate.attach(model, optimizer, shadow=shadow.address, run=what)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        assert not getattr(each, "_optimizer_step_pre_hooks", None)
    assert what not in shadow.runs


def test_sparse_gradient_is_refused_at_the_first_step_with_its_name(shadow: Shadow) -> None:
    net = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})
    optimizer = optim.SGD(net.parameters(), 0.1)
    with checkmate.attach(net, optimizer, shadow=shadow.address, run="sparse") as ckpt:
        assert ckpt.restore() == 0
        net["table"](torch.tensor([1, 2])).sum().backward()
        with pytest.raises(Unsupported, match=r"table\.weight is sparse.*sparse=False"):
            optimizer.step()


def test_closure_called_twice_is_refused_at_the_first_step() -> None:
    lenient = Shadow(Limits(allowed=(__name__,)))
    net = nn.Linear(2, 1)
    optimizer = Twice(net.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with checkmate.attach(net, optimizer, shadow=lenient.address, run="twice") as ckpt:
        ckpt.restore()
        with pytest.raises(Unsupported, match="Twice called its closure 2 times"):
            optimizer.step(closure)
    lenient.stop()


def test_optimizer_class_of_the_users_own_needs_a_shadow_that_allows_its_module(shadow: Shadow) -> None:
    net = nn.Linear(2, 1)
    optimizer = OwnSGD(net.parameters(), 0.1)
    with checkmate.attach(net, optimizer, shadow=shadow.address, run="own class") as ckpt:
        with pytest.raises(checkmate.CheckmateError) as caught:
            ckpt.restore(timeout=20)
        for word in ("OwnSGD", "torch.optim only", f"--allow {__name__}"):
            assert word in str(caught.value)

    lenient = Shadow(Limits(allowed=(__name__,)))
    case = Case(Net, lambda net: OwnSGD(net.parameters(), 0.1, 0.9), plain)
    whole = Job(case, 0).begin()
    for _ in range(3):
        whole.train()
    for attempt in range(2):
        job = Job(case, 0, attempt).begin(lenient.address, "own class")
        assert job.step == 2 * attempt
        while job.step < 2 + attempt:
            job.train()
        job.ckpt.wait()
        job.crash()
        assert all(map(torch.equal, job.net.parameters(), whole.net.parameters())) == (attempt == 1)
    lenient.stop()


INEXACT: dict[str, tuple[Case, str]] = {
    "fused SGD in half precision": (
        Case(partial(in_dtype, Net, torch.bfloat16), using("SGD", lr=0.05, momentum=0.9, fused=True), plain),
        "fused=False",
    ),
    "fused, transposed": (Case(Transposed, using("Adam", lr=0.02, fused=True), plain), "weight is not contiguous"),
    "half precision, transposed": (
        Case(partial(in_dtype, Transposed, torch.float16), using("SGD", lr=0.05), plain),
        "inner.weight is not contiguous",
    ),
}


@pytest.mark.parametrize("what", INEXACT)
def test_what_torch_does_not_repeat_to_the_bit_is_called_drift(shadow: Shadow, what: str) -> None:
    case, why = INEXACT[what]
    job = Job(case, 0).begin(shadow.address, what)
    assert job.ckpt.stats()["mode"] == "drift"
    assert why in job.ckpt.stats()["drift"][0]
    job.crash()


def test_restored_state_lies_in_memory_as_its_parameter_does(shadow: Shadow) -> None:
    """Fused kernels do not look at strides, so this would mix up elements."""
    case, _ = INEXACT["fused, transposed"]
    whole = Job(case, 0).begin()
    for _ in range(4):
        whole.train()
    for attempt in range(2):
        job = Job(case, 0, attempt).begin(shadow.address, "strides")
        for _ in range(2):
            job.train()
        job.ckpt.wait()
        job.crash()
    assert job.step == 4
    torch.testing.assert_close(job.net.weight, whole.net.weight)
    assert job.optimizer.state[job.net.weight]["exp_avg"].stride() == job.net.weight.stride()


# ------------------------------------------------------------------------------ across ranks


def forget_ddp(rank: int, shadow: str, forgotten: bool) -> tuple[str, str]:
    """Each rank computes on other data: what `optimizer.step()` says, and what this rank can do after."""
    torch.manual_seed(3)
    net: nn.Module = nn.Linear(FEATURES, 2)
    model = net if forgotten else DistributedDataParallel(net)
    optimizer = optim.SGD(net.parameters(), 0.1)
    ckpt = checkmate.attach(model, optimizer, shadow=shadow, run=f"forgotten {forgotten}")
    ckpt.restore()
    model(torch.full((1, FEATURES), 1.0 + rank)).sum().backward()
    try:
        optimizer.step()
    except ReplicasDiffer as error:
        return "differ", str(error)
    ckpt.step()
    ckpt.wait()
    ckpt.close()
    return "fine", ""


@pytest.mark.processes
def test_forgotten_ddp_is_refused_on_every_rank_at_the_first_step(pool: Pool, shadow: Shadow) -> None:
    for kind, text in pool.call(2, forget_ddp, shadow.address, True):
        assert kind == "differ"
        for word in ("ranks 0 and 1", "weight", "DistributedDataParallel"):
            assert word in text
    assert pool.call(2, forget_ddp, shadow.address, False) == [("fine", "")] * 2


def disagree_later(rank: int, shadow: str, what: str) -> tuple[int, str]:
    """From step 3 on, rank 1 edits a gradient or a learning rate on its own; how often a rank hears of it."""
    torch.manual_seed(3)
    net = nn.Linear(FEATURES, 1, bias=False)
    model = DistributedDataParallel(net)
    optimizer = optim.SGD(net.parameters(), 0.1)
    ckpt = checkmate.attach(model, optimizer, shadow=shadow, run=f"later {what}", fresh=True)
    ckpt.restore()
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, FEATURES)).sum().backward()
        if step >= 2 and rank == 1 and what == "gradient":
            assert net.weight.grad is not None
            net.weight.grad *= 2
        if step >= 2 and rank == 1 and what == "learning rate":
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        ckpt.step()
        ckpt.wait()
    stats = ckpt.stats()
    ckpt.close()
    return stats["reports"].get("replicas", 0), stats["state"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("gradient", "hold different gradients of weight in step 3"),
        ("learning rate", "used different hyper-parameters in step 3"),
    ],
)
def test_replicas_that_part_later_are_reported(
    pool: Pool, shadow: Shadow, caplog: pytest.LogCaptureFixture, what: str, told: str
) -> None:
    for reports, state in pool.call(2, disagree_later, shadow.address, what):
        assert state == "streaming"
        assert reports > 0
    assert f"ranks 0 and 1 {told}" in caplog.text
    caplog.clear()
    assert pool.call(2, disagree_later, shadow.address, "nothing") == [(0, "streaming")] * 2
    assert "ranks 0 and 1" not in caplog.text
