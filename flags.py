"""The flags of `tokenloom serve`, derived from the fields of ServerConfig.

A nested struct is a group, `page_size` is `--page-size`, a bool has a `--no-` form. Used by the
launcher alone. The field types decide, through msgspec, which values are valid.
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import msgspec
from msgspec import inspect

from tokenloom.wire.config import ServerConfig, tp_contradiction
from tokenloom.wire.door_config import network_exposure
from tokenloom.wire.lora_config import lora_contradiction
from tokenloom.wire.scheduling_config import contradiction
from tokenloom.wire.secrets import masked

_EXAMPLES = """\
examples:
  tokenloom serve                                      the embedded model on http://127.0.0.1:30000
  tokenloom serve --model Qwen/Qwen3-0.6B              a model of the Hugging Face hub
  tokenloom serve --model model.Q4_K_M.gguf --port 0   a file, on any free port
  tokenloom serve --lora style=./style-adapter         with an adapter that requests ask for by name
  tokenloom serve --kv-tokens 20000 --cpu-threads 4    in less memory, on four cores
docs/flags.md says of each option when to change it.
"""
_GROUP_TITLES = {
    "model": "model",
    "doors": "doors (HTTP and socket)",
    "scheduling": "scheduling",
    "execution": "execution",
    "lora": "adapters (LoRA)",
    "runtime": "processes and logs",
}


def parse_flags(argv: list[str], prog: str = "tokenloom serve") -> ServerConfig:
    """Parse flags into a config; for a bad flag print one line with its limit and exit with 2."""
    parser = build_parser(prog)
    known, rest = parser.parse_known_args(argv)
    if rest:
        parser.error(_unknown(rest))
    given = vars(known)
    groups: dict[str, Any] = {}
    for field in msgspec.structs.fields(ServerConfig):
        prefix = f"{field.name}."
        values = {
            dest.removeprefix(prefix): tuple(value) if isinstance(value, list) else value
            for dest, value in given.items()
            if dest.startswith(prefix)
        }
        groups[field.name] = msgspec.structs.replace(field.default, **values)
    config = ServerConfig(**groups)
    problem = (
        network_exposure(config.doors)
        or contradiction(config.scheduling)
        or lora_contradiction(config.lora)
        or tp_contradiction(config.execution, config.lora)
    )
    if problem:
        parser.error(problem)
    return config


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--model MODEL] [--port N] [options]",
        description="Serve a language model over HTTP (OpenAI and native routes) and a socket.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, struct in get_type_hints(ServerConfig).items():
        group = parser.add_argument_group(_GROUP_TITLES[name])
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            _add_flag(group, f"{name}.{field.name}", field.default, hints[field.name])
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line; the usage of all flags would bury it."""
        self.exit(2, f"{self.prog}: error: {masked(message)} (see --help)\n")


def _unknown(arguments: list[str]) -> str:
    """Name the unknown flags; never repeat their values, which may be secrets."""
    names = [word.partition("=")[0] for word in arguments]
    flags = [name for name in names if re.fullmatch(r"--?[a-z][a-z-]*", name)]
    if not flags:
        return f"{arguments[0][:200]!r} belongs to no flag; a model is named with --model"
    return f"there is no flag {', '.join(flags)}"


def _add_flag(group: argparse._ArgumentGroup, dest: str, default: object, hint: object) -> None:
    info = inspect.type_info(hint)
    description, extra = "", {}
    if isinstance(info, inspect.Metadata):
        description = (info.extra_json_schema or {}).get("description", "")
        extra = info.extra or {}
    kind = _kind(info)
    name = dest.rpartition(".")[2]
    flag = "--" + name.replace("_", "-")
    suffix = "" if default in (None, ()) else f" (default: {_shown(default)})"
    options: dict[str, Any] = {"dest": dest, "help": (description + suffix).replace("%", "%%")}
    if isinstance(kind, inspect.BoolType):
        options["action"] = argparse.BooleanOptionalAction
    elif isinstance(kind, inspect.VarTupleType):
        options["action"] = "append"
        options["type"] = _item_converter(hint, extra["form"])
        options["metavar"] = extra["form"]
    else:
        options["type"] = _converter(hint, kind)
        options["metavar"] = _metavar(kind)
    group.add_argument(flag, *extra.get("aliases", []), **options)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _kind(info: inspect.Type) -> inspect.Type:
    """Return the type of a value that is given: without metadata and without `| None`."""
    if isinstance(info, inspect.Metadata):
        return _kind(info.type)
    if isinstance(info, inspect.UnionType):
        kinds = [kind for kind in info.types if not isinstance(kind, inspect.NoneType)]
        if len(kinds) == 1:
            return _kind(kinds[0])
    return info


def _converter(hint: object, kind: inspect.Type) -> Callable[[str], object]:
    read: type = {inspect.IntType: int, inspect.FloatType: float}.get(type(kind), str)
    wanted = _wanted(kind)

    def convert(text: str) -> object:
        try:
            text.encode()  # raises for command-line bytes that are not UTF-8
            value: object = msgspec.convert(read(text), hint)
        except (ValueError, msgspec.ValidationError) as error:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from error
        if isinstance(value, float) and not math.isfinite(value):  # JSON cannot carry it
            raise argparse.ArgumentTypeError(f"must be {wanted} and finite, got {text!r}")
        return value

    return convert


def _item_converter(hint: object, form: str) -> Callable[[str], object]:
    """Return a converter for one item of a flag that may be repeated."""

    def convert(text: str) -> object:
        try:
            text.encode()
            (item,) = msgspec.convert([text], hint)
        except (UnicodeEncodeError, msgspec.ValidationError) as error:
            raise argparse.ArgumentTypeError(f"must be {form}, got {text!r}") from error
        return item

    return convert


def _wanted(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.IntType():
            return "a whole number" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.StrType():
            return "text in UTF-8"
    raise TypeError(f"a config field of type {kind} has no form as a flag")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{word} {getattr(kind, bound):g}"
        for bound, word in names.items()
        if getattr(kind, bound) is not None
    ]
    return " " + " and ".join(limits) if limits else ""


def _metavar(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return "{" + ",".join(str(value) for value in values) + "}"
        case inspect.IntType():
            return "N"
        case inspect.FloatType():
            return "X"
    return "TEXT"
