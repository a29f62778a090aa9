"""The sampling wishes that all three generation routes spell alike, and their translation.

JSON null means unset for every field. Bounds are not checked here but in `wire.sampling`, by
`Front.submit`; `respelled` gives its complaints the client's own field names back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ...wire.sampling import InvalidRequest, SamplingParams


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


_SAME_NAME = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name not in ("stop", "stop_token_ids", "logit_bias")
)


def to_sampling(
    fields: SamplingFields, *, max_new_tokens: int | None, min_new_tokens: int | None
) -> SamplingParams:
    """SamplingParams of what was set; defaults of the rest are SamplingParams' own."""
    given = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens or 0,
        stop=stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=fields.logit_bias or None,
        **given,
    )


@contextmanager
def respelled(names: Mapping[str, str]) -> Iterator[None]:
    """Complaints that leave the block speak of the client's field names instead of ours."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message
        for ours, theirs in names.items():
            # Plain words may belong to the sentence, unless they are its subject.
            if "_" in ours or message.startswith(f"{ours} "):
                message = message.replace(ours, theirs, -1 if "_" in ours else 1)
        raise InvalidRequest(names.get(error.param, error.param), message) from None
