"""``checkmate switch`` as a user meets it: what it prints, what it leaves, its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from checkmate import cli
from checkmate.switch.cluster import Cluster, Multicast, Shadow, Sonic, Switch, Worker, dumps
from tests.network import requires_network
from tests.switch.wires import Wires, frame, wires

ON_SONIC = Cluster(
    (Worker("w0", "10.77.0.1", "Ethernet0"),),
    (Shadow("s0", "10.77.1.1", "Ethernet8"),),
    switch=Switch(sonic=Sonic(src_ip="10.1.0.32")),
)


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run ``checkmate switch VERB --cluster (a file with CLUSTER) OPTIONS`` in this process."""

    def command(verb: str, cluster: Cluster, *options: object) -> Result:
        (tmp_path / "cluster.toml").write_text(dumps(cluster))
        arguments = ["switch", verb, "--cluster", tmp_path / "cluster.toml", *options]
        monkeypatch.setattr(sys, "argv", ["checkmate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Result(code if isinstance(code, int) else int(code is not None), *capsys.readouterr())

    return command


class TestNft:
    pytestmark = requires_network

    @pytest.fixture
    def switch(self) -> Iterator[Wires]:
        with wires() as made:
            yield made

    def test_difference_is_shown_applied_and_removed(self, switch: Wires, run: Command) -> None:
        before = switch.ruleset()
        shown = run("show", switch.cluster)
        assert shown.code == 1
        assert "differs: apply would add chain from_w0" in shown.out
        tried = run("apply", switch.cluster, "--dry-run")
        assert tried.code == 0
        assert "would add table netdev checkmate" in tried.out
        assert 'dup to "s0"' in tried.out
        assert switch.ruleset() == before

        applied = run("apply", switch.cluster)
        assert applied.code == 0
        assert "+ TCP with DSCP 43 that comes in at w1 is copied to s0, s1" in applied.out
        assert run("apply", switch.cluster) == (0, "nothing to do\n", "")
        switch.exchange([("w0", frame("w0", "w1", b"marked", dscp=43))])
        shown = run("show", switch.cluster)
        assert shown.code == 0
        assert shown.out.splitlines()[0].split() == ["port", "marked", "copied", "to", "there", "packets", "bytes"]
        assert shown.out.splitlines()[1].split() == ["w0", "DSCP", "43", "s0,", "s1", "yes", "1", "46"]
        assert shown.out.splitlines()[-1] == "the switch is as desired"

        assert run("remove", switch.cluster).code == 0
        assert switch.ruleset() == before
        assert run("remove", switch.cluster) == (0, "nothing to do\n", "")

    def test_json_says_the_same(self, switch: Wires, run: Command) -> None:
        facts = json.loads(run("apply", switch.cluster, "--json").out)
        assert [change["do"] for change in facts["changes"]] == ["add"] * 3
        assert facts["changes"][1]["after"] == {"port": "w0", "dscp": 43, "copies": ["s0", "s1"]}
        assert facts["applied"]
        shown = json.loads(run("show", switch.cluster, "--json").out)
        assert shown["as_desired"]
        assert [rule["there"] for rule in shown["rules"]] == [True, True]
        other = run("show", replace(switch.cluster, dscp=21), "--json")
        assert other.code == 1
        assert [change["do"] for change in json.loads(other.out)["changes"]] == ["change"] * 2

    def test_port_without_device_fails_also_when_tried(self, switch: Wires, run: Command) -> None:
        more = replace(switch.cluster, workers=(*switch.cluster.workers, Worker("w9", "10.77.0.9", "w9")))
        for options in ((), ("--dry-run",)):
            ended = run("apply", more, *options)
            assert ended.code == 1
            assert "port w9 of worker w9 is no device of the switch" in ended.err
        shown = run("show", more)
        assert shown.code == 1
        assert "port w9 of worker w9 is no device of the switch" in shown.out


class TestMulticast:
    pytestmark = requires_network

    @pytest.fixture
    def switch(self) -> Iterator[Wires]:
        with wires() as made:
            made.cluster = replace(made.cluster, switch=replace(made.cluster.switch, bridge="br0"))
            made.run("ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "0")
            yield made

    def test_bridge_is_made_to_snoop_and_rules_that_nobody_wants_go(self, switch: Wires, run: Command) -> None:
        before = switch.ruleset()
        assert run("apply", switch.cluster).code == 0  # as long as it was the mirror
        cluster = replace(switch.cluster, multicast=Multicast())
        shown = run("show", cluster)
        assert shown.code == 1
        assert shown.out.splitlines()[:3] == [
            "bridge br0 mcast_snooping is off",
            "bridge br0 mcast_querier is off",
            "no host has joined a group in 239.77.0.0/24",
        ]
        for change in ("remove chain from_w0", "remove table netdev checkmate", "change bridge br0 mcast_snooping"):
            assert f"differs: apply would {change}" in shown.out
        tried = run("apply", cluster, "--dry-run")
        assert "\nip link set dev br0 type bridge mcast_snooping 1 mcast_querier 1\n" in tried.out
        assert "delete table netdev checkmate" in tried.out
        assert run("show", cluster).out == shown.out

        assert run("apply", cluster).code == 0
        assert run("apply", cluster) == (0, "nothing to do\n", "")
        assert switch.ruleset() == before
        shown = run("show", cluster)
        assert shown.code == 0
        assert shown.out.endswith("the switch is as desired\n")
        assert run("remove", cluster) == (0, "nothing to do\n", "")
        assert run("show", cluster).code == 0

    def test_json_says_the_same(self, switch: Wires, run: Command) -> None:
        cluster = replace(switch.cluster, multicast=Multicast())
        facts = json.loads(run("apply", cluster, "--json").out)
        assert [(c["do"], c["before"], c["after"]) for c in facts["changes"]] == [("change", 0, 1)] * 2
        assert facts["commands"] == ["ip link set dev br0 type bridge mcast_snooping 1 mcast_querier 1"]
        assert facts["script"] == ""
        shown = json.loads(run("show", cluster, "--json").out)
        assert (shown["as_desired"], shown["rules"], shown["groups"], shown["routers"]) == (True, [], {}, [])
        assert set(shown["settings"].values()) == {1}

    def test_bridge_that_is_none_or_not_named_is_refused(self, switch: Wires, run: Command) -> None:
        for bridge, code, said in (("w0", 1, "w0 of the switch is no bridge"), ("", 2, "switch.bridge is missing")):
            named = replace(switch.cluster.switch, bridge=bridge)
            for verb in ("show", "apply"):
                ended = run(verb, replace(switch.cluster, multicast=Multicast(), switch=named))
                assert ended.code == code
                assert said in ended.err


def test_json_for_config_load_goes_to_stdout_and_what_to_run_to_stderr(run: Command) -> None:
    ended = run("apply", ON_SONIC, "--target", "sonic")
    assert ended.code == 0
    assert set(json.loads(ended.out)) == {"MIRROR_SESSION", "ACL_TABLE", "ACL_RULE"}
    assert "on the switch run: sudo config load -y FILE" in ended.err


def test_output_is_written_but_not_when_tried(run: Command, tmp_path: Path) -> None:
    output = tmp_path / "checkmate.json"
    tried = run("apply", ON_SONIC, "--target", "sonic", "--output", output, "--dry-run")
    assert not output.exists()
    ended = run("apply", ON_SONIC, "--target", "sonic", "--output", output)
    assert ended.out == ""
    assert "sudo config load -y checkmate.json" in ended.err
    assert json.loads(output.read_text()) == json.loads(tried.out)


def test_switchs_configuration_makes_a_comparison(run: Command, tmp_path: Path) -> None:
    has = tmp_path / "has.json"
    options = ("--target", "sonic", "--config-db", has)
    has.write_text(run("apply", ON_SONIC, "--target", "sonic").out)
    assert run("show", ON_SONIC, *options).out.endswith("the switch is as desired\n")
    assert run("apply", ON_SONIC, *options) == (0, "", "nothing to do\n")
    removed = run("remove", ON_SONIC, *options)
    assert {step["op"] for step in json.loads(removed.out)} == {"remove"}
    assert "sudo config apply-patch FILE" in removed.err

    other = replace(ON_SONIC, dscp=21)
    shown = run("show", other, *options)
    assert shown.code == 1
    assert "differs: apply would remove ACL_RULE|CHECKMATE|DSCP43_s0" in shown.out
    assert [step["op"] for step in json.loads(run("apply", other, *options).out)] == ["remove", "add"]

    has.write_text("{}")
    assert run("remove", ON_SONIC, *options) == (0, "", "nothing to do\n")
    has.write_text(json.dumps({"ACL_TABLE": {"EVERFLOW": {"type": "MIRROR"}}}))
    for verb in ("show", "apply"):
        ended = run(verb, ON_SONIC, *options)
        assert ended.code == 1
        assert "EVERFLOW" in ended.out + ended.err


def test_sonic_has_nothing_for_multicast_but_gets_rid_of_rules(run: Command, tmp_path: Path) -> None:
    has = tmp_path / "has.json"
    has.write_text(run("apply", ON_SONIC, "--target", "sonic").out)
    other = replace(ON_SONIC, multicast=Multicast())
    for verb in ("show", "apply"):
        ended = run(verb, other, "--target", "sonic", "--config-db", has)
        assert ended.code == 2
        assert "with [multicast] there is nothing to configure here" in ended.err
    removed = run("remove", other, "--target", "sonic", "--config-db", has)
    assert {step["op"] for step in json.loads(removed.out)} == {"remove"}


def test_show_without_the_switchs_configuration_says_so(run: Command) -> None:
    shown = run("show", ON_SONIC, "--target", "sonic")
    assert shown.code == 1
    assert "not compared with the switch" in shown.out
    facts = json.loads(run("show", ON_SONIC, "--target", "sonic", "--json").out)
    assert (facts["compared"], facts["as_desired"]) == (False, False)


@pytest.mark.parametrize("options", [("--output", "x"), ("--config-db", "x")])
def test_options_of_the_other_target_are_wrong_usage(run: Command, options: tuple[str, ...]) -> None:
    assert run("apply", ON_SONIC, *options).code == 2


def test_bad_files_are_wrong_usage(run: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for name, said in (("bad.json", "not JSON"), ("none.json", "No such file")):
        ended = run("show", ON_SONIC, "--target", "sonic", "--config-db", tmp_path / name)
        assert ended.code == 2
        assert said in ended.err
    twice = run("show", replace(ON_SONIC, shadows=(*ON_SONIC.shadows, Shadow("s0", "10.0.0.9", "Ethernet9"))))
    assert twice.code == 2
    assert "cluster.toml: shadow[1].name is 's0'" in twice.err
