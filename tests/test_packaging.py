"""What a wheel of this tree holds, and that the pins and the requirements fit together."""

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
