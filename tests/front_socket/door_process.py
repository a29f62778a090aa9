"""A socket door at each address of the command line, in a process of its own, until SIGTERM."""

import asyncio
import signal
import sys

import uvloop
from door_fakes import FakeFront

from tokenloom.tokenizer_proc.doors.socket import SocketDoor


async def main(addresses: list[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    serving = [
        asyncio.create_task(SocketDoor(FakeFront(), address).serve()) for address in addresses
    ]
    print("up", flush=True)
    await stop.wait()
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
