"""The description of a cluster: read, written, and refused with the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import UsageError
from checkmate.switch.cluster import Cluster, Multicast, Shadow, Sonic, Switch, Worker, dumps, load, loads
from tests.switch.clusters import MULTICASTS, TWO_WORKERS, clusters

FULL = """
dscp = 21
exec = "ssh {address}"
[switch]
bridge = "br0"
exec = "ssh root@tor1"
[switch.sonic]
session = "erspan"
src_ip = "10.1.0.32"
dst_ip = "10.2.0.1"
gre_type = 0x8949
dscp = 10
ttl = 9
queue = 3
[multicast]
groups = "239.1.2.0/25"
ttl = 8
[[worker]]
name = "w0"
address = "10.77.0.9"
port = "Ethernet0"
interface = "ens3"
[[shadow]]
name = "s0"
address = "10.77.1.1"
port = "Ethernet8"
listen = "10.78.1.1:7070"
"""
LEAST = """
[[worker]]
name = "w0"
address = "10.77.0.1"
port = "w0"
[[shadow]]
name = "s0"
address = "10.77.1.1"
port = "s0"
"""


def test_every_key_is_read() -> None:
    assert loads(FULL) == Cluster(
        (Worker("w0", "10.77.0.9", "Ethernet0", "ens3"),),
        (Shadow("s0", "10.77.1.1", "Ethernet8", "eth0", "10.78.1.1:7070"),),
        21,
        "ssh {address}",
        Switch("br0", "ssh root@tor1", Sonic("erspan", "10.1.0.32", "10.2.0.1", 0x8949, 10, 9, 3)),
        Multicast("239.1.2.0/25", 8),
    )


def test_what_is_left_out_has_its_default() -> None:
    cluster = loads(LEAST)
    assert (cluster.dscp, cluster.exec, cluster.switch, cluster.multicast) == (43, "", Switch(), None)
    assert (cluster.workers[0].interface, cluster.shadows[0].listen) == ("eth0", "")


def test_table_without_a_key_says_that_gradients_go_by_multicast() -> None:
    cluster = loads("[multicast]\n" + LEAST)
    assert cluster.multicast == Multicast("239.77.0.0/24", 1)
    assert loads(dumps(cluster)) == cluster


@given(clusters(MULTICASTS | st.none()))
def test_what_is_written_is_read_back_equal(cluster: Cluster) -> None:
    assert loads(dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dscp = 21", "dscp = 0", "dscp must be a number from 1 to 63, not 0"),
        ("dscp = 21", "dscp = 64", "dscp must be"),
        ("dscp = 21", "dscp = true", "dscp must be"),
        ("dscp = 21", 'dscp = "21"', "dscp must be"),
        ("dscp = 21", "tos = 21", "tos is not a key; there are dscp, exec, switch, multicast, worker, shadow"),
        ("dscp = 10", "dscp = 64", "switch.sonic.dscp must be"),
        ("ttl = 9", "ttl = 0", "switch.sonic.ttl must be"),
        ("0x8949", '"0x8949"', "switch.sonic.gre_type must be"),
        ('session = "erspan"', 'session = "rspan"', 'switch.sonic.session must be "erspan" or "span"'),
        ("10.2.0.1", "10.2.0.256", "switch.sonic.dst_ip is '10.2.0.256'"),
        ('bridge = "br0"', "bridge = 3", "switch.bridge is 3"),
        ("ssh root@tor1", "ssh 'root@tor1", "switch.exec is"),
        ("ssh {address}", "ssh {host}", "exec holds {host}"),
        ("ssh {address}", "ssh {address", "exec is"),
        ("ssh {address}", "ssh\\u0007", "exec must be text of printable characters"),
        ('name = "w0"', 'name = "w 0"', "worker[0].name is 'w 0'"),
        ('name = "w0"', 'nome = "w0"', "worker[0].nome is not a key; there are name, address, port, interface"),
        ('name = "w0"', "", "worker[0].name is missing"),
        ('name = "w0"', 'name = "s0"', "shadow[0].name is 's0', as worker[0].name is"),
        ('port = "Ethernet8"', 'port = "Ethernet0"', "shadow[0].port is 'Ethernet0', as worker[0].port is"),
        ("10.77.0.9", "10.77.1.1", "shadow[0].address is '10.77.1.1', as worker[0].address is"),
        ("10.77.0.9", "fd00:0::1", "worker[0].address is fd00::1; with [multicast] addresses are IPv4"),
        ("10.77.0.9", "fd00::1%eth0", "worker[0].address is 'fd00::1%eth0'"),
        ("10.77.0.9", "10.0.0.0/8", "worker[0].address is '10.0.0.0/8'"),
        ("10.77.0.9", "224.0.0.1", "worker[0].address is 224.0.0.1, which is no host's address"),
        ('port = "Ethernet0"', 'port = "w\\" 0"', "worker[0].port is"),
        ('port = "Ethernet0"', 'port = "sixteen-letters-"', "worker[0].port is 'sixteen-letters-'"),
        ("10.78.1.1:7070", "10.78.1.1", "shadow[0].listen: '10.78.1.1' is not an address"),
        ("10.78.1.1:7070", "10.78.1.1:0", "shadow[0].listen: '10.78.1.1:0' names no port"),
        ("[[worker]]", "[worker]", "there is no worker; write at least one [[worker]]"),
        ("[[shadow]]", "[[worker]]", "worker[1].listen is not a key"),
        ("[switch]", "[[switch]]", "switch must be a table"),
        ("[multicast]", "[[multicast]]", "multicast must be a table"),
        ("ttl = 8", "ttl = 0", "multicast.ttl must be a number from 1 to 255, not 0"),
        ("ttl = 8", "hops = 8", "multicast.hops is not a key; there are groups, ttl"),
        ('"239.1.2.0/25"', "239", "multicast.groups must be text"),
        ("239.1.2.0/25", "239.1.2.3/25", "multicast.groups: groups '239.1.2.3/25': 239.1.2.3/25 has host bits set"),
        ("239.1.2.0/25", "10.0.0.0/8", "multicast.groups: groups '10.0.0.0/8' are no multicast addresses"),
        ("239.1.2.0/25", "224.0.0.0/8", "multicast.groups: groups '224.0.0.0/8': switches send 224.0.0.0/24 to every"),
        ("[[worker]]", "[[worker]", "line 18"),
    ],
)
def test_error_names_file_and_key(old: str, new: str, said: str) -> None:
    assert old in FULL
    with pytest.raises(UsageError) as raised:
        loads(FULL.replace(old, new, 1), "here.toml")
    assert str(raised.value).startswith("here.toml: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("kind", ["worker", "shadow"])
def test_cluster_without_workers_or_shadows_is_refused(kind: str) -> None:
    other = {"worker": LEAST.index("[[shadow]]"), "shadow": 0}[kind]
    text = LEAST[other:] if kind == "worker" else LEAST[: LEAST.index("[[shadow]]")]
    with pytest.raises(UsageError, match=f"there is no {kind}"):
        loads(text)


def test_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bytes\.toml: not UTF-8"):
        load(tmp_path / "bytes.toml")
    (tmp_path / "good.toml").write_text(dumps(TWO_WORKERS))
    assert load(tmp_path / "good.toml") == TWO_WORKERS
