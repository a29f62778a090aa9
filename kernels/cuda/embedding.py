"""Embedding lookup on a CUDA device. Launched by kernels/embedding.py."""

import torch
import triton
import triton.language as tl

from .specialisation import Specialisation

_BLOCK = 1024
_NUM_WARPS = 4


# The step's columns are slices of one buffer, of any alignment: do not specialise on it.
@triton.jit(do_not_specialize_on_alignment=["input_ids", "token_rows"])
def _embedding_kernel(
    table,
    input_ids,
    token_rows,
    last_tokens,
    out,
    ids,
    vocab_size,
    table_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_rows + token).to(tl.int64)
    sampled = tl.load(last_tokens + row, mask=row >= 0, other=0).to(tl.int64)
    token_id = tl.where(row >= 0, sampled, tl.load(input_ids + token).to(tl.int64))
    token_id = tl.minimum(tl.maximum(token_id, 0), vocab_size - 1)
    if tl.program_id(1) == 0:
        tl.store(ids + token, token_id)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(table + token_id * table_stride + columns, mask=columns < SIZE)
    tl.store(out + token * out_stride + columns, values, mask=columns < SIZE)


def embed(
    table: torch.Tensor,
    input_ids: torch.Tensor,
    token_rows: torch.Tensor,
    last_tokens: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Write kernels/embedding.py's results to out [T, hidden] and ids [T] int64, dense in the last
    dimension.
    """
    tokens, hidden = out.shape
    if tokens == 0:
        return
    _embedding_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
        table,
        input_ids,
        token_rows,
        last_tokens,
        out,
        ids,
        table.shape[0],
        table.stride(0),
        out.stride(0),
        SIZE=hidden,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def specialisations() -> list[Specialisation]:
    return [
        Specialisation(
            f"embedding {dtype} {hidden}",
            _embedding_kernel,
            {
                "table": f"*{dtype}",
                "input_ids": "*i64",
                "token_rows": "*i32",
                "last_tokens": "*i64",
                "out": f"*{dtype}",
                "ids": "*i64",
                "vocab_size": "i32",
                "table_stride": "i32:16",
                "out_stride": "i32:16",
                "SIZE": "constexpr",
                "BLOCK": "constexpr",
            },
            {"SIZE": hidden, "BLOCK": _BLOCK},
            _NUM_WARPS,
            num_stages=1,
        )
        for dtype in ("bf16", "fp16")
        for hidden in (576, 4096)
    ]
