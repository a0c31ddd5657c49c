"""A SONiC switch: entries of its CONFIG_DB, as JSON for SONiC's own tools. Nothing here talks to a switch.

    MIRROR_SESSION|checkmate-s0         where copies go: ERSPAN to the shadow's address, or SPAN out of its port
    ACL_TABLE|CHECKMATE                 type MIRROR (CHECKMATE_V6: MIRRORV6), ingress, bound to the workers' ports
    ACL_RULE|CHECKMATE|DSCP43_s0        TCP with the mark: MIRROR_INGRESS_ACTION is the session

Names and values follow sonic-buildimage's ``sonic-mirror-session.yang`` and ``sonic-acl.yang``. Two limits come from
sonic-swss' orchagent (``aclorch.cpp``): a rule has one mirror session, and a switch has one ingress table of type
MIRROR and one of MIRRORV6. So there can be one shadow, and none beside a foreign table of that type, which SONiC's
EVERFLOW is; both are refused. Nor does it update a mirror rule: what our rule holds is therefore in its name.

``config load`` merges and cannot delete; removal is a JSON patch (RFC 6902) for ``config apply-patch``, which refuses
what leaves an empty table. Given the switch's configuration, `patch` removes the whole table if nothing else is in it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckmateError, UsageError
from .cluster import Cluster
from .rules import Operation, State, rules

SESSION = "checkmate-"
TABLES = {4: ("CHECKMATE", "MIRROR"), 6: ("CHECKMATE_V6", "MIRRORV6")}
#: Marks a table as ours.
DESCRIPTION = "made by checkmate switch"
PRIORITY = "1000"
TCP = "6"

Config = Mapping[str, Mapping[str, Mapping[str, Any]]]


def desired(cluster: Cluster) -> State:
    """The entries, by "TABLE|KEY". Raises UsageError for what a SONiC switch cannot do."""
    if cluster.multicast is not None:
        raise UsageError(
            "with [multicast] there is nothing to configure here: SONiC's published schema has no IGMP snooping. "
            "In the VLAN of the hosts let the switch snoop, with a querier, or flood multicast; checkmate doctor says "
            "whether groups reach them. Rules of ours that still mirror: checkmate switch remove --config-db FILE"
        )
    if len(cluster.shadows) > 1:
        raise UsageError(
            f"SONiC takes one mirror session per ACL rule and one MIRROR table, so it can copy to one shadow, not to "
            f"{len(cluster.shadows)}; describe one shadow, whose port may lead to a Linux bridge that copies further "
            "(--target nft)"
        )
    state: dict[str, Any] = {}
    (shadow,) = cluster.shadows
    name = SESSION + shadow.name
    state[f"MIRROR_SESSION|{name}"] = _session(cluster)
    wanted = rules(cluster)
    families = sorted({ipaddress.ip_address(worker.address).version for worker in cluster.workers})
    for table, kind in (TABLES[family] for family in families):
        state[f"ACL_TABLE|{table}"] = {
            "policy_desc": DESCRIPTION,
            "type": kind,
            "stage": "ingress",
            "ports": sorted(rule.port for rule in wanted),
        }
    for table, _ in (TABLES[family] for family in families):
        state[f"ACL_RULE|{table}|DSCP{cluster.dscp}_{shadow.name}"] = {
            "PRIORITY": PRIORITY,
            "IP_PROTOCOL": TCP,
            "DSCP": str(cluster.dscp),
            "MIRROR_INGRESS_ACTION": name,
        }
    return state


def _session(cluster: Cluster) -> dict[str, str]:
    sonic = cluster.switch.sonic
    (shadow,) = cluster.shadows
    if sonic.session == "span":
        return {"type": "SPAN", "dst_port": shadow.port}
    if not sonic.src_ip:
        raise UsageError(
            "switch.sonic.src_ip is missing: the address of the switch that ERSPAN copies come from; "
            'or say session = "span" if the shadow hangs on this switch'
        )
    target = sonic.dst_ip or shadow.address
    if ipaddress.ip_address(sonic.src_ip).version != ipaddress.ip_address(target).version:
        raise UsageError(f"switch.sonic.src_ip is {sonic.src_ip}, but copies go to {target}: one is IPv4, one IPv6")
    return {
        "type": "ERSPAN",
        "src_ip": sonic.src_ip,
        "dst_ip": target,
        "gre_type": f"0x{sonic.gre_type:04x}",
        "dscp": str(sonic.dscp),
        "ttl": str(sonic.ttl),
        "queue": str(sonic.queue),
    }


def check(content: Any, source: str) -> Config:
    """A switch's configuration, as ``sonic-cfggen -d --print-data`` prints it; UsageError if it has not that form."""
    tables = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(table, dict) and all(isinstance(row, dict) for row in table.values()) for table in tables):
        raise UsageError(
            f"{source} is not the configuration of a SONiC switch, as sonic-cfggen -d --print-data prints it"
        )
    return content  # type: ignore[no-any-return]


