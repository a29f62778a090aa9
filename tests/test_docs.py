"""The documentation against the code: flags, routes, fields, limits, commands, links and paths.

Only what a page states outright is compared; prose is for readers to judge.
"""

import argparse
import importlib
import os
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args

import msgspec
import pytest
from support.source_tree import ROOT

from tokenloom.cli import USAGE
from tokenloom.flags import build_parser
from tokenloom.tokenizer_proc import limits
from tokenloom.tokenizer_proc.doors import (
    http,
    lora_routes,
    native,
    openai_requests,
    openai_wire,
    refused_fields,
    router,
)
from tokenloom.wire import client_messages, sampling
from tokenloom.wire import limits as wire_limits

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in (
            "api",
            "architecture",
            "flags",
            "kernels",
            "limits",
            "lora",
            "reliability",
            "scheduling",
            "testing",
        )
    ),
]
ROUTE = re.compile(r"\b(GET|POST|PUT|DELETE) (/[\w/{}]*)")
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "Mi": 1 << 20, "ms": 0.001}


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> set[str]:
    """What stands in backticks outside code blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)))


def rows(text: str) -> list[list[str]]:
    """The cells of every table line."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def serve_flags() -> dict[str, argparse.Action]:
    actions = build_parser("tokenloom serve")._actions
    return {name: one for one in actions for name in one.option_strings if one.dest != "help"}


def test_every_flag_is_described_and_no_other() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", page("docs/flags.md"))) == set(serve_flags())


def test_a_flag_stands_with_its_other_spellings_and_its_default() -> None:
    flags = serve_flags()
    described = [cells for cells in rows(page("docs/flags.md")) if cells[0].startswith("`--")]
    for names, _, default, _ in described:
        spelt = re.findall(r"`(--[a-z-]+)`", names)
        action = flags[spelt[0]]
        assert spelt == list(action.option_strings)
        stated = re.search(r"\(default: (.*)\)$", action.help or "")
        assert stated is None or stated[1] == default.strip("`"), spelt[0]
    assert len(described) == len({action.dest for action in flags.values()})


def test_every_route_is_described_and_no_other() -> None:
    served = {
        (method, path.replace(":path", ""))
        for path, methods, _ in http._ROUTES
        for method in methods
        if method != "HEAD"
    }
    headings = "\n".join(line for line in page("docs/api.md").splitlines() if line[:3] == "## ")
    assert set(ROUTE.findall(headings)) == served


def test_every_field_of_a_request_is_named() -> None:
    taken: set[str] = set()
    for struct in (
        openai_wire.ChatRequest,
        openai_wire.CompletionRequest,
        openai_wire.StreamOptions,
        openai_wire.Message,
        native.GenerateRequest,
        native.NativeSampling,
        lora_routes.LoadRequest,
        sampling.SamplingParams,
    ):
        taken.update(struct.__struct_fields__)
    for reader in (
        openai_requests.chat_reader,
        openai_requests.completion_reader,
        native.generate_reader,
        native.sampling_reader,
        lora_routes.load_reader,
    ):
        taken.update(reader.refused)
    text = page("docs/api.md")
    assert not [name for name in sorted(taken) if not re.search(rf"\b{name}\b", text)]


def test_every_message_of_the_socket_is_described() -> None:
    described = {cells[0]: cells[1] for cells in rows(page("docs/api.md")) if len(cells) == 2}
    for struct in (
        *get_args(client_messages.FromClient),
        *get_args(client_messages.ToClient),
    ):
        fields = described[f"`{struct.__struct_config__.tag}`"]
        assert set(struct.__struct_fields__) <= spans(fields), struct


def described_refusals() -> list[str]:
    section = page("docs/api.md").partition("## Fields that are refused\n")[2].partition("\n## ")[0]
    return re.findall(r"`(\w+)`", section.split("\n\n")[1])


def test_refused_fields_stand_in_the_order_in_which_they_are_named() -> None:
    (*described, last) = described_refusals()
    assert described == list(refused_fields.UNSUPPORTED)
    assert [last] == list(refused_fields.CHAT_NEUTRAL)


