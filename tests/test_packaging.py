"""What a wheel of this tree holds, and that the pins and the requirements fit together."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.source_tree import ROOT, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def canonical(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def test_package_list_is_the_tree() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    folders = {path.parent.relative_to(ROOT).parts for path in source_files()}
    assert set(listed) == {".".join(("tokenloom", *parts)) for parts in folders}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in source_files()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.slow
def test_wheel_installs_nothing_outside_the_package(tmp_path: Path) -> None:
    # A copy, so that no build folder appears in the checkout.
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines():
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    for source in (tree / "kernels/cpu/src").glob("*.cpp"):
        source.write_text("")  # what is in a wheel does not depend on it, and it compiles at once
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", str(tmp_path), str(tree)),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"tokenloom", "tokenloom-0.1.0.dist-info"}
    assert {"tokenloom/py.typed", "tokenloom/launch.py", "tokenloom/wire/messages.py"} <= names
    assert {"tokenloom/bench/data/quality.txt", "tokenloom/bench/data/README.md"} <= names
    assert not [name for name in names if name.startswith(("tokenloom/tests", "tokenloom/docs"))]
    # The native library is there and is the one thing that is neither Python nor data.
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {name for name in names if name.endswith((".so", ".o", ".cpp", ".h", ".inl"))}
    assert compiled == {f"tokenloom/kernels/cpu/_native{suffix}"}


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pins = {
        canonical(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
        *(requirement for extra in extras.values() for requirement in extra),
    ]
    assert {canonical(requirement) for requirement in wanted} <= pins


def test_constraints_pin_all_they_name() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.+]+", line), line


def build_native(tmp_path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`setup.py build_ext` over a tree whose one C++ file is small."""
    sources = tmp_path / "kernels/cpu/src"
    sources.mkdir(parents=True)
    (sources / "api.cpp").write_text("int api() { return 1; }\n")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "built"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_compiler_that_fails_ends_the_installation_with_its_words(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler.chmod(0o755)
    failed = build_native(tmp_path, CXX=str(compiler), CC=str(compiler))
    assert failed.returncode != 0
    assert "compiling the native CPU library, about" in failed.stderr
    assert "no such target" in failed.stderr
    assert "TOKENLOOM_NATIVE=0" in failed.stderr


def test_no_library_is_built_where_none_is_wanted(tmp_path: Path) -> None:
    done = build_native(tmp_path, CXX="/no/compiler", CC="/no/compiler", TOKENLOOM_NATIVE="0")
    assert (done.returncode, done.stderr) == (0, "")
