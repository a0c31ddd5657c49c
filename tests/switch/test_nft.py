"""Rules of nftables: as text, and in a real switch in a namespace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from checkmate.errors import CheckmateError
from checkmate.switch import nft
from checkmate.switch.cluster import Cluster, Switch, Worker
from checkmate.switch.rules import Operation, Rule, plan
from tests.network import requires_network
from tests.switch.clusters import TWO_WORKERS, clusters
from tests.switch.wires import Wires, frame, wires

TABLE = {"family": "netdev", "name": "checkmate", "handle": 1}


def listed(cluster: Cluster) -> dict[str, Any]:
    """What ``nft -n -j list ruleset`` of nft 1.0.6 prints for a cluster's rules, as seen there."""
    rows: list[dict[str, Any]] = [{"metainfo": {"json_schema_version": 1}}, {"table": TABLE}]
    place = {"family": "netdev", "table": "checkmate"}
    rows.append({"chain": {**place, "name": nft.MARKER, "handle": 1}})
    hook = {"type": "filter", "hook": "ingress", "prio": -300, "policy": "accept"}
    copies = [{"dup": {"addr": port}} for port in sorted(shadow.port for shadow in cluster.shadows)]
    for worker in cluster.workers:
        rows.append({"chain": {**place, "name": f"from_{worker.port}", "handle": 2, **hook}})
        for ip, protocol in (("ip", "protocol"), ("ip6", "nexthdr")):
            expr = [
                {"match": {"op": "==", "left": {"payload": {"protocol": ip, "field": field}}, "right": right}}
                for field, right in (("dscp", cluster.dscp), (protocol, 6))
            ]
            expr += [{"counter": {"packets": 2, "bytes": 100}}, *copy.deepcopy(copies)]
            rows.append({"rule": {**place, "chain": f"from_{worker.port}", "handle": 3, "expr": expr}})
    return {"nftables": rows}


FOREIGN: list[dict[str, Any]] = [
    {"table": {"family": "inet", "name": "checkmate", "handle": 7}},
    {"table": {"family": "netdev", "name": "other", "handle": 8}},
    {"chain": {"family": "netdev", "table": "other", "name": "from_w9", "handle": 1, "hook": "ingress", "prio": -300}},
    {"rule": {"family": "netdev", "table": "other", "chain": "from_w9", "handle": 2, "expr": [{"drop": None}]}},
]


def test_plan_is_written_as_one_transaction() -> None:
    small = replace(TWO_WORKERS, workers=TWO_WORKERS.workers[:1])
    assert nft.script(plan({}, nft.desired(small))) == (
        "create table netdev checkmate\n"
        "create chain netdev checkmate made_by_checkmate_switch\n"
        "create chain netdev checkmate from_w0 "
        '{ type filter hook ingress device "w0" priority -300; policy accept; }\n'
        'add rule netdev checkmate from_w0 ip dscp 43 ip protocol tcp counter dup to "s0" dup to "s1"\n'
        'add rule netdev checkmate from_w0 ip6 dscp 43 ip6 nexthdr tcp counter dup to "s0" dup to "s1"\n'
    )
    assert nft.script(plan(nft.desired(small), {})) == (
        "flush chain netdev checkmate from_w0\n"
        "delete chain netdev checkmate from_w0\n"
        "delete chain netdev checkmate made_by_checkmate_switch\n"
        "delete table netdev checkmate\n"
    )


@given(clusters(), clusters())
def test_every_line_is_about_our_table(before: Cluster, after: Cluster) -> None:
    for operations in (plan(nft.desired(before), nft.desired(after)), plan(nft.desired(before), {})):
        for line in nft.script(operations).splitlines():
            assert line.split()[2:4] == ["netdev", "checkmate"]


@given(clusters())
def test_what_is_listed_is_read_as_what_was_asked_for(cluster: Cluster) -> None:
    listing = listed(cluster)
    listing["nftables"] += FOREIGN
    found = nft.parse(listing)
    assert found.state == nft.desired(cluster)
    assert plan(found.state, nft.desired(cluster)) == ()
    assert set(found.counted.values()) == {(4, 200)}


def test_foreign_tables_alone_are_nothing() -> None:
    assert nft.parse({"nftables": FOREIGN}).state == {}


def test_foreign_table_of_our_name_is_refused() -> None:
    with pytest.raises(CheckmateError, match="did not make"):
        nft.parse({"nftables": [{"table": TABLE}]})


