"""Changes outside the optimizer are found, and found fast."""

from __future__ import annotations

import torch
from torch import nn

from checkmate.trainer.changes import Watch


def watched(count: int) -> tuple[list[nn.Parameter], Watch]:
    params = [nn.Parameter(torch.randn(3, 5)) for _ in range(count)]
    optimizer = torch.optim.Adam(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, Watch(dict(enumerate(params)), dict.fromkeys(range(count), optimizer))


def test_just_the_blocks_that_changed_are_named() -> None:
    params, watch = watched(6)
    assert watch.changed() == set()
    params[1].data.clamp_(-0.1, 0.1)  # escapes the version counter
    with torch.no_grad():
        params[3].zero_()
    params[4].data = params[4].data.clone()
    assert watch.changed() == {1, 3, 4}
    watch.mark_all()
    assert watch.changed() == set()


def test_dropped_state_of_one_block_is_not_taken_for_that_of_the_next() -> None:
    params, watch = watched(4)
    optimizer = watch._optimizer_of[0]
    optimizer.state[params[1]].popitem()
    optimizer.state[params[2]]["step"].add_(1)
    assert watch.changed() == {1, 2}


def test_looking_costs_no_more_per_block_where_many_changed() -> None:
    """Counted in work, not in seconds: the sizes of views that are asked for."""
    asked = 0

    class Counted(torch.Tensor):
        def __len__(self) -> int:
            nonlocal asked
            asked += 1
            return 15

    def lengths(count: int) -> int:
        nonlocal asked
        params, watch = watched(count)
        with torch.no_grad():
            for param in params:
                param.mul_(2)
        for look in watch._looks.values():
            look.views[:] = [view.as_subclass(Counted) for view in look.views]
        asked = 0
        assert watch.changed() == set(range(count))
        return asked

    assert lengths(80) <= 4 * lengths(20)
