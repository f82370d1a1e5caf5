"""Under which address other machines reach this one, whatever its own name means here."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.nodes import Cluster
from titancli.errors import EnvironmentProblem
from titancli.launchers import address

ETH, DOCKER = {"eth0": "10.0.0.7"}, {"docker0": "172.17.0.1"}


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As `/etc/hosts` of many machines has it: the machine's own name is 127.0.1.1."""
    monkeypatch.setattr(address, "_reached_by", lambda name: False)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.delenv(address.INTERFACE, raising=False)
    return monkeypatch


def has(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, str], outwards: str | None = None) -> None:
    monkeypatch.setattr(address, "_interfaces", lambda: {"lo": "127.0.0.1", **interfaces})
    monkeypatch.setattr(address, "_default_address", lambda: outwards)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("127.0.1.1", False),
        ("::1", False),
        ("10.1.2.3", True),
        ("no such name.invalid", False),
        ("x" * 64, False),  # Linux takes it for a host's name, DNS does not
    ],
)
def test_a_name_is_used_only_if_it_means_more_than_this_machine(name: str, good: bool) -> None:
    assert address._reached_by(name) is good


def test_a_name_that_others_can_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_reached_by", lambda name: name == socket.gethostname())
    assert (address.reachable(), address.variables()) == (socket.gethostname(), {})


def test_else_the_address_of_the_one_interface_or_of_that_which_leads_outwards(
    loopback: pytest.MonkeyPatch,
) -> None:
    has(loopback, ETH)
    assert (address.reachable(), address.variables()) == ("10.0.0.7", {address.INTERFACE: "eth0"})
    has(loopback, DOCKER | ETH, outwards="10.0.0.7")
    assert (address.reachable(), address.variables()) == ("10.0.0.7", {address.INTERFACE: "eth0"})
    has(loopback, {})  # all nodes are on this machine
    assert (address.reachable(), address.variables()) == ("localhost", {})


def test_where_that_is_not_known_it_says_what_to_set(loopback: pytest.MonkeyPatch) -> None:
    has(loopback, DOCKER | ETH)
    with pytest.raises(
        EnvironmentProblem, match=r"docker0 \(172\.17\.0\.1\), eth0 \(10\.0\.0\.7\)"
    ) as refused:
        address.reachable()
    assert "set GLOO_SOCKET_IFNAME" in str(refused.value.hint)
    loopback.setenv(address.INTERFACE, "eth0,eth1")
    assert (address.reachable(), address.variables()) == ("10.0.0.7", {})
    loopback.setenv(address.INTERFACE, "ib0")
    with pytest.raises(EnvironmentProblem, match="'ib0', which is no network interface of here"):
        address.reachable()


def test_the_interfaces_of_a_machine_are_found(cluster: Cluster, tmp_path: Path) -> None:
    text = "from titancli.launchers import address as a; print(a._interfaces(), a._default_address())"
    said = cluster.node("a").run(sys.executable, "-c", text)
    assert said == "{'lo': '127.0.0.1', 'eth0': '10.77.0.1'} None\n"
