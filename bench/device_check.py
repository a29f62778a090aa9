"""`python bench/device_check.py [--wheels DIR] [--json FILE]`: the one script for a GPU.

Needs no installation of tokenloom, no network and no model: it puts this checkout and, where
something that it imports is missing, the wheels of DIR where Python finds them, and runs
bench/device/check.py with the other flags. Nothing but the standard library may be imported here.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name to import -> name to install; torch and triton are the image's own
NEEDED = {
    "anyio": "anyio",
    "click": "click",
    "gguf": "gguf",
    "h11": "h11",
    "httptools": "httptools",
    "huggingface_hub": "huggingface_hub",
    "idna": "idna",
    "jinja2": "jinja2",
    "markupsafe": "markupsafe",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "orjson": "orjson",
    "psutil": "psutil",
    "safetensors": "safetensors",
    "setproctitle": "setproctitle",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
    "typing_extensions": "typing_extensions",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
DISTRIBUTION = "Metadata-Version: 2.1\nName: tokenloom\nVersion: 0+checkout\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels", type=Path)
    options, rest = parser.parse_known_args(argv)
    if absent := [name for name in ("torch", "triton") if not is_there(name)]:
        print(f"not here: {', '.join(absent)}; use an image that has them", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        site = Path(folder)
        if problem := complete(site, options.wheels):
            print(problem, file=sys.stderr)
            return 2
        lay_out(site)
        places = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        command = [sys.executable, "-P", "-m", "tokenloom.bench.device.check", *rest]
        return subprocess.run(command, env=environment).returncode


def is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def missing() -> list[str]:
    return [package for name, package in NEEDED.items() if not is_there(name)]


def complete(site: Path, wheels: Path | None) -> str:
    """Install missing packages into `site`; return why that failed, or ""."""
    absent = missing()
    if not absent:
        return ""
    if wheels is None:
        names = " ".join(absent)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"not here: {names}\nWhere there is a network:\n"
            f"  pip download --only-binary=:all: --python-version {version} -d wheels {names}\n"
            "then bring that folder along: --wheels wheels"
        )
    return install(site, wheels, absent)


def install(site: Path, wheels: Path, packages: Sequence[str]) -> str:
    """Install with pip from the folder alone; keep dependencies that the image has."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile"),
        *("--find-links", str(wheels), "--target", str(site), "--no-deps", *packages),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{wheels} does not have all of {' '.join(packages)}:\n{done.stderr.strip()}"
    return ""


def lay_out(site: Path) -> None:
    """Link this checkout under its package name, ahead of any installed one."""
    (site / "tokenloom").symlink_to(ROOT, target_is_directory=True)
    facts = site / "tokenloom-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(DISTRIBUTION)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
