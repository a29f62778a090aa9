"""The address of the socket door: who may have it, what becomes of its file, how it is let go."""

import asyncio
import socket
from pathlib import Path

import pytest
from door_fakes import FakeFront, RawClient, run, served

from tokenloom.client import AsyncClient
from tokenloom.tokenizer_proc.doors.socket import SocketDoor
from tokenloom.wire import paths


def test_closing_ends_serve(tmp_path: Path) -> None:
    async def main() -> None:
        door = SocketDoor(FakeFront(), f"ipc://{tmp_path}/door.sock")
        serving = asyncio.create_task(door.serve())
        client = RawClient(door.address)
        await client.say(type="ping")
        await client.hear()
        door.close()
        door.close()
        await serving
        client.close()

    run(main())


def test_a_stale_socket_file_is_replaced_and_a_successors_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "door.sock"
        address = f"ipc://{file}"
        first = SocketDoor(FakeFront(), address)
        second = SocketDoor(FakeFront(), address)  # as after a crash of the first
        first.close()
        assert file.is_socket()
        second.close()
        assert not file.exists()

    run(main())


def test_a_file_that_is_no_socket_is_not_touched(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "door.sock").write_text("notes")
        with pytest.raises(paths.BadAddress, match="is not a socket"):
            SocketDoor(FakeFront(), f"ipc://{tmp_path}/door.sock")
        assert (tmp_path / "door.sock").read_text() == "notes"

    run(main())


def test_the_default_address_makes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        async with served(paths.door_address(30000)), AsyncClient(port=30000) as client:
            assert (await client.ping()).ready
        assert (tmp_path / "tokenloom").stat().st_mode & 0o777 == 0o700

    run(main())


def test_an_address_in_use_is_an_error_at_once() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(paths.BadAddress, match="in use"):
                SocketDoor(FakeFront(), address)

    run(main())