def read(config: Config) -> State:
    """Ours in a switch's configuration. Raises CheckmateError for a foreign table of our name."""
    tables = {name for name, _ in TABLES.values()}
    for name in tables & set(config.get("ACL_TABLE", {})):
        said = config["ACL_TABLE"][name].get("policy_desc")
        if said != DESCRIPTION:
            raise CheckmateError(
                f"the switch has an ACL table {name} that checkmate switch did not make (its policy_desc is {said!r}, "
                f"not {DESCRIPTION!r}); rename or remove it"
            )
    return {
        f"{table}|{key}": {name: _plain(value) for name, value in row.items()}
        for table in ("MIRROR_SESSION", "ACL_TABLE", "ACL_RULE")
        for key, row in config.get(table, {}).items()
        if (key.startswith(SESSION) if table == "MIRROR_SESSION" else key.split("|")[0] in tables)
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else str(value)


def obstacle(config: Config, wanted: State) -> str | None:
    """Why the switch would not take our tables: another of the same type and stage is there."""
    kinds = {row["type"] for name, row in wanted.items() if name.startswith("ACL_TABLE|")}
    for name, row in config.get("ACL_TABLE", {}).items():
        stage = str(row.get("stage", "ingress")).lower()
        if f"ACL_TABLE|{name}" not in wanted and row.get("type") in kinds and stage == "ingress":
            return (
                f"the switch has an ingress ACL table of type {row['type']} already, {name}, and SONiC takes one only; "
                f"remove it (config acl remove table {name}), or add our rule to it by hand"
            )
    return None


def load_json(wanted: State) -> dict[str, dict[str, Any]]:
    """What ``config load`` takes: the entries by table."""
    content: dict[str, dict[str, Any]] = {}
    for name, row in wanted.items():
        table, key = name.split("|", 1)
        content.setdefault(table, {})[key] = row
    return content


def patch(operations: Iterable[Operation], config: Config | None) -> list[dict[str, Any]]:
    """What ``config apply-patch`` takes. Without the switch's `config`, each table is taken to have foreign entries."""
    by_table: dict[str, list[tuple[str, Operation]]] = {}
    for operation in operations:
        table, key = operation.name.split("|", 1)
        by_table.setdefault(table, []).append((key, operation))
    steps: list[dict[str, Any]] = []
    for table, changes in by_table.items():
        there = None if config is None else set(config.get(table, {}))
        added = {key: operation.after for key, operation in changes if operation.after is not None}
        if there is not None and not there:
            steps.append({"op": "add", "path": _pointer(table), "value": added})
        elif there is not None and not added and there == {key for key, _ in changes}:
            steps.append({"op": "remove", "path": _pointer(table)})
        else:
            for key, operation in changes:
                verb = {"add": "add", "change": "replace", "remove": "remove"}[operation.verb]
                value = {} if operation.after is None else {"value": operation.after}
                steps.append({"op": verb, "path": _pointer(table, key), **value})
    return steps


def _pointer(*parts: str) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
