"""Match the regular expressions of one adapter config, in a process that may be killed.

Run as a script by lora_patterns.py with one line of JSON on standard input: `names`, `seconds`,
`bytes` and `questions`, each a kind and a pattern. It prints one line: for each question the
indices of the matching names, or `error`. Imports only the standard library, to start at once.

Compiling and matching an expression can take unbounded time and memory and cannot be interrupted
from within, so this process sets its own limits first.
"""

import json
import re
import resource
import sys
from typing import Any

KINDS = {  # as peft 0.21 matches them
    "whole": "{}",
    "end": r"(.*\.)?({})$",
    "layer": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}


def answers(kind: str, pattern: str, names: list[str]) -> dict[str, int]:
    """Map the index of each matching name to its layer number for kind "layer", else 0."""
    re.compile(pattern)  # on its own: its brackets must not pair with those of KINDS
    compiled = re.compile(KINDS[kind].format(pattern))
    match = compiled.fullmatch if kind == "whole" else compiled.match
    found = ((index, match(name)) for index, name in enumerate(names))
    return {
        str(index): int(one["idx"]) if kind == "layer" else 0
        for index, one in found
        if one is not None
    }


def main(question: dict[str, Any]) -> dict[str, object]:
    resource.setrlimit(resource.RLIMIT_AS, (question["bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (question["seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = []
    for kind, pattern in question["questions"]:
        try:
            found.append(answers(kind, pattern, question["names"]))
        except (re.error, OverflowError, ValueError) as error:
            return {"pattern": pattern, "error": f"is no regular expression: {error}"}
        except (RecursionError, MemoryError):
            return {"pattern": pattern, "error": "is too deep or too large"}
    return {"found": found}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.readline()))))
