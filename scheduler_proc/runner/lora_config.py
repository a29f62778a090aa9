"""PeftConfig and TargetedModules: the modules, ranks and scalings that an adapter_config.json sets.

Called by the adapter loader. Matching follows peft 0.21, with which tests compare it. A key that
the models do not support is refused by name. A config is not trusted: lora_patterns.py bounds the
cost of its patterns. No tensors.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from ...model_files.errors import AdapterError
from .lora_patterns import SHOWN_CHARS, Question, match_all

_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Layer = Annotated[int, msgspec.Meta(ge=0)]

# Keys that do not change the result of a trained adapter, so that any value is accepted.
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
# Supported initialisations: the others also change the base model's weights.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
_ALL_LINEAR = "all-linear"
_ANY_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
Value = TypeVar("Value", int, float)


class PeftConfig(msgspec.Struct, frozen=True):
    """The supported keys of an adapter_config.json, with peft's defaults."""

    target_modules: list[str] | str
    r: _Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: list[_Layer] | _Layer | None = None
    layers_pattern: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None

    def questions(self) -> Iterable[Question]:
        """Yield every pattern with the kind of match that peft applies."""
        for maybe in (self.target_modules, self.exclude_modules):
            if isinstance(maybe, str) and maybe.lower() != _ALL_LINEAR:
                yield "whole", maybe
        for layer in self.layer_patterns():
            yield "layer", layer
        for end in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            yield "end", end

    def layer_patterns(self) -> list[str]:
        patterns = self.layers_pattern or []
        return [patterns] if isinstance(patterns, str) else patterns


class TargetedModules:
    """Which modules of a model a config targets, with the rank and scaling of each."""

    def __init__(self, config: PeftConfig, names: Sequence[str]) -> None:
        """`names` are all modules of the model, as peft names them. Raises AdapterError."""
        self._config = config
        self._found = match_all(config.questions(), names)
        self._asked = _names(config.target_modules)
        self._excluded = _names(config.exclude_modules)
        layers = config.layers_to_transform
        self._layers = None if layers is None or layers == [] else _numbers(layers)
        self._ranks = self._values(config.rank_pattern or {})
        self._alphas = self._values(config.alpha_pattern or {})

    def targets(self, name: str) -> bool:
        """Whether the module of this name has an adapter."""
        if self._excludes(name):
            return False
        asked = self._config.target_modules
        if isinstance(asked, list):
            ends = _ends_with(name, self._asked) and self._in_layers(name)
            return name in self._asked or ends
        if asked.lower() == _ALL_LINEAR:
            return name not in ("lm_head", "model.embed_tokens")
        return name in self._found["whole", asked]

    def rank(self, name: str) -> int:
        return self._ranks.get(name, self._config.r)

    def scaling(self, name: str) -> float:
        """alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv:2312.03732)."""
        rank = self.rank(name)
        alpha = self._alphas.get(name, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def _excludes(self, name: str) -> bool:
        asked = self._config.exclude_modules
        if isinstance(asked, str):
            # peft gives all-linear no meaning here: as an expression it matches no module.
            return name in self._found.get(("whole", asked), {})
        return name in self._excluded or _ends_with(name, self._excluded)

    def _in_layers(self, name: str) -> bool:
        """Whether layers_to_transform selects the module; without a layer only if it is not set."""
        return self._layers is None or self._layer(name) in self._layers

    def _layer(self, name: str) -> int | None:
        """The layer number in a module name, after a layer pattern, or after any part if none."""
        patterns = self._config.layer_patterns()
        if not patterns:
            found = _ANY_LAYER.match(name)
            return int(found[1]) if found else None
        layers = (self._found["layer", pattern].get(name) for pattern in patterns)
        return next((layer for layer in layers if layer is not None), None)

    def _values(self, patterns: dict[str, Value]) -> dict[str, Value]:
        """By module name: the value of the first pattern that matches the name's end at a dot."""
        values: dict[str, Value] = {}
        for pattern, value in patterns.items():
            for name in self._found["end", pattern]:
                values.setdefault(name, value)
        return values


def parse_peft_config(data: bytes) -> PeftConfig:
    """Raise AdapterError naming the key that is missing, malformed or not supported."""
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
        raise AdapterError(f"peft_type {reprlib.repr(kind)} is not supported (known: LORA)")
    task = raw.pop("task_type", None)
    if task not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type {reprlib.repr(task)} is not supported (known: CAUSAL_LM)")
    start = raw.pop("init_lora_weights", None)
    if start not in _INITIALISATIONS:
        raise AdapterError(
            f"init_lora_weights {reprlib.repr(start)} goes with changed base weights: save the "
            "adapter converted to plain LoRA"
        )
    for key, value in raw.items():
        nothing = not value or (key == "bias" and value == "none")
        if not nothing and key not in _INERT and key not in PeftConfig.__struct_fields__:
            raise AdapterError(f"{key[:SHOWN_CHARS]} {reprlib.repr(value)} is not supported")


def _check(config: PeftConfig) -> None:
    by_pattern = isinstance(config.target_modules, str)
    if by_pattern and (config.layers_to_transform is not None or config.layers_pattern is not None):
        raise AdapterError("layers_to_transform and layers_pattern need target_modules as a list")
    if config.layers_pattern and config.layers_to_transform is None:
        raise AdapterError("layers_pattern has a meaning with layers_to_transform only")


def _names(asked: list[str] | str | None) -> frozenset[str]:
    return frozenset(asked) if isinstance(asked, list) else frozenset()


def _numbers(layers: list[int] | int) -> frozenset[int]:
    return frozenset([layers] if isinstance(layers, int) else layers)


def _ends_with(name: str, suffixes: frozenset[str]) -> bool:
    """Whether what follows one of the dots in `name` is among `suffixes`."""
    return any(name[place + 1 :] in suffixes for place, char in enumerate(name) if char == ".")
