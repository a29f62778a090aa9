"""What a step must at least move and compute, from a model's sizes. Pure arithmetic.

Used by the sections that time steps. Formulas count what a dense decoder of the Llama family does.
"""

from ...scheduler_proc.models.config import ModelSpec


def layer_parameters(spec: ModelSpec) -> int:
    """Count the weights of all layers' linear maps: q, k, v, o, gate, up, down."""
    attention = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def weight_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Return the bytes read in every step: all layers and the head, not the embedding table."""
    return (layer_parameters(spec) + spec.vocab_size * spec.hidden_size) * item_bytes


def model_bytes(spec: ModelSpec, item_bytes: int) -> int:
    tables = (1 if spec.tied else 2) * spec.vocab_size * spec.hidden_size
    return (layer_parameters(spec) + tables) * item_bytes


def kv_bytes_per_token(spec: ModelSpec, item_bytes: int) -> int:
    return 2 * spec.num_layers * spec.kv_size * item_bytes


def decode_bytes(spec: ModelSpec, rows: int, context: int, item_bytes: int) -> int:
    """Return bytes of a decode: weights once, keys and values of `context` tokens per row."""
    kv = rows * context * kv_bytes_per_token(spec, item_bytes)
    return weight_bytes(spec, item_bytes) + kv


def attention_flops(q_size: int, tokens: int, layers: int = 1) -> float:
    """Causal attention of a prompt: two products, over half of the square."""
    return layers * 4.0 * q_size * tokens * (tokens + 1) / 2


def prefill_flops(spec: ModelSpec, requests: int, tokens: int) -> float:
    """Return operations of prompts of `tokens` each, with logits for their last tokens."""
    maps = 2.0 * layer_parameters(spec) * requests * tokens
    attention = requests * attention_flops(spec.q_size, tokens, spec.num_layers)
    return maps + attention + 2.0 * requests * spec.vocab_size * spec.hidden_size


def what_fits(cases: list[tuple[int, int]], tokens: int) -> dict[tuple[int, int], str]:
    """(rows, context) -> "" if a pool of `tokens` holds it, or why not."""
    return {
        (rows, context): ""
        if rows * context <= tokens
        else f"{rows * context} tokens do not fit a pool of {tokens}"
        for rows, context in cases
    }
