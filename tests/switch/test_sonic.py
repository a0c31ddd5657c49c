"""Entries for a SONiC switch, against the names, patterns and enumerations that SONiC publishes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from checkmate.errors import CheckmateError, UsageError
from checkmate.switch import sonic
from checkmate.switch.cluster import Cluster, Shadow, Sonic, Switch, Worker
from checkmate.switch.rules import plan
from tests.switch.clusters import clusters

ONE_SHADOW = Cluster(
    (Worker("w0", "10.77.0.1", "Ethernet0"), Worker("w1", "10.77.0.2", "Ethernet4")),
    (Shadow("s0", "10.77.1.1", "Ethernet8"),),
    switch=Switch(sonic=Sonic(src_ip="10.1.0.32")),
)
SPAN = replace(ONE_SHADOW, switch=Switch(sonic=Sonic(session="span")))
MIXED = replace(ONE_SHADOW, workers=(*ONE_SHADOW.workers, Worker("w2", "fd00::3", "Ethernet12")))


def number(low: int, high: int) -> Any:
    return lambda value: value.isdigit() and low <= int(value) <= high


def matches(pattern: str) -> Any:
    return lambda value: re.fullmatch(pattern, value) is not None


ADDRESS = matches(r"[0-9.]+|[0-9a-f:]+")
SESSION_NAME = matches(r"[a-zA-Z0-9]{1}([-a-zA-Z0-9_]{0,31})")
#: sonic-net/sonic-buildimage, src/sonic-yang-models: yang-models/sonic-mirror-session.yang (23aa0900),
#: yang-templates/sonic-acl.yang.j2 (056a6387) and sonic-types.yang.j2 (07f1503f). Only the fields that we write.
SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "MIRROR_SESSION": {
        "type": matches("ERSPAN|SPAN"),
        "src_ip": ADDRESS,
        "dst_ip": ADDRESS,
        "gre_type": lambda value: re.fullmatch("0[xX][0-9a-fA-F]*", value) and len(value) <= 6,
        "dscp": number(0, 63),
        "ttl": number(0, 255),
        "queue": number(0, 255),
        "dst_port": matches("[^|]+"),
    },
    "ACL_TABLE": {
        "policy_desc": lambda value: 1 <= len(value) <= 255,
        "type": matches("L2|L3|L3V6|L3V4V6|MIRROR|MIRRORV6|MIRROR_DSCP|CTRLPLANE"),
        "stage": matches("ingress|egress|INGRESS|EGRESS"),
        "ports": lambda value: isinstance(value, list) and all(isinstance(port, str) for port in value),
    },
    "ACL_RULE": {
        "PRIORITY": number(0, 999999),
        "IP_PROTOCOL": number(1, 143),
        "DSCP": number(0, 255),
        "MIRROR_INGRESS_ACTION": SESSION_NAME,
    },
}
MANDATORY = {"MIRROR_SESSION": set[str](), "ACL_TABLE": {"type"}, "ACL_RULE": {"PRIORITY"}}
#: Fields with a `when` on the session's type.
OF_TYPE = {"ERSPAN": {"src_ip", "dst_ip", "gre_type", "dscp", "ttl"}, "SPAN": {"dst_port"}}


def check_schema(config: sonic.Config) -> None:
    assert set(config) <= set(SCHEMA)
    for table, rows in config.items():
        for row in rows.values():
            assert MANDATORY[table] <= set(row) <= set(SCHEMA[table])
            for name, value in row.items():
                assert SCHEMA[table][name](value), (table, name, value)
    sessions = config["MIRROR_SESSION"]
    for name, session in sessions.items():
        assert SESSION_NAME(name)
        for kind, fields in OF_TYPE.items():
            assert session["type"] == kind or not fields & set(session)
    for key, rule in config["ACL_RULE"].items():
        table, name = key.split("|")
        assert table in config["ACL_TABLE"]
        assert 1 <= len(name) <= 255
        assert rule["MIRROR_INGRESS_ACTION"] in sessions


def answer(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return sonic.load_json(sonic.desired(cluster))


@given(clusters())
def test_entries_fit_the_published_schema(cluster: Cluster) -> None:
    cluster = replace(cluster, shadows=cluster.shadows[:1])
    try:
        check_schema(answer(cluster))
    except UsageError as error:
        assert "switch.sonic.src_ip" in str(error)  # noqa: PT017 (both outcomes are right, for different clusters)


def test_check_of_the_schema_sees_what_does_not_fit() -> None:
    for table, field, value in [
        ("MIRROR_SESSION", "dst_port", "Ethernet8"),
        ("MIRROR_SESSION", "ttl", "256"),
        ("ACL_TABLE", "stage", "Ingress"),
        ("ACL_RULE", "NEXT_HEADER", "6"),
        ("ACL_RULE", "MIRROR_INGRESS_ACTION", "another"),
    ]:
        config = answer(ONE_SHADOW)
        next(iter(config[table].values()))[field] = value
        with pytest.raises(AssertionError):
            check_schema(config)


def test_erspan_session_table_and_rule() -> None:
    assert answer(ONE_SHADOW) == {
        "MIRROR_SESSION": {
            "checkmate-s0": {
                "type": "ERSPAN",
                "src_ip": "10.1.0.32",
                "dst_ip": "10.77.1.1",
                "gre_type": "0x88be",
                "dscp": "8",
                "ttl": "64",
                "queue": "0",
            }
        },
        "ACL_TABLE": {
            "CHECKMATE": {
                "policy_desc": "made by checkmate switch",
                "type": "MIRROR",
                "stage": "ingress",
                "ports": ["Ethernet0", "Ethernet4"],
            }
        },
        "ACL_RULE": {
            "CHECKMATE|DSCP43_s0": {
                "PRIORITY": "1000",
                "IP_PROTOCOL": "6",
                "DSCP": "43",
                "MIRROR_INGRESS_ACTION": "checkmate-s0",
            }
        },
    }


def test_span_session_goes_out_of_the_shadows_port() -> None:
    assert answer(SPAN)["MIRROR_SESSION"] == {"checkmate-s0": {"type": "SPAN", "dst_port": "Ethernet8"}}


def test_ipv6_workers_have_a_table_of_their_own_type() -> None:
    config = answer(MIXED)
    check_schema(config)
    assert {name: row["type"] for name, row in config["ACL_TABLE"].items()} == {
        "CHECKMATE": "MIRROR",
        "CHECKMATE_V6": "MIRRORV6",
    }
    assert set(config["ACL_RULE"]) == {"CHECKMATE|DSCP43_s0", "CHECKMATE_V6|DSCP43_s0"}


def test_what_sonic_cannot_do_is_refused_with_the_reason() -> None:
    two = replace(ONE_SHADOW, shadows=(*ONE_SHADOW.shadows, Shadow("s1", "10.77.1.2", "Ethernet16")))
    with pytest.raises(UsageError, match="one mirror session per ACL rule"):
        sonic.desired(two)
    with pytest.raises(UsageError, match=r"switch\.sonic\.src_ip is missing"):
        sonic.desired(replace(ONE_SHADOW, switch=Switch()))
    with pytest.raises(UsageError, match="one is IPv4, one IPv6"):
        sonic.desired(replace(ONE_SHADOW, switch=Switch(sonic=Sonic(src_ip="fd00::1"))))


#: What a switch may have before; rules and sessions of others, and tables that we do not know.
FOREIGN: dict[str, dict[str, Any]] = {
    "PORT": {"Ethernet0": {"lanes": "1"}},
    "MIRROR_SESSION": {"everflow0": {"src_ip": "1.2.3.4", "dst_ip": "5.6.7.8"}},
    "ACL_TABLE": {"DATAACL": {"type": "L3", "ports": ["Ethernet0"]}},
    "ACL_RULE": {"DATAACL|RULE_1": {"PRIORITY": "1", "PACKET_ACTION": "DROP"}},
}
BARE: dict[str, dict[str, Any]] = {"PORT": {"Ethernet0": {"lanes": "1"}}}


def apply_patch(steps: list[dict[str, Any]], config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """RFC 6902 on two levels, with SONiC's rule: no table may be left empty."""
    config = copy.deepcopy(config)
    for step in steps:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        parent: dict[str, Any] = config
        for part in parts[:-1]:
            parent = parent[part]
        assert (parts[-1] in parent) is (step["op"] != "add"), step
        if step["op"] == "remove":
            del parent[parts[-1]]
        else:
            parent[parts[-1]] = step["value"]
    assert all(config.values()), "a table is empty"
    return config


