"""The simulation's hash model, re-exported for the tests of core and runner."""

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
