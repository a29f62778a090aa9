"""Who may import whom: the arrows of the tree, the PURE modules, and what no module may do.

Every module is parsed, nothing is imported. Imports inside functions count like all others.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.source_tree import ROOT, source_files

# layer -> layers that it may import; a module belongs to the longest name that fits it.
ARROWS: dict[str, set[str]] = {
    "wire": set(),
    "model_files": set(),
    "kernels": set(),
    "client": {"wire"},
    "bench": {"wire", "client", "model_files"},
    "bench.body_cost": {"wire", "tokenizer_proc", "tokenizer_proc.doors"},
    "bench.core_ops": {"wire", "scheduler_proc.core", "scheduler_proc.worker_batch"},
    # These run models or the scheduler themselves; the rest of bench sees servers from outside.
    "bench.quality": {
        "bench",
        "model_files",
        "scheduler_proc.worker_batch",
        "scheduler_proc.models",
        "kernels",
    },
    "bench.roofline": {
        "bench",
        "model_files",
        "scheduler_proc.worker_batch",
        "scheduler_proc.models",
        "kernels",
    },
    "bench.load_memory": {"scheduler_proc.models", "kernels"},
    "bench.simulation": {"wire", "bench", "scheduler_proc.core", "scheduler_proc.worker_batch"},
    # What decisions cost: it drives the scheduler core alone.
    "bench.random_adapters": set(),
    "bench.lora_churn": {"client", "bench.random_adapters"},
    "bench.lora": {"client", "model_files", "bench", "bench.random_adapters"},
    "bench.kernel_resources": {"kernels"},
    # The one that runs everything that a GPU runs; its starter imports nothing.
    "bench.device": {
        "wire",
        "bench",
        "scheduler_proc",
        "scheduler_proc.core",
        "scheduler_proc.models",
        "scheduler_proc.runner",
        "scheduler_proc.worker_batch",
        "model_files",
        "kernels",
    },
    "bench.device_check": set(),
    "bench.queue": {"wire", "scheduler_proc.core", "scheduler_proc.worker_batch"},
    "bench.policy_workloads": {"bench.simulation"},
    "bench.policies": {
        "wire",
        "bench",
        "bench.policy_workloads",
        "bench.simulation",
        "scheduler_proc.core",
    },
    "tokenizer_proc": {"wire", "model_files"},
    # The doors import the front; the front knows no door. The server builds both.
    "tokenizer_proc.doors": {"wire", "tokenizer_proc"},
    "tokenizer_proc.server": {"wire", "model_files", "tokenizer_proc", "tokenizer_proc.doors"},
    "tokenizer_proc.__main__": {"wire", "tokenizer_proc.server"},
    "detokenizer_proc": {"wire", "model_files"},
    "scheduler_proc": {
        "wire",
        "model_files",
        "scheduler_proc.core",
        "scheduler_proc.runner",
        "scheduler_proc.worker_batch",
        "child_process",  # of the ranks beside it
    },
    "scheduler_proc.worker_batch": {"wire"},
    "scheduler_proc.core": {"wire", "scheduler_proc.worker_batch"},
    "scheduler_proc.runner": {
        "wire",
        "model_files",
        "scheduler_proc.worker_batch",
        "scheduler_proc.models",
        "kernels",
    },
    "scheduler_proc.models": {"wire", "model_files", "scheduler_proc.worker_batch", "kernels"},
    "launch": {"child_process", "run_dir", "flags", "wire", "model_files"},
    "child_process": set(),
    "run_dir": {"wire"},
    "flags": {"wire"},
    "cli": {"launch", "client", "bench"},
    "__main__": {"cli"},
    "__init__": set(),
}

# third-party package -> layers that may import it; what is not here needs a reason first.
EXTERNAL: dict[str, set[str]] = {
    "msgspec": set(ARROWS),
    "zmq": {
        "wire",
        "launch",
        "client",
        "tokenizer_proc.server",
        "detokenizer_proc",
        "scheduler_proc",
    },
    "setproctitle": {"wire"},
    "torch": {
        "bench.random_adapters",
        "scheduler_proc.runner",
        "scheduler_proc.models",
        "kernels",
        "bench.device",
        "bench.quality",
        "bench.roofline",
        "bench.load_memory",
    },
    "triton": {"kernels", "bench.device", "bench.kernel_resources"},
    "transformers": {"bench.device"},
    "flashinfer": {"bench.device"},
    "numpy": {
        "model_files",
        "scheduler_proc.runner",
        "scheduler_proc.models",
        "kernels",
        "bench",
        "bench.load_memory",
    },
    "safetensors": {
        "bench.random_adapters",
        "bench.load_memory",
        "model_files",
        "scheduler_proc.runner",
        "scheduler_proc.models",
    },
    "gguf": {
        "model_files",
        "scheduler_proc.runner",
        "scheduler_proc.models",
        "bench",
        "bench.load_memory",
    },
    "tqdm": {"scheduler_proc.runner", "scheduler_proc.models", "bench", "bench.quality"},
    "psutil": {"scheduler_proc", "scheduler_proc.runner", "bench", "bench.device"},
    "huggingface_hub": {"model_files"},
    "tokenizers": {
        "model_files",
        "tokenizer_proc",
        "detokenizer_proc",
        "bench",
        "bench.device",
    },
    "httptools": {"bench", "tokenizer_proc.doors"},
    "jinja2": {"model_files"},
    "orjson": {"tokenizer_proc", "model_files", "scheduler_proc.models"},
    "starlette": {"tokenizer_proc.doors"},
    "uvicorn": {"tokenizer_proc.doors", "tokenizer_proc.server"},
    "uvloop": {"tokenizer_proc.server", "detokenizer_proc", "client", "bench", "bench.lora"},
}

MUST_BE_PURE = (
    "wire.messages",
    "wire.client_messages",
    "wire.sampling",
    "wire.config",
    "wire.lora_config",
    "scheduler_proc.core.",
)
IMPURE_STDLIB = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "random", "secrets", "select", "shutil", "signal", "socket", "subprocess", "tempfile",
    "threading", "time", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_NAMES = {
    "eval", "exec", "TYPE_CHECKING", "recv_pyobj", "send_pyobj", "allow_pickle", "_pickle",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    module: str  # with `tokenloom.` taken off for our own
    ours: bool
    relative: bool


@cache
def modules() -> dict[str, Path]:
    """All modules of the distribution by dotted name; a package goes by its own name."""
    found = {}
    for path in source_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"] = path
    return found


def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def layer(module: str) -> str:
    fitting = [name for name in ARROWS if module == name or module.startswith(f"{name}.")]
    assert fitting, f"{module} belongs to no layer of ARROWS"
    return max(fitting, key=len)


def imports(source: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """What `module` imports, relative names made whole."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(alias.name, relative=False)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield from _from("", node.module, node.names)
        elif isinstance(node, ast.ImportFrom):
            drop = node.level - is_package
            parts = module.split(".")
            base = [] if module == "__init__" else parts[: len(parts) - drop]
            yield from _from(".".join(["tokenloom", *base]), node.module or "", node.names)


