"""Doors that other machines could reach need a word that they may."""

import pytest

from tokenloom.flags import parse_flags
from tokenloom.wire.door_config import DoorConfig, is_loopback, network_exposure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert network_exposure(DoorConfig(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "fd00::5", "box.lan", "0"])
def test_a_network_address_is_refused_unless_told_so(host: str) -> None:
    problem = network_exposure(DoorConfig(host=host))
    assert problem is not None
    assert problem.startswith(f"--host {host} ")
    assert "--allow-unauthenticated-network" in problem
    assert network_exposure(DoorConfig(host=host, allow_unauthenticated_network=True)) is None


@pytest.mark.parametrize(
    ("address", "open_to_all"),
    [
        (None, False),
        ("ipc:///run/x.sock", False),
        ("tcp://:31000", False),
        ("tcp://127.0.0.1:31000", False),
        ("tcp://localhost:31000", False),
        ("tcp://[::1]:31000", False),
        ("tcp://0.0.0.0:31000", True),
        ("tcp://*:31000", True),
        ("tcp://[::]:31000", True),
        ("tcp://eth0:31000", True),
        ("tcp://10.0.0.5:31000", True),
    ],
)
def test_addresses_of_the_socket(address: str | None, open_to_all: bool) -> None:
    problem = network_exposure(DoorConfig(socket=address))
    assert (problem is not None) == open_to_all
    if problem is not None:
        assert problem.startswith(f"--socket {address} ")


def test_the_command_refuses_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert "--allow-unauthenticated-network" in capsys.readouterr().err
    config = parse_flags(["--host", "0.0.0.0", "--allow-unauthenticated-network"])
    assert config.doors.host == "0.0.0.0"


@pytest.mark.parametrize("name", ["", "a b", "a,b", "http://a"])
def test_hosts_that_are_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--allowed-hosts", name])
    assert "--allowed-hosts" in capsys.readouterr().err
    config = parse_flags(["--allowed-hosts", "models.example", "--allowed-hosts", "10.0.0.5"])
    assert config.doors.allowed_hosts == ("models.example", "10.0.0.5")
