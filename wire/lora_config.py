"""LoRAConfig: flags of adapters, a group of ServerConfig (config.py).

PURE: msgspec only. The front and the scheduler process each get the whole group.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

LORA_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    lora: Annotated[
        tuple[Annotated[str, Meta(pattern=f"^{LORA_NAME}=.+$")], ...],
        Meta(
            description="adapter (PEFT directory) that is served from the start, kept loaded where "
            "',pinned' follows; may be repeated",
            extra={"form": "NAME=PATH[,pinned]"},
        ),
    ] = ()
    lora_root: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="directory below which clients may load adapters; may be repeated; "
            "without one they may load none",
            extra={"form": "DIR"},
        ),
    ] = ()
    max_loras_per_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="different adapters in one step, the base model not counted",
            extra={"aliases": ["--max-loras"]},
        ),
    ] = 8
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=1024, description="adapters of a higher rank are refused")
    ] = 64
    max_loaded_loras: Annotated[
        int,
        Meta(
            ge=1,
            description="adapters in memory; of more, those used last are kept",
            extra={"aliases": ["--max-cpu-loras"]},
        ),
    ] = 64

    @property
    def enabled(self) -> bool:
        """Whether adapters can be loaded at all."""
        return bool(self.lora or self.lora_root)


def read_lora(flag: str) -> tuple[str, str, bool]:
    """Parse a value of --lora into name, path and whether it is pinned."""
    name, _, path = flag.partition("=")
    unpinned = path.removesuffix(",pinned")
    return name, unpinned, unpinned != path


def lora_contradiction(lora: LoRAConfig) -> str | None:
    """Return why the adapter flags contradict each other; None if they agree."""
    names = [read_lora(flag)[0] for flag in lora.lora]
    if twice := {name for name in names if names.count(name) > 1}:
        return f"--lora names {min(twice)} twice"
    for flag, number in (
        ("the adapters of --lora:", len(names)),
        ("--max-loras-per-batch", lora.max_loras_per_batch),
    ):
        if number > lora.max_loaded_loras:
            return f"--max-loaded-loras {lora.max_loaded_loras} is less than {flag} {number}"
    return None