def _from(base: str, module: str, names: list[ast.alias]) -> Iterator[Import]:
    whole = ".".join(part for part in (base, module) if part)
    for alias in names:
        # `from ..wire import codec` means the module, `from ..wire.codec import encode` its name
        inner = f"{whole}.{alias.name}"
        known = inner.removeprefix("tokenloom.") in modules()
        yield _import(inner if known else whole, relative=bool(base))


def _import(name: str, relative: bool) -> Import:
    ours = name == "tokenloom" or name.startswith("tokenloom.")
    inner = name.removeprefix("tokenloom").removeprefix(".") if ours else name
    return Import(inner or "__init__", ours, relative)


def imports_of(module: str) -> list[Import]:
    return list(imports(tree(module), module, modules()[module].name == "__init__.py"))


def is_pure(module: str) -> bool:
    return "PURE" in (ast.get_docstring(tree(module)) or "")


MODULES = sorted(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module: str) -> None:
    here = layer(module)
    for found in imports_of(module):
        if found.ours:
            target = layer(found.module)
            assert target == here or target in ARROWS[here], f"{module} imports {found.module}"


@pytest.mark.parametrize("module", MODULES)
def test_third_party_packages_stay_where_they_belong(module: str) -> None:
    for found in imports_of(module):
        top = found.module.partition(".")[0]
        if found.ours or top in sys.stdlib_module_names:
            continue
        assert top in EXTERNAL, f"{module} imports {top}, which no layer may"
        assert layer(module) in EXTERNAL[top], f"{module} imports {top}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_inside_the_tree_are_relative(module: str) -> None:
    # Files at the root run as scripts too (`python launch.py`), where nothing is relative.
    if "." in module or modules()[module].name == "__init__.py":
        absolute = [found.module for found in imports_of(module) if found.ours != found.relative]
        assert not absolute, f"{module} imports {absolute} by absolute names"


