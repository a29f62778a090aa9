"""`python -m tokenloom.detokenizer_proc`: the process that the launcher starts."""

from ..wire.child import run_child
from ..wire.config import DetokenizerConfig
from .server import main

if __name__ == "__main__":
    run_child("detokenizer", DetokenizerConfig, main)