@pytest.mark.parametrize("before", [FOREIGN, BARE])
def test_patch_brings_ours_and_takes_it_away_again(before: dict[str, dict[str, Any]]) -> None:
    desired = sonic.desired(MIXED)
    after = apply_patch(sonic.patch(plan(sonic.read(before), desired), before), before)
    assert sonic.read(after) == desired
    assert plan(sonic.read(after), desired) == ()
    assert apply_patch(sonic.patch(plan(sonic.read(after), {}), after), after) == before


def test_patch_follows_a_changed_description() -> None:
    before = apply_patch(sonic.patch(plan({}, sonic.desired(MIXED)), FOREIGN), FOREIGN)
    desired = sonic.desired(replace(SPAN, dscp=21))
    operations = plan(sonic.read(before), desired)
    assert sonic.read(apply_patch(sonic.patch(operations, before), before)) == desired
    assert {o.verb for o in operations if o.name.startswith("ACL_RULE|")} == {"add", "remove"}  # never changed in place


def test_removal_without_the_switchs_configuration_names_each_entry() -> None:
    steps = sonic.patch(plan(sonic.desired(ONE_SHADOW), {}), None)
    assert [step["op"] for step in steps] == ["remove"] * 3
    after = apply_patch(sonic.patch(plan({}, sonic.desired(ONE_SHADOW)), FOREIGN), FOREIGN)
    assert apply_patch(steps, after) == FOREIGN


