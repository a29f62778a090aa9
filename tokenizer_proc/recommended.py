"""Sampling defaults from the model's generation_config.json, for chat clients.

Read once when the front starts. Requests that set nothing keep the API's defaults.
"""

import logging
from pathlib import Path

import msgspec

from ..model_files.json_file import read_json_object
from ..wire.sampling import InvalidRequest, SamplingParams, check_sampling

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger(__name__)


def recommended_sampling(path: str) -> SamplingParams | None:
    """Read the recommendation; None if there is none, or none that is supported.

    `path` is a directory, or a .gguf file, which never has one. Raises ModelError for an unreadable
    file.
    """
    config = read_json_object(Path(path) / "generation_config.json")
    given = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    if config.get("do_sample") is False:
        given = {"temperature": 0.0}
    if not given:
        return None
    try:
        params = msgspec.convert(given, SamplingParams)
        check_sampling(params, vocab_size=1)
    except (msgspec.ValidationError, InvalidRequest) as error:
        log.warning("the sampling that generation_config.json recommends is ignored: %s", error)
        return None
    return params