def mutations() -> Iterator[tuple[str, Any]]:
    def rules(listing: Any) -> list[Any]:
        return [row["rule"] for row in listing["nftables"] if "rule" in row]

    def chain(listing: Any) -> Any:
        return next(row["chain"] for row in listing["nftables"] if row.get("chain", {}).get("name") == "from_w0")

    yield "another mark", lambda all: rules(all)[0]["expr"][0]["match"].update(right=44)
    yield "marks that are not equal", lambda all: rules(all)[0]["expr"][0]["match"].update(op="!=")
    yield "another protocol", lambda all: rules(all)[0]["expr"][1]["match"].update(right=17)
    yield "a shadow fewer", lambda all: rules(all)[0]["expr"].pop()
    yield "a device that is gone", lambda all: rules(all)[1]["expr"][3]["dup"].update(addr="5")
    yield "something more in a rule", lambda all: rules(all)[0]["expr"].append({"drop": None})
    yield "no counter", lambda all: rules(all)[0]["expr"].pop(2)
    yield "a rule more", lambda all: all["nftables"].append({"rule": copy.deepcopy(rules(all)[0])})
    yield "a rule fewer", lambda all: all["nftables"].remove({"rule": rules(all)[0]})
    yield "another priority", lambda all: chain(all).update(prio=0)
    yield "another device", lambda all: chain(all).update(dev="w1")
    yield "no hook", lambda all: chain(all).pop("hook")


@pytest.mark.parametrize(("what", "change"), list(mutations()))
def test_chain_that_differs_is_replaced_and_the_others_stay(what: str, change: Any) -> None:
    listing = listed(TWO_WORKERS)
    change(listing)
    (operation,) = plan(nft.parse(listing).state, nft.desired(TWO_WORKERS))
    assert (operation.verb, operation.name) == ("change", "chain from_w0")


def test_chain_of_ours_that_nobody_asks_for_goes() -> None:
    small = replace(TWO_WORKERS, workers=TWO_WORKERS.workers[:1])
    (operation,) = plan(nft.parse(listed(TWO_WORKERS)).state, nft.desired(small))
    assert operation == Operation("chain from_w1", Rule("w1", 43, ("s0", "s1")), None)


def test_tool_that_is_not_there_or_fails_is_named_with_the_command() -> None:
    def on(prefix: str) -> Cluster:
        return replace(TWO_WORKERS, switch=Switch(exec=prefix))

    with pytest.raises(CheckmateError, match="no-such-tool -x nft -n -j list ruleset netdev: there is no no-such-tool"):
        nft.read(on("no-such-tool -x"))
    with pytest.raises(CheckmateError, match=r"sh -c 'echo broken >&2; exit 3' nft .*: broken"):
        nft.read(on("sh -c 'echo broken >&2; exit 3'"))
    with pytest.raises(CheckmateError, match="not JSON"):
        nft.read(on("echo"))


@pytest.fixture
def switch() -> Iterator[Wires]:
    with wires() as made:
        yield made


