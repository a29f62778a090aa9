"""Entry point of the detokenizer process, started by the launcher."""

from ..wire.child import run_child
from ..wire.config import DetokenizerConfig
from .server import main

if __name__ == "__main__":
    run_child("detokenizer", DetokenizerConfig, main)
