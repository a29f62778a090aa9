"""Load model files one after the other as a server does: `python load_files.py`, a path a line.

Prints a line for each: "loaded", or "refused" and the words of the ModelError. Anything else ends
the process, and the test sees at which file.
"""

import sys

import torch

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.loader import load_packed_model
from tokenloom.tokenizer_proc.encode import load_text


def load(path: str) -> str:
    try:
        load_text(path)
        load_packed_model(path, "int4", load_format="auto", context_length=None, threads=1)
    except ModelError as error:
        return f"refused {error}".replace("\n", " ")
    return "loaded"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(load(line.rstrip("\n")), flush=True)
