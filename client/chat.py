"""`tokenloom chat`: a conversation with a running server in a terminal, or through a pipe.

Called by the CLI. Owns the conversation; each turn is a separate request. Without a terminal it
reads one line per turn, prints only answers, and exits with 1 if any turn failed. Wire messages
must not enter: it uses Client.
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator

from ..wire.channel import AddressTooLong
from ..wire.client_messages import ChatMessage, Pong
from ..wire.paths import BadAddress, UnsafeDirectory
from .aio import DEFAULT_PORT, Timeouts
from .errors import ClientError, RequestRefused, ServerGone
from .request import RequestOptions
from .sync import Client

CONNECT_SECONDS = 5.0
# For models whose files recommend nothing: temperature 1.0 makes small models talk nonsense.
# The penalty keeps them from repeating one sentence until the context is full.
SOBER: RequestOptions = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def main(argv: list[str]) -> int:
    """Run the chat; return the exit status: 0 left by the user, 1 a failure, 130 Ctrl-C."""
    flags = _parser().parse_args(argv)
    timeouts = Timeouts(connect=CONNECT_SECONDS, answer=None)  # Ctrl-C stops a slow answer
    try:
        with Client(flags.address, port=flags.port, timeout=timeouts) as client:
            return _Chat(client, flags.system, _options(flags)).run()
    except (BadAddress, AddressTooLong, UnsafeDirectory) as error:
        return _fail(str(error))
    except ServerGone as error:
        return _fail(f"{error}; start one with: tokenloom serve")
    except ClientError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


class _Chat:
    def __init__(self, client: Client, system: str | None, options: RequestOptions) -> None:
        self._client = client
        self._options = options
        self._opening = [ChatMessage("system", system)] if system else []
        self._said = list(self._opening)
        self._failed = False

    def run(self) -> int:
        """Chat until the end of input; return the exit status. Raises ClientError if ping fails."""
        pong = self._client.ping()
        self._options = {**_defaults(pong), **self._options}
        if _at_terminal():
            state = "" if pong.ready else " (not ready)"
            print(f"{pong.model}{state} at {self._client.address}\n{HELP}")
        for line in _lines():
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    self._said = list(self._opening)
                case command if command.startswith("/"):
                    _fail(f"{command}: {HELP}")
                case text:
                    self._turn(text)
        return 1 if self._failed else 0

    def _turn(self, text: str) -> None:
        """Send a question and print the answer; keep both only if the answer has text."""
        self._said.append(ChatMessage("user", text))
        answer = self._client.generate(messages=self._said, **self._options)
        try:
            for delta in answer:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            answer.close()
            print(" [stopped]", end="")
        except ClientError as error:
            self._failed = True
            field = f"{error.param}: " if isinstance(error, RequestRefused) and error.param else ""
            _fail(f"{field}{error}")
        print(flush=True)
        if answer.text:
            self._said.append(ChatMessage("assistant", answer.text))
        else:
            self._said.pop()


def _lines() -> Iterator[str]:
    """Yield input lines until the end of input. Ctrl-C drops the line."""
    if not _at_terminal():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` its editing keys, where it exists
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _fail(message: str) -> int:
    print(f"tokenloom chat: {message}", file=sys.stderr, flush=True)
    return 1


def _defaults(pong: Pong) -> RequestOptions:
    """Return the server's recommended sampling options, or SOBER without any."""
    if pong.sampling is None:
        return SOBER
    return {
        "temperature": pong.sampling.temperature,
        "top_p": pong.sampling.top_p,
        "top_k": pong.sampling.top_k,
        "min_p": pong.sampling.min_p,
        "repetition_penalty": pong.sampling.repetition_penalty,
    }


def _options(flags: argparse.Namespace) -> RequestOptions:
    options: RequestOptions = {}
    if flags.adapter is not None:
        options["lora_path"] = flags.adapter
    if flags.temperature is not None:
        options["temperature"] = flags.temperature
    if flags.top_p is not None:
        options["top_p"] = flags.top_p
    if flags.top_k is not None:
        options["top_k"] = flags.top_k
    if flags.repetition_penalty is not None:
        options["repetition_penalty"] = flags.repetition_penalty
    if flags.max_new_tokens is not None:
        options["max_new_tokens"] = flags.max_new_tokens
    if flags.seed is not None:
        options["seed"] = flags.seed
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenloom chat",
        description=f"Chat with a running tokenloom server. In the chat, {HELP}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="HTTP port of a server on this machine; finds its socket (default: %(default)s)",
    )
    parser.add_argument(
        "--address",
        help="the server's socket instead, e.g. tcp://127.0.0.1:31000 (its --socket flag)",
    )
    parser.add_argument(
        "--adapter", metavar="NAME", help="answers with this adapter (default: the base model)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the chat")
    sampling = parser.add_argument_group(
        "sampling",
        "By default as the model's generation_config.json recommends; where it has none, "
        f"temperature {SOBER['temperature']:g}, top-p {SOBER['top_p']:g} and repetition penalty "
        f"{SOBER['repetition_penalty']:g}.",
    )
    for flag, kind, letter, what in (
        ("--temperature", float, "T", "0 takes the likeliest token, 1 draws as the model says"),
        ("--top-p", float, "P", "draw from the likeliest tokens that sum to P"),
        ("--top-k", int, "K", "draw from the K likeliest tokens"),
        ("--repetition-penalty", float, "R", "above 1: fewer repetitions"),
    ):
        sampling.add_argument(flag, type=kind, metavar=letter, help=what)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest answer in tokens (default: what fits the context)",
    )
    parser.add_argument("--seed", type=int, help="makes the same chat give the same answers")
    return parser
