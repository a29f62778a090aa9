"""The codec: bytes that must not change, what each decoder takes, and the forms of the door."""

import msgspec
import pytest

from tokenloom.wire import codec
from tokenloom.wire.client_messages import (
    Abort,
    ChatMessage,
    Delta,
    Done,
    Failed,
    FlushCache,
    Flushed,
    FromClient,
    Generate,
    ListLoRAs,
    LoadLoRA,
    LoRAs,
    Ping,
    Pong,
    ToClient,
    UnloadLoRA,
    Usage,
)
from tokenloom.wire.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenIDOut,
    ChildDied,
    ChildFailed,
    ChildReady,
    Drained,
    Draining,
    DrainReq,
    Finish,
    FlushOut,
    FlushReq,
    LoadLoRAReq,
    LoopStamp,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    SchedulerInfo,
    SchedulerReady,
    StatsOut,
    StatsReq,
    StopMatched,
    StreamOpen,
    StrOut,
    TokenIDOut,
    TokenizedGenerateReq,
    UnloadLoRAReq,
)
from tokenloom.wire.sampling import SamplingParams

INFO = SchedulerInfo(1000, 256, 16, 4096, 8, 32, "float32", (2, 7))
STATS = StatsOut(1, 2, 3, 4, 5, 6, 7, 8, 0.5, 10, 11, 12, 13, 0, 14, 15, 16)
ROW = TokenIDOut(
    1, (5, 6), Finish("stop", 7), 16, StreamOpen(b"\x01\0\0\0", (".",), min_new_tokens=3)
)

# Internal structs may grow at the end only; a change of any of these bytes is a change of contract.
GOLDEN = [
    (AbortReq(300), codec.to_scheduler(), "92a841626f7274526571cd012c"),
    (StopMatched(1), codec.to_scheduler(), "92ab53746f704d61746368656401"),
    (StatsReq(5), codec.to_scheduler(), "92a8537461747352657105"),
    (DrainReq(), codec.to_scheduler(), "92a8447261696e526571c0"),
    (DrainReq(1.5), codec.to_scheduler(), "92a8447261696e526571cb3ff8000000000000"),
    (FlushReq(5, 1.5), codec.to_scheduler(), "93a8466c75736852657105cb3ff8000000000000"),
    (FlushOut(5, False, "no"), codec.to_front(), "95a8466c7573684f757405c2a26e6f00"),
    (
        LoadLoRAReq(LoRARef(7, "a", "/a", True)),
        codec.to_scheduler(),
        "92ab4c6f61644c6f52415265719407a161a22f61c3",
    ),
    (UnloadLoRAReq(7), codec.to_scheduler(), "92ad556e6c6f61644c6f524152657107"),
    (
        LoRALoaded(7, False, "no", 400),
        codec.to_front(),
        "96aa4c6f52414c6f6164656407c2a26e6fcd019000",
    ),
    (LoRAUnloaded(7), codec.to_front(), "92ac4c6f5241556e6c6f6164656407"),
    (
        TokenizedGenerateReq(1, b"\x05\0\0\0", SamplingParams(temperature=0.0)),
        codec.to_scheduler(),
        "98b4546f6b656e697a656447656e657261746552657101c40405000000"
        "de0001ab74656d7065726174757265cb000000000000000000a0a000",
    ),
    (
        BatchTokenIDOut([ROW]),
        codec.to_detokenizer(),
        "92af4261746368546f6b656e49444f757491950192050695a473746f7007a0ccc8c01095c4040100000091a12ec3c203",
    ),
    (
        BatchStrOut([StrOut(1, "hé", (5,))]),
        codec.to_front(),
        "92ab42617463685374724f7574919501a368c3a99105c000",
    ),
    (Drained(), codec.to_front(), "91a7447261696e6564"),
    (
        LoopStamp(1, True, 64, 0.5, False),
        codec.to_front(),
        "96a94c6f6f705374616d7001c340cb3fe0000000000000c2",
    ),
    (ChildDied("a", "b"), codec.to_front(), "93a94368696c6444696564a161a162"),
    (
        ChildReady("front", "http"),
        codec.to_launcher(),
        "93aa4368696c645265616479a566726f6e74a468747470",
    ),
]


