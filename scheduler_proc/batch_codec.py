"""Encode ModelWorkerBatch to msgpack for the ranks, and decode it there.

Used by ranks.py and rank.py, which run the same version, so the format may change freely.
"""

from array import array
from typing import Any

import msgspec

from ..wire.sampling import SamplingParams
from .worker_batch import ForwardMode, ModelWorkerBatch, RowOpen


class _Opened(msgspec.Struct, forbid_unknown_fields=True):
    """RowOpen with its ids as the raw bytes of int32 arrays."""

    row: int
    sampling: SamplingParams
    prompt_ids: bytes
    output_ids: bytes
    banned_ids: tuple[int, ...]


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    """ModelWorkerBatch with its ids as the raw bytes of int32 arrays."""

    step: int
    mode: ForwardMode
    num_decodes: int
    rows: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    samples: list[bool]
    input_ids: bytes
    new_pages: list[tuple[int, int, int]]
    opened: list[_Opened]
    lora_slots: list[int]
    new_loras: list[tuple[int, int]]


def _as_bytes(value: Any) -> bytes:  # noqa: ANN401
    if not isinstance(value, array):
        raise TypeError(f"a batch holds {type(value)}")
    return value.tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
_decoder = msgspec.msgpack.Decoder(_Step)


def encode(batch: ModelWorkerBatch) -> bytes:
    return _encoder.encode(batch)


def decode(frame: bytes) -> ModelWorkerBatch:
    """Decode a frame made by `encode`; raises msgspec.DecodeError for any other."""
    step = _decoder.decode(frame)
    fields = msgspec.structs.asdict(step)
    opened = [
        RowOpen(one.row, one.sampling, _ids(one.prompt_ids), _ids(one.output_ids), one.banned_ids)
        for one in step.opened
    ]
    return ModelWorkerBatch(**fields | {"input_ids": _ids(step.input_ids), "opened": opened})


def _ids(memory: bytes) -> "array[int]":
    ids = array("i")
    ids.frombytes(memory)
    return ids