def test_no_cycles() -> None:
    graph = {
        module: {found.module for found in imports_of(module) if found.ours} - {module}
        for module in MODULES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(MUST_BE_PURE)])
def test_contract_and_core_say_that_they_are_pure(module: str) -> None:
    assert is_pure(module)


@pytest.mark.parametrize("module", [m for m in MODULES if is_pure(m)])
def test_pure_modules_are_pure(module: str) -> None:
    for found in imports_of(module):
        top = found.module.partition(".")[0]
        if found.ours:
            assert is_pure(found.module), f"{module} is PURE and imports {found.module}"
        else:
            assert top == "msgspec" or top in sys.stdlib_module_names, f"{module}: {top}"
            assert top not in IMPURE_STDLIB, f"{module} is PURE and imports {top}"
    calls = {
        node.func.id
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & IMPURE_CALLS


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_runs_data_or_hides_an_import(module: str) -> None:
    for found in imports_of(module):
        assert found.module.partition(".")[0] not in FORBIDDEN_MODULES
    assert not names_in(tree(module)) & FORBIDDEN_NAMES


def names_in(source: ast.Module) -> set[str]:
    """Bare names, attributes of torch and numpy aside from methods, keywords, imported names."""
    names: set[str] = set()
    for node in ast.walk(source):
        match node:
            case ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                names.add(name)
            case ast.Attribute(attr=("TYPE_CHECKING" | "recv_pyobj" | "send_pyobj") as name):
                names.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                names.add("_pickle")
    return names


def toy(code: str, module: str = "scheduler_proc.core.toy") -> list[Import]:
    return list(imports(ast.parse(code), module, is_package=False))


def test_the_parser_of_imports_itself() -> None:
    assert toy("from ...wire import codec") == [Import("wire.codec", True, True)]
    assert toy("from ...wire.codec import encode as e") == [Import("wire.codec", True, True)]
    assert toy("from .req import Req") == [Import("scheduler_proc.core.req", True, True)]
    assert toy("def f():\n    import torch.nn") == [Import("torch.nn", False, False)]
    assert toy("import tokenloom.wire.codec") == [Import("wire.codec", True, False)]
    assert toy("from tokenloom import launch") == [Import("launch", True, False)]
    assert toy("from .cli import main", "__main__") == [Import("cli", True, True)]


def test_the_finder_of_names_itself() -> None:
    code = "import torch\ntorch.load(f)\nx.eval()\nnumpy.load(f, allow_pickle=True)"
    assert names_in(ast.parse(code)) & FORBIDDEN_NAMES == {"_pickle", "allow_pickle"}
    assert names_in(ast.parse("eval('1')")) & FORBIDDEN_NAMES == {"eval"}
    hidden = "import typing\nif typing.TYPE_CHECKING: pass"
    assert names_in(ast.parse(hidden)) & FORBIDDEN_NAMES == {"TYPE_CHECKING"}
