"""Adapter routes as a way to other files: nothing outside the root is read, nothing odd loaded."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from attack.witness import unharmed
from support.server import Server
from support.source_tree import ROOT

pytestmark = pytest.mark.attack

SECRET = "the-word-nobody-may-read"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
GOOD = ROOT / "examples" / "adapters" / "json"


def load(server: Server, path: str) -> httpx.Response:
    body = {"lora_name": "x", "lora_path": path}
    return httpx.post(f"{server.url}/load_lora_adapter", json=body, timeout=60)


def assert_refused(server: Server, path: str) -> None:
    answer = load(server, path)
    assert answer.status_code in (400, 404, 413), (path, answer.text)
    assert answer.json()["error"]["message"]
    assert SECRET not in answer.text
    assert len(answer.text) < 5000


@pytest.fixture(scope="module")
def secret(adapters: Path) -> Path:
    """A folder outside the root with a file that would show in an error about it."""
    folder = adapters.parent / "secret"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({SECRET: SECRET}))
    return folder


def test_paths_out_of_the_root(server: Server, adapters: Path, secret: Path) -> None:
    sibling = Path(f"{adapters}-beside")
    shutil.copytree(GOOD, sibling)
    (adapters / "link").symlink_to(secret)
    paths = ["/etc", "/etc/passwd", "/proc/self", "/proc/1/fd", "/dev/zero", "/dev/shm", "~/x", "."]
    paths += [
        "..",
        "",
        "../secret",
        f"{adapters}/../secret",
        str(secret),
        f"/{secret}",
        str(sibling),
    ]
    paths += [f"/proc/self/root{secret}", f"file://{secret}", "http://127.0.0.1:9/x", "a/b/c"]
    paths += ["%2e%2e/secret", "..\\secret", f"{secret}\n", "x\0y", "a" * 1024, "a" * 1025, "link"]
    with unharmed(server):
        for path in paths:
            assert_refused(server, path)


def link_config(folder: Path, secret: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(secret / CONFIG)


def weights_from(target: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(target)

    return change


def pipe(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def sparse(name: str, size: int) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        (folder / name).unlink()
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


def with_config(**fields: object) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        config = json.loads((GOOD / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return change


def with_bytes(name: str, content: bytes) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def header(value: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, which may lie about its length."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], offsets: tuple[int, int], dtype: str = "F32") -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a length of 2**63": struct.pack("<Q", 1 << 63),
    "longer than the file": header(b"{}", length=1000),
    "no JSON": header(b"{{{{"),
    "a list": header([]),
    "nested": header(b'{"a":' * 50_000),
    "14,000 empty tensors": header(
        {f"k{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(14_000)}
    ),
    "beyond the end": header(tensor([4], (0, 1 << 40)), bytes(16)),
    "backwards": header(tensor([4], (16, 0)), bytes(16)),
    "a shape that overflows": header(tensor([1 << 62, 4], (0, 0))),
    "100,000 dimensions": header(tensor([1] * 100_000, (0, 4)), bytes(4)),
    "a negative shape": header(tensor([-1], (0, 0))),
    "an unknown type": header(tensor([1], (0, 4), "F4"), bytes(4)),
    "complex numbers": header(tensor([1], (0, 8), "C64"), bytes(8)),
    "metadata of numbers": header({"__metadata__": {"a": 1}}),
    "half of a good file": (GOOD / WEIGHTS).read_bytes()[:100_000],
    "a not-a-number": (GOOD / WEIGHTS).read_bytes()[:-4] + b"\xff" * 4,
}
CONFIGS: dict[str, dict[str, object]] = {
    "rank 0": {"r": 0},
    "rank 2**62": {"r": 1 << 62},
    "alpha as text": {"lora_alpha": "nan"},
    "an infinite scale": {"lora_alpha": 1e308},
    "no modules": {"target_modules": []},
    "a bias": {"bias": "all"},
    "another method": {"use_dora": True},
    "layer 2**63": {"layers_to_transform": 1 << 63},
    "a pattern that takes ages": {"target_modules": "(a+)+$|.*(.*)*(.*)*x"},
    "a pattern that takes memory": {"target_modules": "((((a{99}){99}){99}){99})*q"},
    "a pattern of brackets": {"target_modules": "(" * 60_000 + "a" + ")" * 60_000},
    "a broken pattern": {"target_modules": "(((("},
    "6,000 patterns": {"rank_pattern": {f"(?:.*.*.*.*)nothing{n}": 8 for n in range(6000)}},
}
CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "config linked to a secret": link_config,
    "weights linked to /dev/zero": weights_from("/dev/zero"),
    "weights linked to memory": weights_from("/proc/self/mem"),
    "weights linked to themselves": weights_from(WEIGHTS),
    "config is a pipe": pipe(CONFIG),
    "weights are a pipe": pipe(WEIGHTS),
    "a terabyte of weights": sparse(WEIGHTS, 1 << 40),
    "zeros for weights": sparse(WEIGHTS, 60 << 20),
    "eight gigabytes of config": sparse(CONFIG, 1 << 33),
    "a nested config": with_bytes(CONFIG, b'{"a":' * 40_000 + b"1" + b"}" * 40_000),
    "a config with a NaN": with_bytes(CONFIG, b'{"peft_type":"LORA","lora_alpha":NaN}'),
    "a config that is no text": with_bytes(CONFIG, b'\xff\xfe{"peft_type":"LORA"}'),
    **{f"header: {name}": with_bytes(WEIGHTS, content) for name, content in HEADERS.items()},
    **{f"config: {name}": with_config(**fields) for name, fields in CONFIGS.items()},
}


@pytest.fixture
def folder(adapters: Path) -> Iterator[Path]:
    path = adapters / "odd"
    shutil.copytree(GOOD, path)
    yield path
    shutil.rmtree(path)


def test_odd_files(server: Server, adapters: Path, secret: Path) -> None:
    with unharmed(server) as witness:
        for number, change in enumerate(CHANGES.values()):
            folder = adapters / f"odd{number}"
            shutil.copytree(GOOD, folder)
            change(folder, secret)
            assert_refused(server, folder.name)
        witness.gets_on()


def test_a_pickle_is_never_run(server: Server, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pickled = f"cos\nsystem\n(S'touch {trace}'\ntR.".encode()
    (folder / WEIGHTS).write_bytes(pickled)
    assert_refused(server, folder.name)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert_refused(server, folder.name)
    assert not trace.exists()


def test_the_good_one_loads(server: Server, folder: Path) -> None:
    """What the others were made from: none was refused for anything but its own oddity."""
    assert load(server, folder.name).status_code == 200
    said = server.post("/generate", text="hi", lora_path="x", sampling_params={"max_new_tokens": 2})
    assert said["output_ids"]
    server.post("/unload_lora_adapter", lora_name="x")
