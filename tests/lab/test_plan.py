"""What a lab consists of, without building one."""

from __future__ import annotations

from typing import Any

import pytest

from checkmate import UsageError
from checkmate.lab import Shape, plan
from checkmate.switch import cluster as description


def test_hosts_have_a_namespace_and_an_address_on_each_network() -> None:
    shape = Shape(workers=2, shadows=1)
    assert [(h.name, h.namespace, h.address, h.management) for h in plan.hosts(shape)] == [
        ("w0", "cm-w0", "10.77.0.1", "10.78.0.1"),
        ("w1", "cm-w1", "10.77.0.2", "10.78.0.2"),
        ("s0", "cm-s0", "10.77.1.1", "10.78.1.1"),
    ]
    assert plan.mac("10.77.1.1") == "02:00:0a:4d:01:01"


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 65},
        {"shadows": 17},
        {"shadows": -1},
        {"mtu": 500},
        {"rate": "fast"},
        {"rate": "1bit"},
    ],
    ids=str,
)
def test_shapes_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Shape(**options)


@pytest.mark.parametrize("name", ["cm-w", "cm-x0", "cm-w0x", "acm-w0", "cm-switch2", "w0", ""])
def test_other_names_are_not_ours(name: str) -> None:
    assert not plan.OURS.fullmatch(name)


def test_everything_that_is_built_has_our_names() -> None:
    shape = Shape(workers=3, shadows=2, rate="1gbit", offloads=False)
    names = {plan.SWITCH, *(host.namespace for host in plan.hosts(shape))}
    assert all(plan.OURS.fullmatch(name) for name in names)
    for command in plan.commands(shape):
        if command.argv[:2] == ("ip", "-batch"):  # outside: namespaces, and links whose ends are both in one
            for words in map(str.split, command.text.splitlines()):
                where = (
                    words[2:] if words[0] == "netns" else [words[i + 1] for i, w in enumerate(words) if w == "netns"]
                )
                assert len(where) == (1 if words[0] == "netns" else 2)
                assert set(where) <= names
        else:
            inside = command.argv[3] if command.argv[:3] == ("ip", "netns", "exec") else command.argv[2]
            assert inside in names


def test_description_of_a_lab_is_one_that_switch_and_doctor_take(tmp_path: Any) -> None:
    cluster = plan.cluster(Shape(workers=3, shadows=2))
    (tmp_path / "cluster.toml").write_text(description.dumps(cluster))
    assert description.load(tmp_path / "cluster.toml") == cluster
