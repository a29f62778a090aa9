"""Fields that this server knows and does not support, for every HTTP route. PURE.

One table for all routes: a field is refused wherever it appears unless its value has no effect. A
second table names fields that another route takes, with the replacement. Refusals are reported in
table order. A field that the route takes is never refused.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ...wire.sampling import InvalidRequest

_OFF = (False,)
_EMPTY: tuple[object, ...] = ([],)
_NEVER: tuple[object, ...] = ()
_MAX_NEUTRAL_BYTES = 64  # every neutral value is shorter


class Refusal(msgspec.Struct, frozen=True):
    neutral: tuple[object, ...] = ()  # values without effect; null is always one
    instead: str = ""  # what the client should do


# field -> values without effect
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": _OFF,
    "length_penalty": (1,),
    "logprobs": _OFF,
    "top_logprobs": (0,),
    "prompt_logprobs": _NEVER,
    "logprob_token_ids": _EMPTY,
    "return_logprob": _OFF,
    "top_logprobs_num": (0,),
    "token_ids_logprob": _EMPTY,
    "response_format": ({"type": "text"},),
    "json_schema": _NEVER,
    "regex": _NEVER,
    "ebnf": _NEVER,
    "structural_tag": _NEVER,
    "structured_outputs": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "guided_decoding_backend": _NEVER,
    "guided_whitespace_pattern": _NEVER,
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "stop_regex": ([], ""),
    "bad_words": _EMPTY,
    "allowed_token_ids": _EMPTY,
    "logits_processors": _EMPTY,
    "custom_logit_processor": _NEVER,
    "custom_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "truncate_prompt_tokens": _NEVER,
    "echo": _OFF,
    "suffix": ("",),
    "modalities": (["text"], []),
    "audio": _NEVER,
    "image_data": _EMPTY,
    "video_data": _EMPTY,
    "audio_data": _EMPTY,
    "web_search_options": _NEVER,
    "documents": _EMPTY,
    "chat_template": _NEVER,
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "add_special_tokens": (True,),
    "prompt_embeds": _NEVER,
    "input_embeds": _NEVER,
    "lora_id": _NEVER,
    "session_params": ({},),
    "extra_key": _NEVER,
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "return_token_ids": _OFF,
    "bootstrap_host": _NEVER,
    "bootstrap_room": _NEVER,
}

# A chat template writes the special tokens itself, so here `false` has no effect.
CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {"add_special_tokens": _OFF}

_IN_BODY = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "sampling_params": "its members in the body itself",
    "lora_path": "the adapter's name as model",
}
CHAT_ELSEWHERE: Mapping[str, str] = _IN_BODY
COMPLETIONS_ELSEWHERE: Mapping[str, str] = {**_IN_BODY, "max_completion_tokens": "max_tokens"}
# Names of the OpenAI routes, at /generate and in its sampling_params.
NATIVE_ELSEWHERE: Mapping[str, str] = {
    "max_tokens": "sampling_params.max_new_tokens",
    "max_completion_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
    "stream_options": "/v1/completions",
}


def refusals(
    taken: Iterable[str],
    elsewhere: Mapping[str, str],
    neutral: Mapping[str, tuple[object, ...]] | None = None,
) -> dict[str, Refusal]:
    """Return the refusals of a route with the fields `taken`; `neutral` overrides the table."""
    table = {name: Refusal(values) for name, values in UNSUPPORTED.items()}
    table |= {name: Refusal(instead=instead) for name, instead in elsewhere.items()}
    table |= {name: Refusal(values) for name, values in (neutral or {}).items()}
    for name in taken:
        table.pop(name, None)
    return table


def check_refused(name: str, raw: bytes, refusal: Refusal) -> None:
    """Raise InvalidRequest for `name` unless its JSON value `raw` has no effect."""
    if len(raw) <= _MAX_NEUTRAL_BYTES:
        try:
            value: object = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            pass
        else:
            if value is None or any(_same(value, known) for known in refusal.neutral):
                return
    raise InvalidRequest(name, f"{name} is not supported{_hint(refusal)}")


def unknown_field(name: str) -> InvalidRequest:
    """Return the error for a key that a strict message, such as the socket's, does not have."""
    hint = _SOCKET_INSTEAD.get(name)
    if hint:
        return InvalidRequest(name, f"{name} is not supported here; use {hint}")
    what = "not supported" if name in UNSUPPORTED else "an unknown field"
    return InvalidRequest(name, f"{name} is {what}")


_SOCKET_INSTEAD = {
    **NATIVE_ELSEWHERE,
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_tokens": "sampling.max_new_tokens",
    "min_tokens": "sampling.min_new_tokens",
    "include_stop_str_in_output": "sampling.no_stop_trim",
    "stream_options": "stream",
    "sampling_params": "sampling",
    "sampling_seed": "sampling.seed",
    "model": "lora_path",
}


def _hint(refusal: Refusal) -> str:
    return f" here; use {refusal.instead}" if refusal.instead else ""


def _same(value: object, known: object) -> bool:
    """Compare so that 1 equals 1.0 and true equals neither."""
    if isinstance(value, bool) or isinstance(known, bool):
        return value is known
    return value == known
