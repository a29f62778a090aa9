"""How large a file, a function and a signature may be, and what a comment may not say.

The numbers are the house's; a file that needs more is two files.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support.source_tree import ROOT, all_files, source_files

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600
P90_FUNCTION_LINES = 30
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150  # bodies under @triton.jit
MAX_ARGUMENTS = 7  # outside kernels/
FORBIDDEN_FILE_NAMES = {"utils", "util", "helpers", "misc", "common"}
BANNER = re.compile(r"[-=*~#_]{4,}")
NOTE_TO_SELF = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


@dataclass(frozen=True)
class Function:
    path: Path
    name: str
    lines: int
    arguments: int
    is_kernel: bool


def functions_in(path: Path, source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield Function(
                path,
                node.name,
                node.end_lineno - node.lineno + 1,
                len([one for one in named if one.arg not in {"self", "cls"}]),
                any("triton.jit" in ast.unparse(one) for one in node.decorator_list),
            )


@cache
def source_functions() -> list[Function]:
    return [
        function for path in source_files() for function in functions_in(path, path.read_text())
    ]


def comments_in(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def bad_comments(source: str) -> list[str]:
    return [
        comment
        for comment in comments_in(source)
        if BANNER.search(comment.removeprefix("#")) or NOTE_TO_SELF.search(comment)
    ]


FILES = all_files()
IDS = [str(path.relative_to(ROOT)) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_file(path: Path) -> None:
    source = path.read_text()
    is_test = path.relative_to(ROOT).parts[0] == "tests"
    limit = MAX_TEST_FILE_LINES if is_test else MAX_FILE_LINES
    assert source.count("\n") <= limit
    assert path.stem not in FORBIDDEN_FILE_NAMES
    assert not bad_comments(source)
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), "say what the module owns and who calls it"


def test_folders_are_at_most_two_deep() -> None:
    deep = [path for path in FILES if len(path.relative_to(ROOT).parts) > 3]
    assert not deep


def test_functions_are_short() -> None:
    lengths = sorted(one.lines for one in source_functions() if not one.is_kernel)
    assert lengths[len(lengths) * 9 // 10] <= P90_FUNCTION_LINES
    too_long = [
        one
        for one in source_functions()
        if one.lines > (MAX_KERNEL_LINES if one.is_kernel else MAX_FUNCTION_LINES)
    ]
    assert not too_long


def test_signatures_are_short() -> None:
    kernels = ROOT / "kernels"
    crowded = [
        one
        for one in source_functions()
        if one.arguments > MAX_ARGUMENTS and kernels not in one.path.parents
    ]
    assert not crowded


def test_the_measuring_itself() -> None:
    source = "class A:\n    @triton.jit\n    async def f(self, a, /, b, *, c):\n        return 1\n"
    assert list(functions_in(ROOT, source)) == [Function(ROOT, "f", 2, 3, True)]
    assert bad_comments("x = 1  # ---- state ----\n") == ["# ---- state ----"]
    assert bad_comments("# TODO later\n") == ["# TODO later"]
    assert not bad_comments("x = '# ------ TODO'  # a -> b, [num_tokens, head_dim] --x\n")
