"""One encoder for all links and one typed decoder per link, used by every process and client."""

import msgspec

from .client_messages import FromClient, ToClient
from .messages import ToDetokenizer, ToFront, ToLauncher, ToScheduler

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def to_scheduler() -> msgspec.msgpack.Decoder[ToScheduler]:
    return msgspec.msgpack.Decoder(ToScheduler)


def to_detokenizer() -> msgspec.msgpack.Decoder[ToDetokenizer]:
    return msgspec.msgpack.Decoder(ToDetokenizer)


def to_front() -> msgspec.msgpack.Decoder[ToFront]:
    return msgspec.msgpack.Decoder(ToFront)


def to_launcher() -> msgspec.msgpack.Decoder[ToLauncher]:
    return msgspec.msgpack.Decoder(ToLauncher)


# The socket door speaks msgpack or JSON: the first byte of a frame tells which.
_from_client_json = msgspec.json.Decoder(FromClient)
_from_client_msgpack = msgspec.msgpack.Decoder(FromClient)
_to_client_json = msgspec.json.Decoder(ToClient)
_to_client_msgpack = msgspec.msgpack.Decoder(ToClient)
_json_encoder = msgspec.json.Encoder()


def is_json(frame: bytes) -> bool:
    """Return whether a frame starts like JSON; in msgpack its first byte would be an integer."""
    return frame[:1] in (b"{", b" ", b"\n", b"\t", b"\r", b"[", b'"')


def decode_from_client(frame: bytes) -> FromClient:
    """Decode one frame; raises msgspec.DecodeError (ValidationError names the field)."""
    decoder = _from_client_json if is_json(frame) else _from_client_msgpack
    return decoder.decode(frame)


def decode_to_client(frame: bytes) -> ToClient:
    decoder = _to_client_json if is_json(frame) else _to_client_msgpack
    return decoder.decode(frame)


def encode_for(message: msgspec.Struct, *, json: bool) -> bytes:
    return _json_encoder.encode(message) if json else _encoder.encode(message)
