"""PeftConfig: which modules an adapter_config.json asks for, at which rank and scaling.

Called by the adapter loader. The rules of matching are those of peft 0.21, which tests hold beside
it. Whatever a config asks for and the models do not compute is refused by name. No tensors.
Patterns are matched by `regex`, as `re` does it but within a time: a file must not stop the server.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
import regex

from ...model_files.errors import AdapterError

_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Layer = Annotated[int, msgspec.Meta(ge=0)]

# Keys that leave the result of a finished adapter alone: notes, training, defaults of other keys.
_INERT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
# The other initialisations change the base model's weights as well.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
_ALL_LINEAR = "all-linear"
_MATCH_SECONDS = 0.1  # for one pattern and name: some 1000 times what a sane one takes
Value = TypeVar("Value", int, float)


class PeftConfig(msgspec.Struct, frozen=True):
    """The keys that count, with peft's defaults."""

    target_modules: list[str] | str
    r: _Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: list[_Layer] | _Layer | None = None
    layers_pattern: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None

    def targets(self, name: str) -> bool:
        """Whether the module of this name, as peft counts it, has an adapter."""
        if self._excludes(name):
            return False
        asked = self.target_modules
        if isinstance(asked, list):
            return name in asked or (_ends_with(name, asked) and self._in_layers(name))
        if asked.lower() == _ALL_LINEAR:
            return name not in ("lm_head", "model.embed_tokens")
        return _match(asked, name, whole=True) is not None

    def rank(self, name: str) -> int:
        return _look_up(self.rank_pattern, name, self.r)

    def scaling(self, name: str) -> float:
        """alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv:2312.03732)."""
        rank = self.rank(name)
        alpha = _look_up(self.alpha_pattern, name, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _excludes(self, name: str) -> bool:
        asked = self.exclude_modules
        if not asked:
            return False
        if isinstance(asked, str):
            return _match(asked, name, whole=True) is not None
        return name in asked or _ends_with(name, asked)

    def _in_layers(self, name: str) -> bool:
        """Names without a layer are in none, once layers are asked for."""
        asked = self.layers_to_transform
        if asked is None or asked == []:
            return True
        layer = self._layer(name)
        return layer == asked if isinstance(asked, int) else layer in asked

    def _layer(self, name: str) -> int | None:
        """The number that follows one of the layer patterns, or any name where there are none."""
        if not self.layers_pattern:
            found = _match(r".*?\.[^.]*\.(\d+)\.", name)
            return int(found[1]) if found else None
        patterns = self.layers_pattern
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = _match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", name)
            if found:
                return int(found["idx"])
        return None


def parse_peft_config(data: bytes) -> PeftConfig:
    """Raises AdapterError naming the key that is missing, malformed or not supported."""
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"adapter_config.json is no JSON object: {error}") from error
    _refuse_unsupported(raw)
    try:
        config = msgspec.convert(raw, PeftConfig)
    except msgspec.ValidationError as error:
        raise AdapterError(f"adapter_config.json: {error}") from error
    _check(config)
    return config


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    kind = raw.pop("peft_type", None)
    if kind != "LORA":
        raise AdapterError(f"peft_type {kind!r} is not supported (known: LORA)")
    task = raw.pop("task_type", None)
    if task not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type {task!r} is not supported (known: CAUSAL_LM)")
    start = raw.pop("init_lora_weights", None)
    if start not in _INITIALISATIONS:
        raise AdapterError(
            f"init_lora_weights {start!r} goes with changed base weights: save the adapter "
            "converted to plain LoRA"
        )
    for key, value in raw.items():
        nothing = not value or (key == "bias" and value == "none")
        if not nothing and key not in _INERT and key not in PeftConfig.__struct_fields__:
            raise AdapterError(f"{key} {value!r} is not supported")


def _check(config: PeftConfig) -> None:
    by_pattern = isinstance(config.target_modules, str)
    if by_pattern and (config.layers_to_transform is not None or config.layers_pattern is not None):
        raise AdapterError("layers_to_transform and layers_pattern need target_modules as a list")
    if config.layers_pattern and config.layers_to_transform is None:
        raise AdapterError("layers_pattern has a meaning with layers_to_transform only")
    for pattern in _patterns(config):
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise AdapterError(
                f"adapter_config.json: {pattern!r} is no regular expression: {error}"
            ) from error


def _patterns(config: PeftConfig) -> Iterable[str]:
    for maybe in (config.target_modules, config.exclude_modules):
        if isinstance(maybe, str):
            yield maybe
    layers = config.layers_pattern or []
    yield from [layers] if isinstance(layers, str) else layers
    yield from config.rank_pattern or {}
    yield from config.alpha_pattern or {}


def _ends_with(name: str, suffixes: Iterable[str]) -> bool:
    return any(name.endswith(f".{suffix}") for suffix in suffixes)


def _match(pattern: str, name: str, *, whole: bool = False) -> regex.Match[str] | None:
    """From the start of the name. Raises AdapterError if that takes too long."""
    match = regex.fullmatch if whole else regex.match
    try:
        return match(pattern, name, timeout=_MATCH_SECONDS)
    except TimeoutError as error:
        raise AdapterError(
            f"adapter_config.json: matching {pattern!r} with {name} takes over {_MATCH_SECONDS:g} s"
        ) from error


def _look_up(patterns: dict[str, Value] | None, name: str, default: Value) -> Value:
    """The first pattern that fits the end of the name, from a dot on."""
    for pattern, value in (patterns or {}).items():
        if _match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
