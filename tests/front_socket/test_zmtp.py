"""ZMTP as the door speaks it: what is understood, what is refused, and that it is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmtp_client import ready

from tokenloom.tokenizer_proc.doors import zmtp
from tokenloom.tokenizer_proc.doors.zmtp import ProtocolError, State, Zmtp

LIMIT = 1000


def connected(kind: bytes = b"DEALER") -> Zmtp:
    peer = Zmtp(LIMIT)
    assert bytes(peer.outgoing) == zmtp.GREETING
    peer.outgoing.clear()
    peer.feed(zmtp.GREETING + ready(kind))
    assert peer.next_message() is None
    assert (peer.state, bytes(peer.outgoing)) == (State.READY, zmtp.READY)
    peer.outgoing.clear()
    return peer


def heard(peer: Zmtp) -> list[list[bytes]]:
    messages = []
    while (parts := peer.next_message()) is not None:
        messages.append(parts)
    return messages


@pytest.mark.parametrize("kind", [b"DEALER", b"REQ", b"ROUTER"])
def test_messages_of_peers_that_can_talk_to_a_router(kind: bytes) -> None:
    peer = connected(kind)
    sent = [[b""], [b"", b"x"], [b"y" * 255], [b"z" * 256], [b"a", b"b" * 300, b""]]
    peer.feed(b"".join(map(zmtp.message, sent)))
    assert heard(peer) == sent
    assert peer.held_bytes == 0


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3)), st.data())
def test_cuts_change_nothing(sent: list[list[bytes]], data: st.DataObject) -> None:
    peer = Zmtp(LIMIT)
    stream = zmtp.GREETING + ready() + b"".join(map(zmtp.message, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    came = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        peer.feed(stream[start:end])
        came += heard(peer)
    assert came == sent


@given(st.lists(st.binary(max_size=80)), st.booleans())
def test_any_bytes_are_held_within_the_limit_or_refused(chunks: list[bytes], met: bool) -> None:
    peer = connected() if met else Zmtp(LIMIT)
    try:
        for chunk in chunks:
            peer.feed(chunk)
            heard(peer)
            assert peer.held_bytes <= LIMIT + 9 + len(chunk)
    except ProtocolError:
        pass


def test_a_ping_is_answered_with_its_context_and_a_pong_with_nothing() -> None:
    peer = connected()
    assert peer.answers_pings
    peer.feed(zmtp.command(b"PING", b"\0\7" + b"c" * 20) + zmtp.command(b"PONG", b""))
    assert peer.next_message() is None
    assert bytes(peer.outgoing) == zmtp.command(b"PONG", b"c" * 16)


def test_zmtp_3_0_is_spoken_and_has_no_ping() -> None:
    peer = Zmtp(LIMIT)
    peer.feed(zmtp.GREETING.replace(b"\x03\x01", b"\x03\x00") + ready())
    assert peer.next_message() is None
    assert (peer.state, peer.answers_pings) == (State.READY, False)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "not ZMTP"),
        (b"\xff" + bytes(9), "ZMTP 1"),
        (zmtp.SIGNATURE + b"\x02", "ZMTP 2"),
        (zmtp.GREETING.replace(b"NULL", b"PLAIN"[:4]), "mechanism"),
        (zmtp.GREETING + zmtp.frame(b"early"), "before the handshake"),
        (zmtp.GREETING + zmtp.PING, "during the handshake"),
        (zmtp.GREETING + ready(b"PUB"), "type b'PUB'"),
        (zmtp.GREETING + zmtp.command(b"READY", b""), "type b''"),
        (zmtp.GREETING + zmtp.command(b"READY", b"\x01a\0\0\0\xff"), "cut short"),
        (zmtp.GREETING + zmtp.command(b"READY", b"\x09a"), "without a name"),
    ],
)
def test_who_does_not_speak_it_is_refused(data: bytes, words: str) -> None:
    peer = Zmtp(LIMIT)
    peer.feed(data)
    with pytest.raises(ProtocolError, match=words):
        peer.next_message()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x08\x00", "flags 0x8"),
        (b"\x05\x00", "flags 0x5"),
        (b"\x02" + (1 << 63).to_bytes(8), "above 1000 bytes"),  # before any of it is there
        (zmtp.frame(b"a" * 600, more=True) + b"\x02" + (401).to_bytes(8), "above 1000 bytes"),
        (zmtp.frame(b"", more=True) * (zmtp.MAX_PARTS + 1), "more than 16 frames"),
        (b"\x06" + (zmtp.MAX_COMMAND_BYTES + 1).to_bytes(8), "a command of"),
        (zmtp.frame(b"", command=True), "without a name"),
        (zmtp.command(b"PING", b"\0"), "time to live"),
    ],
)
def test_what_breaks_the_protocol_is_refused(data: bytes, words: str) -> None:
    peer = connected()
    peer.feed(data)
    with pytest.raises(ProtocolError, match=words):
        peer.next_message()
