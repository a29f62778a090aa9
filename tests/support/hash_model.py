"""The hash model of the simulation, under the name that tests of core and runner know it by."""

from tokenloom.bench.simulation.hash_model import (
    EOS,
    VOCAB,
    HashAdapters,
    HashRunner,
    LateResult,
    Script,
    hash_answer,
    hash_ids,
    next_id,
)

__all__ = [
    "EOS",
    "VOCAB",
    "HashAdapters",
    "HashRunner",
    "LateResult",
    "Script",
    "hash_answer",
    "hash_ids",
    "next_id",
]