class TestInANamespace:
    pytestmark = requires_network

    def test_marked_packet_arrives_once_at_each_shadow_and_an_unmarked_one_does_not(self, switch: Wires) -> None:
        marked = frame("w0", "w1", b"marked", dscp=43)
        marked6 = frame("w1", "w0", b"marked", dscp=43, ipv6=True)
        others = [
            ("w0", frame("w0", "w1", b"unmarked", dscp=0)),
            ("w0", frame("w0", "w1", b"other mark", dscp=42)),
            ("w0", frame("w0", "w1", b"not TCP", dscp=43, protocol=17)),
            ("w1", frame("w1", "w0", b"unmarked", dscp=0, ipv6=True)),
            ("w1", frame("w1", "w0", b"not TCP", dscp=43, protocol=17, ipv6=True)),
            ("x0", frame("x0", "w1", b"from no worker", dscp=43)),
            ("s0", frame("s0", "w1", b"from a shadow", dscp=43)),
        ]
        frames = [("w0", marked), ("w1", marked6), *others]
        without = switch.exchange(frames)
        assert without["s0"] == without["s1"] == []  # what follows is the rules' doing

        nft.establish(switch.cluster)
        with_rules = switch.exchange(frames)
        assert sorted(with_rules["s0"]) == sorted(with_rules["s1"]) == sorted([marked, marked6])
        assert (with_rules["w0"], with_rules["w1"]) == (without["w0"], without["w1"])  # workers notice nothing
        assert marked in without["w1"]
        assert marked6 in without["w0"]
        ip_lengths = {"w0": len(marked) - 14, "w1": len(marked6) - 14}
        assert nft.read(switch.cluster).counted == {port: (1, size) for port, size in ip_lengths.items()}

        nft.remove(switch.cluster)
        assert switch.exchange(frames) == without

    def test_second_apply_does_nothing_and_removal_leaves_what_was_there(self, switch: Wires) -> None:
        foreign = "table netdev other {\n chain c {\n type filter hook ingress device w0 priority 0\n counter\n }\n}\n"
        switch.run("nft", "-f", "-", given=foreign + "table inet checkmate {\n}\n")
        before = switch.ruleset()
        assert [operation.verb for operation in nft.establish(switch.cluster)] == ["add"] * 3
        between = switch.ruleset()
        assert nft.establish(switch.cluster) == ()
        assert switch.ruleset() == between != before
        nft.remove(switch.cluster)
        assert switch.ruleset() == before
        assert nft.remove(switch.cluster) == ()

    def test_worker_that_comes_leaves_the_others_counters(self, switch: Wires) -> None:
        nft.establish(replace(switch.cluster, workers=switch.cluster.workers[:1]))
        switch.exchange([("w0", frame("w0", "w1", b"marked", dscp=43))])
        assert nft.read(switch.cluster).counted["w0"][0] == 1
        assert [operation.name for operation in nft.establish(switch.cluster)] == ["chain from_w1"]
        assert nft.read(switch.cluster).counted["w0"][0] == 1

    def test_other_mark_replaces_every_chain_at_once(self, switch: Wires) -> None:
        nft.establish(switch.cluster)
        other = replace(switch.cluster, dscp=46)  # which nft would call "ef"
        assert [operation.verb for operation in nft.establish(other)] == ["change"] * 2
        assert nft.establish(other) == ()
        arrived = switch.exchange([("w0", frame("w0", "w1", bytes([dscp]), dscp=dscp)) for dscp in (43, 46)])
        assert [data[-1] for data in arrived["s0"]] == [46]

    def test_port_of_a_shadow_that_was_made_anew_is_found_and_mended(self, switch: Wires) -> None:
        nft.establish(switch.cluster)
        switch.run("ip", "link", "del", "s0")
        with pytest.raises(CheckmateError, match="port s0 of shadow s0 is no device of the switch; create it"):
            nft.establish(switch.cluster)
        switch.add_port("s0")
        marked = frame("w0", "w1", b"marked", dscp=43)
        assert switch.exchange([("w0", marked)])["s0"] == []
        assert [operation.verb for operation in nft.establish(switch.cluster)] == ["change"] * 2
        assert switch.exchange([("w0", marked)])["s0"] == [marked]

    def test_port_without_device_is_named_and_nothing_is_changed(self, switch: Wires) -> None:
        more = replace(switch.cluster, workers=(*switch.cluster.workers, Worker("w9", "10.77.0.9", "w9")))
        before = switch.ruleset()
        with pytest.raises(CheckmateError, match="port w9 of worker w9 is no device of the switch; create it"):
            nft.establish(more)
        assert switch.ruleset() == before

    def test_foreign_table_of_our_name_is_left_alone(self, switch: Wires) -> None:
        switch.run("nft", "add", "table", "netdev", "checkmate")
        before = switch.ruleset()
        for change in (nft.establish, nft.remove):
            with pytest.raises(CheckmateError, match="nft delete table netdev checkmate"):
                change(switch.cluster)
        assert switch.ruleset() == before

    def test_transaction_that_fails_changes_nothing_and_shows_what_was_given(self, switch: Wires) -> None:
        before = switch.ruleset()
        operations = plan({}, {**nft.desired(switch.cluster), "chain from_x0": Rule("x0", 43, ("s0",))})
        nft.apply(switch.cluster, operations)
        with pytest.raises(
            CheckmateError, match=r"nft -f -: .*File exists[\s\S]*given:\ncreate table netdev checkmate"
        ):
            nft.apply(switch.cluster, operations)  # planned before the first was carried out
        nft.remove(switch.cluster)
        assert switch.ruleset() == before

    def test_any_name_of_a_port_that_a_description_may_hold_works(self, switch: Wires) -> None:
        names = ("0.a-b_c", "drop", "Ethernet-BP256", "in.vlan.100")
        for i, name in enumerate(names):
            switch.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"far{i}")
        odd = replace(
            switch.cluster, workers=tuple(Worker(f"w{i}", f"10.77.0.{i + 1}", n) for i, n in enumerate(names))
        )
        assert len(nft.establish(odd)) == 1 + len(names)
        assert nft.establish(odd) == ()
