"""What the Triton kernels need on a device: `python -m tokenloom.bench.kernel_resources`.

Compiles every specialisation that the modules of kernels/cuda list, without a device, and reads
registers, spills and shared memory from the machine code. Exits 1 if one spills or asks for more
shared memory than a block can have. Pointers are taken to be divisible by 16, as in most launches.
"""

import argparse
import importlib
import multiprocessing
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..kernels import cuda
from ..kernels.cuda.specialisation import Specialisation

# Bytes that a block can have, by compute capability (CUDA programming guide, "Compute
# Capabilities"): of the memory of a multiprocessor 1 KiB is the system's.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
FIRST_WITH_FP8 = 89  # earlier ones cannot convert to it, or only with later releases of triton
PROCESSES = 2


@dataclass(frozen=True)
class Resources:
    kernel: str
    arch: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack: nothing but spills lies there
    shared: int  # bytes of a block

    def fault(self) -> str | None:
        if self.spilled:
            return f"{self.kernel} spills {self.spilled} bytes on sm_{self.arch}"
        if self.shared > SHARED_LIMIT[self.arch]:
            limit = SHARED_LIMIT[self.arch]
            return f"{self.kernel} needs {self.shared} of {limit} bytes shared on sm_{self.arch}"
        return None


def specialisations() -> dict[str, Specialisation]:
    """By name, in the order of modules and of their lists. Names are unique."""
    found: dict[str, Specialisation] = {}
    for module in pkgutil.iter_modules(cuda.__path__):
        home = importlib.import_module(f"{cuda.__name__}.{module.name}")
        for one in home.specialisations() if hasattr(home, "specialisations") else ():
            if one.name in found:
                raise ValueError(f"two specialisations are called {one.name}")
            found[one.name] = one
    return found


def measure(arch: int, name: str) -> Resources:
    """Compile one specialisation for sm_<arch>. Raises what the compiler raises."""
    wanted = specialisations()[name]
    types = [wanted.signature[argument] for argument in wanted.kernel.arg_names]
    source = ASTSource(
        fn=wanted.kernel,
        signature={
            argument: type_.removesuffix(":16")
            for argument, type_ in zip(wanted.kernel.arg_names, types, strict=True)
        },
        constexprs=wanted.constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, type_ in enumerate(types)
            if type_.startswith("*") or type_.endswith(":16")
        },
    )
    options = {"num_warps": wanted.num_warps, "num_stages": wanted.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    # All shared memory is asked for at the launch; what cuobjdump counts is the system's 1 KiB.
    return Resources(name, arch, *_usage(compiled.asm["cubin"]), compiled.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, as cuobjdump of Triton's own wheel reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers:\n{said}")
    return int(found[1]), int(found[2])


def measure_all(archs: list[int]) -> list[Resources]:
    work = [
        (arch, name)
        for name, one in specialisations().items()
        for arch in archs
        if arch >= FIRST_WITH_FP8 or not any("fp8" in type_ for type_ in one.signature.values())
    ]
    # A forked child has the kernels already; what it is told and answers is plain data.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(measure, *zip(*work, strict=True)))


def table(measured: list[Resources]) -> str:
    """A row a kernel; where architectures differ, their numbers in the order of the heading."""
    by_kernel: dict[str, dict[int, Resources]] = {}
    for one in measured:
        by_kernel.setdefault(one.kernel, {})[one.arch] = one
    archs = list(dict.fromkeys(one.arch for one in measured))
    heading = f"kernel, on {' / '.join(f'sm_{arch}' for arch in archs)}"
    rows = [(heading, "registers", "spilled bytes", "shared KiB"), ("---",) * 4]
    for kernel, by_arch in by_kernel.items():
        ones = [by_arch.get(arch) for arch in archs]
        registers = _cell(str(one.registers) if one else "-" for one in ones)
        spilled = _cell(str(one.spilled) if one else "-" for one in ones)
        shared = _cell(f"{one.shared / 1024:.1f}" if one else "-" for one in ones)
        rows.append((kernel, registers, spilled, shared))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cell(numbers: Iterable[str]) -> str:
    shown = list(numbers)
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def written_into(page: str, new_table: str) -> str:
    """The page with its table, which begins with our heading, exchanged."""
    changed, count = re.subn(r"^\| kernel, on .*\n(\|.*\n)*", new_table, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"the page has {count} tables of kernels, not 1")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenloom.bench.kernel_resources")
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_LIMIT, default=[80, 90])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="exchange the table in PAGE")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    measured = measure_all(options.arch)
    text = table(measured)
    print(text, end="")
    if options.write:
        options.write.write_text(written_into(options.write.read_text(), text))
    faults = [fault for one in measured if (fault := one.fault())]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