def test_order_of_ports_and_numbers_as_numbers_are_no_difference() -> None:
    config = answer(ONE_SHADOW)
    config["ACL_TABLE"]["CHECKMATE"]["ports"].reverse()
    config["ACL_RULE"]["CHECKMATE|DSCP43_s0"]["DSCP"] = 43
    assert plan(sonic.read(config), sonic.desired(ONE_SHADOW)) == ()


def test_foreign_table_of_our_name_is_refused() -> None:
    with pytest.raises(CheckmateError, match="ACL table CHECKMATE that checkmate switch did not make"):
        sonic.read({"ACL_TABLE": {"CHECKMATE": {"type": "L3"}}})


def test_other_mirror_table_is_in_the_way() -> None:
    everflow = {"ACL_TABLE": {"EVERFLOW": {"type": "MIRROR", "ports": ["Ethernet0"]}}}
    assert "EVERFLOW" in str(sonic.obstacle(everflow, sonic.desired(ONE_SHADOW)))
    for harmless in (FOREIGN, answer(ONE_SHADOW), {"ACL_TABLE": {"E": {"type": "MIRROR", "stage": "egress"}}}):
        assert sonic.obstacle(harmless, sonic.desired(ONE_SHADOW)) is None


@pytest.mark.parametrize("content", [[], 3, {"PORT": 3}, {"PORT": {"Ethernet0": "up"}}])
def test_what_is_no_configuration_is_refused(content: Any) -> None:
    assert json.dumps(content)
    with pytest.raises(UsageError, match=r"here\.json is not the configuration of a SONiC switch"):
        sonic.check(content, "here.json")
