"""Descriptions of clusters for tests: one by hand, and any at all."""

from __future__ import annotations

from hypothesis import strategies as st

from checkmate.switch.cluster import Cluster, Multicast, Shadow, Sonic, Switch, Worker

TWO_WORKERS = Cluster(
    (Worker("w0", "10.77.0.1", "w0"), Worker("w1", "10.77.0.2", "w1")),
    (Shadow("s0", "10.77.1.1", "s0"), Shadow("s1", "10.77.1.2", "s1")),
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,21}", fullmatch=True)
PORTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}", fullmatch=True)
ADDRESSES = st.ip_addresses().filter(lambda ip: not (ip.is_multicast or ip.is_unspecified)).map(str)
COMMANDS = st.sampled_from(["", "ssh {address}", 'ip netns exec "cm {name}"', "sh -c 'a\\b\"ü😀'", "{{x}}"])
PREFIXES = st.sampled_from(["", "ip netns exec cm-switch", 'ssh "a b" \\\\', "docker exec '{x}'"])
BYTES = st.integers(0, 255)
SONICS = st.builds(
    Sonic,
    session=st.sampled_from(["erspan", "span"]),
    src_ip=ADDRESSES | st.just(""),
    dst_ip=ADDRESSES | st.just(""),
    gre_type=st.integers(0, 0xFFFF),
    dscp=st.integers(0, 63),
    ttl=st.integers(1, 255),
    queue=BYTES,
)
MULTICASTS = st.builds(
    Multicast, st.sampled_from(["239.77.0.0/24", "239.1.0.0/16", "232.0.0.7/32"]), st.integers(1, 255)
)


@st.composite
def clusters(draw: st.DrawFn, multicasts: st.SearchStrategy[Multicast | None] = st.none()) -> Cluster:  # noqa: B008
    """Any description that `load` can return; with `multicasts`, also those whose gradients go by multicast."""
    multicast, count = draw(multicasts), draw(st.integers(2, 8))
    addresses = ADDRESSES if multicast is None else ADDRESSES.filter(lambda address: ":" not in address)
    workers = draw(st.integers(1, count - 1))
    rows = [draw(st.lists(kind, min_size=count, max_size=count, unique=True)) for kind in (NAMES, addresses, PORTS)]
    hosts = list(zip(*rows, strict=True))
    return Cluster(
        tuple(Worker(*host, draw(PORTS)) for host in hosts[:workers]),
        tuple(
            Shadow(*host, draw(PORTS), draw(st.sampled_from(["", "h:7070", "tcp://[fe80::1]:1"])))
            for host in hosts[workers:]
        ),
        draw(st.integers(1, 63)),
        draw(COMMANDS),
        Switch(draw(PORTS | st.just("")), draw(PREFIXES), draw(SONICS)),
        multicast,
    )
