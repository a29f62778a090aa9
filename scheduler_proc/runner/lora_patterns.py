"""Match the patterns of an adapter config to module names, at a bounded cost.

Called by lora_config.py once per config. Plain names, which nearly all configs have, are compared
here. Regular expressions are matched by Python's own `re`, as peft does it, in a separate process
that is killed when they take too long in all.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ...model_files.errors import AdapterError

MAX_PATTERNS = 1024  # per config; lists of names do not count
MAX_PATTERN_CHARS = 32 << 10
CPU_SECONDS = 2  # for all patterns of one config together
WALL_SECONDS = 30.0  # larger: other processes may have the processor
MEMORY_BYTES = 256 << 20
SHOWN_CHARS = 100  # of a refused pattern, in the error

Kind = Literal["whole", "end", "layer"]
Question = tuple[Kind, str]
Found = dict[str, int]  # matching name -> its layer number for kind "layer", else 0

_PROCESS = Path(__file__).with_name("pattern_process.py")
_PLAIN = re.compile(r"\w+", re.ASCII)


class _Answer(msgspec.Struct):
    found: list[dict[int, int]] = []
    pattern: str = ""
    error: str = ""


def match_all(questions: Iterable[Question], names: Sequence[str]) -> dict[Question, Found]:
    """The names that each question matches. Raises AdapterError for a bad or costly pattern."""
    asked = dict.fromkeys(questions)
    _check_sizes([pattern for _, pattern in asked])
    hard = [one for one in asked if one[0] == "layer" or not _PLAIN.fullmatch(one[1])]
    found = dict(zip(hard, _in_a_process(hard, names), strict=True)) if hard else {}
    ends: dict[str, Found] = {}
    for name in names:
        ends.setdefault(name.rpartition(".")[2], {})[name] = 0
    for kind, pattern in asked.keys() - found.keys():
        whole = {pattern: 0} if pattern in names else {}
        found[kind, pattern] = whole if kind == "whole" else ends.get(pattern, {})
    return found


def shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= SHOWN_CHARS else pattern[:SHOWN_CHARS] + "...")


def _check_sizes(patterns: list[str]) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise AdapterError(
            f"adapter_config.json has {len(patterns)} patterns; {MAX_PATTERNS} are allowed"
        )
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise AdapterError(
                f"adapter_config.json: the pattern {shown(pattern)} has {len(pattern)} characters; "
                f"{MAX_PATTERN_CHARS} are allowed"
            )


def _in_a_process(questions: list[Question], names: Sequence[str]) -> list[Found]:
    limits = {"seconds": CPU_SECONDS, "bytes": MEMORY_BYTES}
    question = msgspec.json.encode({"names": names, "questions": questions} | limits)
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROCESS)],
            input=question + b"\n",
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
        )
        answer = msgspec.json.decode(ran.stdout, type=_Answer) if ran.returncode == 0 else None
    except (subprocess.TimeoutExpired, OSError, msgspec.DecodeError):
        answer = None
    if answer is None:
        longest = max((pattern for _, pattern in questions), key=len)
        raise AdapterError(
            f"adapter_config.json: its patterns, such as {shown(longest)}, take more than "
            f"{CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to match"
        )
    if answer.error:
        raise AdapterError(f"adapter_config.json: {shown(answer.pattern)} {answer.error}")
    return [{names[index]: layer for index, layer in one.items()} for one in answer.found]
