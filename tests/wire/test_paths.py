"""Where the socket door is, and who may have made its directory."""

from pathlib import Path

import pytest

from tokenloom.wire import paths
from tokenloom.wire.channel import IPC_PATH_LIMIT, AddressTooLong


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_address_follows_from_the_port(runtime: Path) -> None:
    assert paths.door_address(30000) == f"ipc://{runtime}/tokenloom/port-30000.sock"
    assert paths.find_door(30000) == paths.door_address(30000)


def test_without_a_runtime_directory_it_is_per_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    assert paths.door_address(1) == f"ipc://{tmp_path}/tokenloom-4321/port-1.sock"


def test_the_directory_is_made_for_its_owner_alone(runtime: Path) -> None:
    made = paths.make_door_dir()
    assert made == paths.make_door_dir() == runtime / "tokenloom"
    assert made.stat().st_mode & 0o777 == 0o700


def test_an_open_directory_is_refused(runtime: Path) -> None:
    paths.make_door_dir().chmod(0o750)
    with pytest.raises(paths.UnsafeDirectory, match="open to other users"):
        paths.make_door_dir()
    with pytest.raises(paths.UnsafeDirectory, match="chmod 700"):
        paths.find_door(1)


def test_a_foreign_directory_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.make_door_dir()
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    with pytest.raises(paths.UnsafeDirectory, match="belongs to user"):
        paths.find_door(1)


def test_a_link_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "tokenloom").symlink_to(runtime / "elsewhere")
    with pytest.raises(paths.UnsafeDirectory, match="not a directory"):
        paths.make_door_dir()


def test_a_path_above_the_limit_says_what_to_change(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * IPC_PATH_LIMIT)
    with pytest.raises(AddressTooLong, match=str(IPC_PATH_LIMIT)):
        paths.door_address(1)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("tcp://:31000", "tcp://127.0.0.1:31000"),
        ("tcp://*:31000", "tcp://*:31000"),
        ("tcp://0.0.0.0:31000", "tcp://0.0.0.0:31000"),
        ("tcp://[::1]:31000", "tcp://[::1]:31000"),
        ("ipc:///run/a.sock", "ipc:///run/a.sock"),
    ],
)
def test_addresses_as_given(given: str, full: str) -> None:
    assert paths.full_address(given) == full


@pytest.mark.parametrize(
    "given",
    [
        "",
        "31000",
        "tcp://",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:x",
        "ipc://",
        "ipc://relative",
        "ipc://@abstract",
        "inproc://a",
        "http://127.0.0.1:30000",
    ],
)
def test_other_addresses_are_refused(given: str) -> None:
    with pytest.raises(paths.BadAddress, match="neither"):
        paths.full_address(given)


def test_a_long_ipc_address_is_refused() -> None:
    with pytest.raises(AddressTooLong):
        paths.full_address("ipc:///" + "x" * IPC_PATH_LIMIT)
