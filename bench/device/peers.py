"""transformers with a static cache over the memory of our dummy weights.

Eagerly, and as a captured graph, where its forward pass can be captured.
"""

from collections.abc import Callable
from typing import Any

import torch

from .lab import Lab
from .results import Report, Skip


def transformers_peer(lab: Lab, report: Report) -> None:
    try:
        import transformers
    except ImportError as error:
        raise Skip(str(error)) from error
    lab.model()
    rows, context = lab.sizes.aimed
    with torch.inference_mode():
        model = _their_model(lab, transformers)
        step = _static_step(lab, model, transformers, rows, context)
        _time(report, "eager", lambda: lab.rig.seconds(step, 5))
        if report.has_time("captured", 3.0):
            _time(report, "captured", lambda: lab.rig.captured_seconds(step, 10))


def _time(report: Report, name: str, seconds: Callable[[], float]) -> None:
    try:
        report.add(f"{name}: step", seconds() * 1e3, "ms")
    except Exception as error:  # a peer that breaks is a fact about the peer
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        report.missing(f"{name}: step", why[:150])


def _their_model(lab: Lab, transformers: Any) -> Any:  # noqa: ANN401
    device = lab.rig.device.name
    config = transformers.LlamaConfig(**lab.sizes.large)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(lab.weights, strict=not config.tie_word_embeddings, assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    # Its frequencies are no part of a checkpoint.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()


def _static_step(
    lab: Lab,
    model: Any,  # noqa: ANN401
    transformers: Any,  # noqa: ANN401
    rows: int,
    context: int,
) -> Callable[[], torch.Tensor]:
    """The last token of a full context, over and over, as our own steps are timed."""
    device, vocab = lab.rig.device.name, lab.sizes.large["vocab_size"]
    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    if None in lengths:
        raise Skip(f"transformers {transformers.__version__} counts its cache in another way")
    place = torch.tensor([[context - 1]], device=device)
    ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
    logits = torch.empty(rows, 1, vocab, dtype=lab.sizes.dtype, device=device)

    def step() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context - 1)
        made = model(input_ids=ids, past_key_values=cache, position_ids=place, use_cache=True)
        return logits.copy_(made.logits)

    return step
