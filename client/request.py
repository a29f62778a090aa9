"""Builds Generate messages from the keyword arguments of `generate` and `complete`. PURE.

Called by AsyncClient. Refuses only what cannot be encoded; the server validates values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from ..wire.client_messages import ChatMessage, Generate
from ..wire.sampling import SamplingParams

Messages = Sequence[ChatMessage | Mapping[str, str]]


class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams as keyword arguments; omitted ones keep their defaults."""

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    no_stop_trim: bool


class RequestOptions(SamplingOptions, total=False):
    """SamplingOptions and the other options of a request: see docs/api.md."""

    priority: int
    user: str
    cache_salt: str
    lora_path: str | None  # the name of an adapter


_LABELS = ("priority", "user", "cache_salt", "lora_path")


@dataclass(frozen=True)
class Asked:
    """One request without its rid."""

    prompt: str | None
    messages: Messages | None
    input_ids: Sequence[int] | None
    options: RequestOptions

    def generate(self, rid: str, *, stream: bool) -> Generate:
        """Build the message. Raises TypeError for an unknown option, ValueError unless there is
        exactly one kind of prompt.
        """
        given = [x for x in (self.prompt, self.messages, self.input_ids) if x is not None]
        if len(given) != 1:
            raise ValueError("exactly one of prompt, messages and input_ids must be given")
        options: dict[str, Any] = dict(self.options)
        labels = {name: options.pop(name) for name in _LABELS if name in options}
        return Generate(
            rid=rid,
            text=self.prompt,
            input_ids=None if self.input_ids is None else list(self.input_ids),
            messages=None if self.messages is None else _chat(self.messages),
            sampling=_sampling(options),
            stream=stream,
            **labels,
        )


def _chat(messages: Messages) -> list[ChatMessage]:
    """Convert chat messages. Raises msgspec.ValidationError, which names the wrong message."""
    plain = [m if isinstance(m, ChatMessage) else dict(m) for m in messages]
    return msgspec.convert(plain, list[ChatMessage])


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = (stop,)
    elif stop is not None:
        fields["stop"] = tuple(stop)
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    return SamplingParams(**fields)
