"""Adapters over the socket door: load, list, ask for, unload; and every way it can be refused."""

import logging
from pathlib import Path

import pytest
from door_fakes import run, served

from tokenloom.wire.client_messages import Done, Failed, LoRAs
from tokenloom.wire.messages import Finish

STOP = Finish("stop", matched=7)


@pytest.mark.parametrize("json", [False, True])
def test_load_ask_for_and_unload(tmp_path: Path, json: bool) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            setup.front.on_submit = lambda stream: stream.push("ok", (1,), STOP)
            client = setup.client(json=json)
            await client.say(type="load_lora", seq=1, lora_name="a", lora_path="/a", pinned=True)
            assert await client.hear() == LoRAs(1, 200, names=["a"])
            await client.say(type="load_lora", seq=2, lora_name="b", lora_path="/b")
            assert await client.hear() == LoRAs(2, 200, names=["a", "b"])
            assert setup.front.adapters.pinned == {"a"}
            await client.say(type="list_loras", seq=3)
            assert await client.hear() == LoRAs(3, 200, names=["a", "b"])
            for rid, name in (("r", "b"), ("s", None)):
                await client.say(type="generate", rid=rid, text="x", lora_path=name, stream=False)
                assert isinstance(await client.hear(), Done)
            assert [stream.lora_id for stream in setup.front.streams] == [2, 0]
            assert setup.front.adapters.in_use == 0
            await client.say(type="unload_lora", seq=4, lora_name="a")
            assert await client.hear() == LoRAs(4, 200, names=["b"])

    run(main())


def test_refusals_say_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="load_lora", lora_name="a", lora_path="/a")
            await client.hear()
            unknown = "there is no adapter 'x' here; loaded: a"
            await client.say(type="unload_lora", seq=1, lora_name="x")
            assert await client.hear() == LoRAs(1, 404, unknown, ["a"])
            await client.say(type="generate", rid="r", text="x", lora_path="x")
            assert await client.hear() == Failed("r", 404, unknown)
            await client.say(type="load_lora", seq=2, lora_name="b", lora_path="b")
            assert await client.hear() == LoRAs(2, 400, "no such place", ["a"])
            await client.say(type="load_lora", seq=3, lora_name="b", lora_path="/bug")
            assert await client.hear() == LoRAs(3, 500, "internal error", ["a"])
            await client.say(type="load_lora", seq=4, lora_name="b")
            answer = await client.hear()
            assert (answer.status, answer.param) == (400, "lora_path")
            assert setup.front.streams == []

    with caplog.at_level(logging.CRITICAL):
        run(main())


def test_a_refused_request_holds_no_adapter(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="load_lora", lora_name="a", lora_path="/a")
            await client.hear()
            await client.say(
                type="generate", rid="r", text="x", lora_path="a", sampling={"top_p": 2.0}
            )
            answer = await client.hear()
            assert (answer.status, answer.param) == (400, "top_p")
            assert setup.front.adapters.in_use == 0

    run(main())
