"""Flags of `tokenloom bench`: one subcommand per workload, with its options.

Used by `serve`; turns flags into workload values and does nothing else.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from ..client.aio import DEFAULT_PORT
from .workloads import (
    Closed,
    Open,
    Shape,
    Source,
    Stream,
    Workload,
    chats,
    independent,
    long_prompts,
    poisson,
    shared_prefix,
)

FASTEST_STREAM = 500  # tokens a second; a decode stream must have work until the long prompts end


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse flags; `build(flags, source)` in the result makes the workload. Exits with 2."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if flags.text_prompts and flags.tokenizer is None:
        parser.error("--text-prompts needs --tokenizer")
    if flags.socket is not None:
        for name in ("base_url", "model", "api_key", "text_prompts"):
            if getattr(flags, name):
                parser.error(f"--{name.replace('_', '-')} is for HTTP and has no use with --socket")
    if flags.json is not None and not flags.json.parent.is_dir():
        parser.error(f"--json: there is no directory {flags.json.parent}")
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenloom bench",
        description="Put a running server under load and print what it did. Token-id prompts, "
        "greedy answers of full length, streamed.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    where, how_often = _where(), _pace()
    single = _Dials(_independent, "single requests that have nothing in common")
    single.add(kinds, "independent", [where, how_often, _shape(128, 64)])

    shared = _Dials(_shared_prefix, "groups of requests with a common prefix")
    sub = shared.add(kinds, "shared-prefix", [where, how_often, _shape(32, 32)])
    sub.add_argument("--prefix-tokens", type=_count, default=1024, help="(default: %(default)s)")
    sub.add_argument("--groups", type=_count, default=1, help="prefixes (default: %(default)s)")

    talk = _Dials(_chats, "conversations; --requests counts them, not their turns")
    sub = talk.add(kinds, "chats", [where, how_often, _shape(96, 64)])
    sub.add_argument("--turns", type=_count, default=4, help="(default: %(default)s)")

    long = _Dials(_long_prompts, "long prompts at a rate, arriving while other requests decode")
    sub = long.add(kinds, "long-prompts", [where, _shape(128, 512)])
    sub.add_argument("--concurrency", type=_count, default=8, help="decode streams (default: 8)")
    sub.add_argument("--rate", type=_above_zero, default=0.25, help="long prompts a second")
    sub.add_argument("--requests", type=_count, default=8, help="long prompts (default: 8)")
    sub.add_argument("--long-tokens", type=_count, default=1500, help="(default: %(default)s)")
    sub.add_argument("--long-answer", type=_count, default=16, help="(default: %(default)s)")
    return parser


class _Dials:
    """Builder of one subcommand and its workload."""

    def __init__(self, build: Callable[..., Workload], about: str) -> None:
        self._build = build
        self._about = about

    def add(
        self,
        kinds: "argparse._SubParsersAction[argparse.ArgumentParser]",
        name: str,
        parents: list[argparse.ArgumentParser],
    ) -> argparse.ArgumentParser:
        sub = kinds.add_parser(
            name, help=self._about, description=self._about, parents=parents, allow_abbrev=False
        )
        sub.set_defaults(build=self._build)
        return sub


def _where() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    add = parent.add_argument
    add("--base-url", metavar="URL", help=f"(default: http://127.0.0.1:{DEFAULT_PORT})")
    add(
        "--socket",
        metavar="ADDRESS",
        help="tokenloom's socket door instead of HTTP: its address, or the HTTP port of a server "
        "on this machine",
    )
    add("--model", help="name to ask for (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--tokenizer",
        metavar="PATH",
        help="model directory or .gguf: prompts are made of words, and the next turn of a chat "
        "holds the answer that came (else random ids, and ids that stand for the answer)",
    )
    add("--text-prompts", action="store_true", help="send text, for servers that take no ids")
    add("--seed", type=int, default=0, help="another seed, other prompts and arrivals")
    add("--warmup", type=_at_least_zero, default=2, help="requests before the clock starts")
    add("--timeout", type=_above_zero, default=600.0, help="seconds a request may take")
    add("--json", type=Path, metavar="FILE", help="write everything there, too")
    return parent


def _pace() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    add = parent.add_argument
    add("--requests", type=_count, default=64, help="how many (default: %(default)s)")
    either = parent.add_mutually_exclusive_group()
    either.add_argument("--concurrency", type=_count, default=8, help="in flight (default: 8)")
    either.add_argument("--rate", type=_above_zero, help="open loop: Poisson arrivals a second")
    return parent


def _shape(prompt: int, answer: int) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    add = parent.add_argument
    add("--prompt-tokens", type=_count, default=prompt, help="(default: %(default)s)")
    add("--answer-tokens", type=_count, default=answer, help="(default: %(default)s)")
    add("--length-spread", type=_share, default=0.0, help="0.5: both from half to one and a half")
    return parent


def _count(text: str) -> int:
    return _bounded(int(text), text, 1)


def _at_least_zero(text: str) -> int:
    return _bounded(int(text), text, 0)


def _bounded(value: int, text: str, low: int) -> int:
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1, got {text}")
    return value


def flags_shape(flags: argparse.Namespace) -> Shape:
    return Shape(flags.prompt_tokens, flags.answer_tokens, flags.length_spread)


def _paced(flags: argparse.Namespace, source: Source) -> Closed | Open:
    if flags.rate is None:
        return Closed(flags.concurrency)
    return poisson(source, flags.rate, flags.requests)


def _independent(flags: argparse.Namespace, source: Source) -> Workload:
    sessions = independent(source, flags.requests, flags_shape(flags))
    return (Stream("requests", sessions, _paced(flags, source)),)


def _shared_prefix(flags: argparse.Namespace, source: Source) -> Workload:
    sessions = shared_prefix(
        source,
        flags.requests,
        flags_shape(flags),
        prefix=flags.prefix_tokens,
        groups=flags.groups,
    )
    return (Stream("requests", sessions, _paced(flags, source)),)


def _chats(flags: argparse.Namespace, source: Source) -> Workload:
    sessions = chats(source, flags.requests, flags_shape(flags), turns=flags.turns)
    return (Stream("turns", sessions, _paced(flags, source)),)


def _long_prompts(flags: argparse.Namespace, source: Source) -> Workload:
    arrivals = poisson(source, flags.rate, flags.requests)
    # Time for the last arrival and for what a slow server has left then.
    seconds = 2 * arrivals.times[-1] + 30
    each = math.ceil(seconds * FASTEST_STREAM / flags.answer_tokens)
    sessions = independent(source, each * flags.concurrency, flags_shape(flags))
    decode = Stream("decode", sessions, Closed(flags.concurrency))
    return long_prompts(source, decode, arrivals, Shape(flags.long_tokens, flags.long_answer))
