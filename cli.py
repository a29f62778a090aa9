"""The `tokenloom` command: which part of the program an invocation is for.

Console script and `python -m tokenloom`. Each part parses its own flags and is imported only when
asked for; nothing is decided here but the name.
"""

import sys
from importlib.metadata import version

USAGE = """\
usage: tokenloom serve [flags]    serve a model (tokenloom serve --help lists the flags)
       tokenloom chat [flags]     talk to a running server in this terminal
       tokenloom bench WORKLOAD   put a running server under load and measure it
       tokenloom --version
"""


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 called wrongly."""
    match sys.argv[1:] if argv is None else argv:
        case ["serve", *flags]:
            from tokenloom.launch import main as serve

            return serve(flags)
        case ["chat", *flags]:
            from tokenloom.client.chat import main as chat

            return chat(flags)
        case ["bench", *flags]:
            from tokenloom.bench.serve import main as bench

            return bench(flags)
        case [] | ["-h" | "--help" | "help"]:
            print(USAGE, end="")
            return 0
        case ["--version" | "-V"]:
            print(f"tokenloom {version('tokenloom')}")
            return 0
        case [other, *_]:
            print(f"tokenloom: error: {other!r} is none of serve, chat, bench", file=sys.stderr)
            print(USAGE, end="", file=sys.stderr)
            return 2
    raise AssertionError("every list of words matches a case above")