def stated_limits() -> dict[str, float]:
    """Values by name; in front of the name stands the module where it is not `limits`."""
    stated = {}
    for cells in rows(page("docs/limits.md")):
        if len(cells) == 4 and (found := re.match(r"`([A-Z_]+)`(?: \(`(.+)\.py`\))?", cells[2])):
            name, path = found.groups()
            number, _, unit = cells[1].partition(" ")
            home = f"tokenloom.{path.replace('/', '.')}." if path else ""
            stated[home + name] = float(number) * UNITS[unit]
    return stated


def test_the_limits_have_the_values_that_the_page_states() -> None:
    for name, value in stated_limits().items():
        module, _, own = name.rpartition(".")
        assert getattr(importlib.import_module(module) if module else limits, own) == value, name


@pytest.mark.parametrize("home", [wire_limits, limits, router])
def test_every_limit_is_stated(home: ModuleType) -> None:
    here = "" if home in (limits, wire_limits) else f"{home.__name__}."
    numbers = {
        here + n
        for n, v in vars(home).items()
        if re.match("[A-Z]", n) and isinstance(v, int | float)
    }
    assert numbers <= set(stated_limits())


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page(name)):
        if "://" not in target:
            path, _, heading = target.partition("#")
            assert ((ROOT / name).parent / path).exists(), target
            assert not heading, "headings move: link the page"


@cache
def places() -> str:
    """All files and folders of the checkout, a line each; folders with a leading dot left out."""
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name).relative_to(ROOT) for name in (*subfolders, *names)]
    return "".join(f"/{path}\n" for path in found)


@pytest.mark.parametrize("name", PAGES)
def test_paths_exist(name: str) -> None:
    """A path may be given from any package down: `core/req.py`."""
    named = {
        span.rstrip("/")
        for span in spans(page(name))
        if re.fullmatch(r"[\w/]*\w\.(py|cpp|h)|\w+(/\w+)*/|\w+(/\w+)+", span)
    }
    assert not [path for path in named if f"/{path}\n" not in places()]


def test_tests_exist() -> None:
    """Those that the page about testing names."""
    named = {span for span in spans(page("docs/testing.md")) if span.startswith("test_")}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert not [name for name in named if "." not in name and f"def {name}(" not in sources]


def commands(text: str) -> list[list[str]]:
    """The words of each command in shell blocks and in backticks."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    lines += [span for span in spans(text) if re.match(r"(make|\S*tokenloom) \w", span)]
    return [
        words
        for line in lines
        if re.match(r"(make|\S*tokenloom)( |$)", line)
        and (words := shlex.split(line, comments=True))
    ]


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    targets = set(re.findall(r"^(\w+):", page("Makefile"), re.MULTILINE))
    subcommands = set(re.findall(r"tokenloom (\w+)", USAGE))
    for program, what, *arguments in commands(page(name)):
        if program == "make":
            assert what in targets, what
            arguments = [w for one in arguments for w in one.removeprefix("ARGS=").split()]
            what = {"run": "serve"}.get(what, what)
        else:
            assert what in subcommands, what
        if what == "serve":
            assert {word for word in arguments if word.startswith("--")} <= set(serve_flags())


def test_the_readme_starts_with_the_two_commands() -> None:
    first = commands(page("README.md"))[:2]
    assert first == [["make", "run"], ["make", "test"]]


@pytest.mark.parametrize("name", PAGES)
def test_python_examples_compile(name: str) -> None:
    for index, block in enumerate(blocks(page(name), "python")):
        compile(block, f"{name}[{index}]", "exec")


@pytest.mark.parametrize("name", PAGES)
def test_json_examples_are_json(name: str) -> None:
    for block in blocks(page(name), "json"):
        for line in block.splitlines():
            msgspec.json.decode(line)


def test_the_finding_itself() -> None:
    shell = "```sh\nmake x  # why\n.venv/bin/tokenloom serve --port 1\n```\n"
    text = f"`a b`\n{shell}`make y`\n| 1 | `z` |\n"
    assert spans(text) == {"a b", "make y", "z"}
    assert commands(text) == [
        ["make", "x"],
        [".venv/bin/tokenloom", "serve", "--port", "1"],
        ["make", "y"],
    ]
    assert rows(text) == [["1", "`z`"]]


def test_the_tests_that_hold_mended_faults_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page("docs/reliability.md"))
    assert len(named) > 60
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
