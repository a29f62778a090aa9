"""ModelWorkerBatch as bytes, on its way from the scheduler process to the ranks beside it.

The one link whose message the rest of the server does not know; both ends are this very version.
"""

from array import array
from typing import Any

import msgspec

from ..wire.sampling import SamplingParams
from .worker_batch import ForwardMode, ModelWorkerBatch, RowOpen


class _Opened(msgspec.Struct, forbid_unknown_fields=True):
    """RowOpen, its ids as their memory."""

    row: int
    sampling: SamplingParams
    prompt_ids: bytes
    output_ids: bytes
    banned_ids: tuple[int, ...]


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    """ModelWorkerBatch, the same."""

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
    """Raises msgspec.DecodeError for anything but what `encode` made."""
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
