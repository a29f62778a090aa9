"""How large the cases of a device check are: those of a GPU, which tests replace by tiny ones."""

from dataclasses import dataclass, field
from typing import Any

import torch

# Llama-3.1-8B, whose context a check never needs.
LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8448,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# In float32, where rounding decides no token: 3 query heads to a KV head, as few models have it.
SMALL: dict[str, Any] = LARGE | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class EqualitySizes:
    config: dict[str, Any] = field(default_factory=lambda: SMALL)
    requests: int = 200
    most_rows: int = 64
    prompt: int = 150  # at most
    answer: int = 40  # at most
    adapters: int = 4
    slots: int = 2  # fewer than adapters: they are swapped
    rank: int = 16
    page_size: int = 16
    chunk: int = 128


@dataclass(frozen=True)
class AttentionSizes:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    decodes: tuple[tuple[int, int], ...] = ((1, 8192), (32, 1024), (32, 8192))  # rows, context
    prompts: tuple[tuple[int, int], ...] = ((1, 8192), (8, 1024))  # requests, tokens
    aimed: tuple[int, int] = (32, 8192)


@dataclass(frozen=True)
class KernelSizes:
    hidden: int = 4096
    vocab: int = 128256
    tokens: int = 33
    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (9, 3, 64), (7, 1, 80))
    contexts: tuple[int, ...] = (1, 17, 300, 4099)
    extends: tuple[tuple[int, int], ...] = ((0, 5), (250, 7), (600, 3))  # prefix, new
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    caches_of_8_bits: bool = True
    page_size: int = 16
    rank: int = 16


@dataclass(frozen=True)
class Sizes:
    large: dict[str, Any] = field(default_factory=lambda: LARGE)
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 1 << 32
    matrix_side: int = 8192
    decodes: tuple[tuple[int, int], ...] = tuple(
        (rows, context) for context in (1024, 8192) for rows in (1, 8, 32, 128, 256)
    )
    aimed: tuple[int, int] = (32, 1024)  # rows and context of the aims of steps
    prompts: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048), (8, 512))  # requests, tokens
    steps: int = 20  # timed
    most_rows: int = 256
    most_prompt_tokens: int = 8192
    page_size: int = 16
    adapters: tuple[int, ...] = (0, 1, 8, 32)
    rank: int = 16
    loop_answer: int = 64
    # requests in flight, prompt, answer
    server_loads: tuple[tuple[int, int, int], ...] = ((1, 128, 64), (32, 1024, 64), (128, 256, 64))
    server_flags: tuple[str, ...] = (
        *("--device", "cuda", "--max-running-requests", "256"),
        *("--max-prefill-tokens", "2048", "--chunked-prefill-size", "2048"),
        *("--mixed-chunk-size", "512"),
    )
    equality: EqualitySizes = EqualitySizes()
    attention: AttentionSizes = AttentionSizes()
    kernels: KernelSizes = KernelSizes()
