"""Runs the commands of a plan, reads the network back, and removes it with all that runs in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckmateError
from . import plan
from .plan import Command, Host, Shape

#: How long processes that were killed may take to be gone.
ENDING_S = 10.0
PACKAGES = {"ip": "iproute2", "bridge": "iproute2", "tc": "iproute2", "nft": "nftables", "ethtool": "ethtool"}
NAMESPACES = Path("/run/netns")


class LabError(CheckmateError):
    """The lab cannot be built, or is not what it should be."""


def require(shape: Shape) -> None:
    """Raises LabError, with what mends it, if this is not root on Linux with the tools that the lab needs."""
    if os.geteuid() != 0:
        raise LabError("a lab is made of network namespaces, which needs root: run it with sudo")
    needed = ["ip", *(["nft"] if shape.rules else []), *([] if shape.offloads else ["ethtool"])]
    needed += ["bridge", "setpriv", *(["tc"] if shape.rate else [])]
    for tool in needed:
        if shutil.which(tool) is None:
            package = PACKAGES.get(tool, "util-linux")
            why = " to switch offloads off" if tool == "ethtool" else ""
            raise LabError(f"{tool} is missing{why}; on Debian or Ubuntu: sudo apt install {package}")


def run(command: Command) -> str:
    """Raises LabError with what the command says if it fails."""
    try:
        ran = subprocess.run(command.argv, input=command.text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        package = PACKAGES.get(command.argv[0], command.argv[0])
        raise LabError(f"{command.argv[0]} is missing; on Debian or Ubuntu: sudo apt install {package}") from None
    if ran.returncode:
        raise LabError(f"{' '.join(command.argv)}: {ran.stderr.strip() or ran.stdout.strip()}")
    return ran.stdout


def build(shape: Shape) -> None:
    for command in plan.commands(shape):
        run(command)


# ---------------------------------------------------------------- what is there


def namespaces() -> list[str]:
    """Ours."""
    try:
        return sorted(entry.name for entry in NAMESPACES.iterdir() if plan.OURS.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def processes(names: Iterable[str]) -> dict[int, str]:
    """The processes in these namespaces: pid to namespace. This one is never among them."""
    inodes = {}
    for name in names:
        try:
            status = (NAMESPACES / name).stat()
        except OSError:  # removed meanwhile
            continue
        inodes[status.st_dev, status.st_ino] = name
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                status = (entry / "ns" / "net").stat()
            except OSError:  # ended, or a zombie
                continue
            if (status.st_dev, status.st_ino) in inodes:
                found[int(entry.name)] = inodes[status.st_dev, status.st_ino]
    return found


def counters(shape: Shape) -> dict[str, dict[str, int]]:
    """As `cluster.Lab.counters`: read at the switch, all at the same time, and turned round."""
    listing = json.loads(run(Command(("ip", "-n", plan.SWITCH, "-j", "-s", "link", "show"))))
    ports = {link["ifname"]: link["stats64"] for link in listing}
    found = {}
    for host in plan.hosts(shape):
        for interface, port, _, _ in host.links:
            name = host.name if interface == plan.DATA[0] else f"{host.name}/{interface}"
            found[name] = {
                f"{direction}_{unit}": ports[port][there][unit]
                for direction, there in (("rx", "tx"), ("tx", "rx"))
                for unit in ("bytes", "packets")
            }
    if shape.rate is not None:
        for qdisc in json.loads(run(Command(("tc", "-n", plan.SWITCH, "-j", "-s", "qdisc", "show")))):
            if qdisc["kind"] == "tbf" and qdisc["dev"] in found:
                found[qdisc["dev"]]["rx_dropped"] = qdisc["drops"]
    return found


# ---------------------------------------------------------------- changes


#: Of random loss, one table per host: rules of ours, but not of ``checkmate switch``.
LOSS = "checkmate_lab_loss_"
#: The finest share of packets that can be dropped.
PARTS = 100_000


def drop(host: Host, percent: float) -> None:
    """Drop this share of the packets that leave the switch for a host's eth0, at random; 0 ends it.

    A GSO packet is dropped whole: without offloads the loss is that of real packets.
    """
    table = f"table netdev {LOSS}{host.name}"
    text = f"{table}\ndelete {table}\n"
    if share := round(percent / 100 * PARTS):
        chain = f'type filter hook egress device "{host.name}" priority 0; policy accept;'
        some = f"numgen random mod {PARTS} < {share} " if share < PARTS else ""
        text += f"{table} {{\n chain out {{\n {chain}\n {some}counter drop\n }}\n}}\n"
    run(Command((*plan.within(plan.SWITCH), "nft", "-f", "-"), text))


def end_losses() -> None:
    """What `drop` has begun, by whoever was killed before it could end it."""
    for row in rules():
        if (table := row.get("table", {})).get("name", "").startswith(LOSS):
            run(Command((*plan.within(plan.SWITCH), "nft", "delete", "table", "netdev", table["name"])))


def kill(names: Iterable[str]) -> None:
    """End every process in these namespaces, at once."""
    names = list(names)
    deadline = time.monotonic() + ENDING_S
    while pids := processes(names):  # again: one of them may have forked
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(map(str, sorted(pids)))} in the lab do not end")
        time.sleep(0.01)


def clear() -> list[str]:
    """Remove what is ours: the processes, then the namespaces, with which go links and rules. Says what was there."""
    names = namespaces()
    if names:
        kill(names)
        run(Command(("ip", "-batch", "-"), "".join(f"netns del {name}\n" for name in names)))
    return names


def rules() -> list[dict[str, Any]]:
    """All that nft lists in the switch."""
    listing = run(Command((*plan.within(plan.SWITCH), "nft", "-j", "list", "ruleset")))
    return list(json.loads(listing)["nftables"])