@pytest.mark.parametrize(("message", "decoder", "golden"), GOLDEN)
def test_bytes_on_the_internal_links(
    message: msgspec.Struct, decoder: "msgspec.msgpack.Decoder[object]", golden: str
) -> None:
    assert codec.encode(message).hex() == golden
    assert decoder.decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    ("message", "decoder"),
    [
        (SchedulerReady(INFO), codec.to_detokenizer()),
        (SchedulerReady(INFO), codec.to_front()),
        (STATS, codec.to_detokenizer()),
        (STATS, codec.to_front()),
        (Drained(), codec.to_detokenizer()),
        (Draining(), codec.to_detokenizer()),
        (FlushOut(5, True, pages=3), codec.to_detokenizer()),
        (LoRALoaded(7, True, rank=16), codec.to_detokenizer()),
        (LoRAUnloaded(7), codec.to_detokenizer()),
        (LoopStamp(1, True, 64, 0.5, True), codec.to_detokenizer()),
        (ChildFailed("scheduler", "out of memory"), codec.to_launcher()),
    ],
)
def test_control_messages_come_back_equal(
    message: msgspec.Struct, decoder: "msgspec.msgpack.Decoder[object]"
) -> None:
    assert decoder.decode(codec.encode(message)) == message


def test_a_link_takes_its_own_messages_only() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.to_scheduler().decode(codec.encode(Drained()))
    with pytest.raises(msgspec.ValidationError):
        codec.to_front().decode(codec.encode(AbortReq(1)))


def test_a_newer_sender_may_append_fields() -> None:
    longer = msgspec.msgpack.encode(["AbortReq", 4, "new"])
    assert codec.to_scheduler().decode(longer) == AbortReq(4)


FROM_CLIENT = [
    Generate("a", text="x", sampling=SamplingParams(logit_bias={5: 1.5}, stop=(".", "\n"))),
    Generate("a", input_ids=[1, 2], stream=False),
    Generate("a", messages=[ChatMessage("user", "hé", "Ada")]),
    Abort("a"),
    Generate("a", text="x", priority=-3, user="u", cache_salt="s"),
    Ping(3),
    FlushCache(3, 0.5),
    Generate("a", text="x", lora_path="b"),
    LoadLoRA("a", "/x", True, 3),
    UnloadLoRA("a", 3),
    ListLoRAs(3),
]
TO_CLIENT = [
    Delta("a", "hé", [1]),
    Done("a", "x", [1], "stop", Usage(1, 2, 3), "."),
    Failed("a", 400, "no", "top_p"),
    Failed("a", 503, "busy", retry_after=2),
    Pong(1, "m", False),
    Pong(1, "m", True, SamplingParams(temperature=0.6, top_k=20)),
    Flushed(1, 200, pages=3),
    LoRAs(1, 200, names=["a"]),
    LoRAs(1, 404, "no"),
]


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("message", FROM_CLIENT)
def test_what_clients_say_in_both_forms(message: FromClient, json: bool) -> None:
    frame = codec.encode_for(message, json=json)
    assert codec.is_json(frame) == json
    assert codec.decode_from_client(frame) == message


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("message", TO_CLIENT)
def test_what_clients_hear_in_both_forms(message: ToClient, json: bool) -> None:
    assert codec.decode_to_client(codec.encode_for(message, json=json)) == message


def test_the_json_that_the_manual_shows() -> None:
    frame = b' {"type": "generate", "rid": "a", "text": "x", "sampling": {"temperature": 0}}'
    assert codec.decode_from_client(frame) == Generate(
        "a", text="x", sampling=SamplingParams(temperature=0.0)
    )
    answer = codec.encode_for(Delta("a", "x", [1]), json=True)
    assert answer == b'{"type":"delta","rid":"a","text":"x","token_ids":[1]}'


@pytest.mark.parametrize("space", ["", " ", "\n", "\t", "\r"])
def test_json_may_begin_with_any_white_space_of_json(space: str) -> None:
    assert codec.decode_from_client(space.encode() + b'{"type":"ping"}') == Ping()


@pytest.mark.parametrize("frame", [b"[1]", b'"text"'])
def test_json_that_is_no_object_is_answered_in_json(frame: bytes) -> None:
    assert codec.is_json(frame)


@pytest.mark.parametrize("message", [*FROM_CLIENT, *TO_CLIENT])
def test_no_msgpack_message_looks_like_json(message: msgspec.Struct) -> None:
    assert not codec.is_json(codec.encode(message))


def test_clients_must_not_send_unknown_fields() -> None:
    for where in ({"best_of": 2}, {"sampling": {"best_of": 2}}):
        frame = msgspec.json.encode({"type": "generate", "rid": "a", "text": "x"} | where)
        with pytest.raises(msgspec.ValidationError, match="best_of"):
            codec.decode_from_client(frame)
