"""Embedding lookup, including tokens that only the device knows yet. Called by the models."""

import torch
import torch.nn.functional as F

from . import backend


def embed(
    table: torch.Tensor,
    input_ids: torch.Tensor,
    token_rows: torch.Tensor,
    last_tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, hidden] of table [V, hidden] and their token ids [T] int64.

    The id of token t is last_tokens[token_rows[t]] (sampled by the previous step) if token_rows[t]
    >= 0, else input_ids[t]. input_ids [T] and last_tokens [R] are int32 or int64, token_rows [T]
    int32 below R. Ids are clamped to 0..V - 1, such as the -1 of a row whose sampling failed.
    Raises ValueError on shapes that disagree.
    """
    if table.dim() != 2 or input_ids.dim() != 1 or token_rows.shape != input_ids.shape:
        raise ValueError(
            f"table {tuple(table.shape)}, input_ids {tuple(input_ids.shape)} and token_rows "
            f"{tuple(token_rows.shape)} do not fit"
        )
    if backend.on_triton(table):
        from .cuda import embedding as kernel

        out = table.new_empty(input_ids.shape[0], table.shape[1])
        ids = torch.empty(input_ids.shape, dtype=torch.int64, device=table.device)
        kernel.embed(table, input_ids, token_rows, last_tokens, out, ids)
        return out, ids
    sampled = last_tokens[token_rows.clamp_min(0).long()]
    ids = torch.where(token_rows >= 0, sampled, input_ids).long().clamp_(0, table.shape[0] - 1)
    return F.embedding(ids, table), ids


def embed_reference(
    table: torch.Tensor,
    input_ids: torch.Tensor,
    token_rows: torch.Tensor,
    last_tokens: torch.Tensor,
) -> torch.Tensor:
    """Return the rows [T, hidden] without the ids."""
    ids = [
        int(last_tokens[row]) if row >= 0 else given
        for given, row in zip(input_ids.tolist(), token_rows.tolist(), strict=True)
    ]
    chosen = [table[min(max(one, 0), table.shape[0] - 1)] for one in ids]
    return torch.stack(chosen) if chosen else table[:0]
