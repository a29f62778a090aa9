"""The `tokenloom` command: dispatch to serve, chat or bench by the first argument.

Console script and `python -m tokenloom`. Each part parses its own flags and is imported only when
it is called.
"""

import sys
from importlib.metadata import version

USAGE = """\
usage: tokenloom serve [options]    serve a model over HTTP and a socket
       tokenloom chat [options]     talk to a running server in this terminal
       tokenloom bench WORKLOAD     put a running server under load and measure it
       tokenloom --version

To begin: `tokenloom serve` serves the embedded model on http://127.0.0.1:30000; then, in another
terminal, `tokenloom chat`. Each has --help.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the named part; return the exit status: 0 done, 1 failed, 2 called wrongly."""
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
