"""What the Triton kernels need on a device: `python -m tokenloom.bench.kernel_resources`.

Compiles every specialisation that the modules of kernels/cuda list, without a device, and reads
registers, spills, shared memory and how deep its loops are pipelined. Exits 1 if one spills, asks
for more shared memory than a block can have, or should be pipelined and is not. Pointers are taken
to be divisible by 16, as in most launches.
"""

import argparse
import importlib
import multiprocessing
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
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
SYSTEM_SHARED = 1 << 10  # of every block, beside what the kernel asks for
REGISTERS = 65536  # of a multiprocessor, given to warps in units of 256
MAX_WARPS, MAX_BLOCKS = 64, 32  # of a multiprocessor
FIRST_WITH_FP8 = 89  # earlier ones cannot convert to it, or only with later releases of triton
PROCESSES = 2


@dataclass(frozen=True)
class Resources:
    kernel: str
    arch: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack: nothing but spills lies there
    shared: int  # bytes of a block
    num_warps: int = 4
    buffers: int = 0  # tiles kept of each operand that a loop copies asynchronously; 0: no such
    in_flight: int = 0  # copies that may still run when an iteration begins to compute
    pipelined: bool = False  # it must keep 2 or more buffers, and copies in flight

    @property
    def blocks(self) -> int:
        """How many blocks run side by side on a multiprocessor."""
        of_a_warp = -(-self.registers * 32 // 256) * 256
        return min(
            MAX_BLOCKS,
            MAX_WARPS // self.num_warps,
            REGISTERS // (of_a_warp * self.num_warps),
            (SHARED_LIMIT[self.arch] + SYSTEM_SHARED) // (self.shared + SYSTEM_SHARED),
        )

    def fault(self) -> str | None:
        if self.spilled:
            return f"{self.kernel} spills {self.spilled} bytes on sm_{self.arch}"
        if self.shared > SHARED_LIMIT[self.arch]:
            limit = SHARED_LIMIT[self.arch]
            return f"{self.kernel} needs {self.shared} of {limit} bytes shared on sm_{self.arch}"
        if self.pipelined and (self.buffers < 2 or not self.in_flight):
            return (
                f"{self.kernel} is not pipelined on sm_{self.arch}: {self.buffers} buffers, "
                f"{self.in_flight} copies in flight"
            )
        return None


def specialisations() -> dict[str, Specialisation]:
    """Return all specialisations by unique name, in the order of modules and their lists."""
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
    registers, spilled = _usage(compiled.asm["cubin"])
    buffers, in_flight = pipelining(compiled.asm["ttgir"])
    return Resources(
        name,
        arch,
        registers,
        spilled,
        compiled.metadata.shared,
        wanted.num_warps,
        buffers,
        in_flight,
        wanted.pipelined,
    )


def pipelining(ttgir: str) -> tuple[int, int]:
    """Return the fewest buffers of an operand, and the fewest copies in flight at a loop's wait.

    Reads Triton's own intermediate text: buffers of asynchronous copies are allocated empty, with
    their number as the first dimension, and the wait in an innermost loop says how many groups of
    copies it leaves running. Both are 0 where no loop copies asynchronously.
    """
    buffers = re.findall(r"ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    waits = [
        int(left)
        for body in _innermost_loops(ttgir)
        for left in re.findall(r"ttg\.async_wait.*num = (\d+)", body)
    ]
    return min(map(int, buffers), default=0), min(waits, default=0)


def _innermost_loops(ttgir: str) -> list[str]:
    """Bodies of the loops that hold no other loop. A loop ends with a brace of its own indent."""
    found: list[str] = []
    open_loops: list[tuple[str, list[str] | None]] = []  # no body: a loop that holds others
    for line in ttgir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if "scf.for " in line:
            open_loops = [(outer, None) for outer, _ in open_loops] + [(indent, [])]
        elif open_loops and line.startswith(open_loops[-1][0] + "}"):
            _, body = open_loops.pop()
            if body is not None:
                found.append("\n".join(body))
        elif open_loops and (body := open_loops[-1][1]) is not None:
            body.append(line)
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes, as reported by cuobjdump of Triton's wheel."""
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


_COLUMNS: dict[str, Callable[[Resources], str]] = {
    "registers": lambda one: str(one.registers),
    "spilled bytes": lambda one: str(one.spilled),
    "shared KiB": lambda one: f"{one.shared / 1024:.1f}",
    "blocks": lambda one: str(one.blocks),
    "buffers": lambda one: str(one.buffers),
    "in flight": lambda one: str(one.in_flight),
}


def table(measured: list[Resources]) -> str:
    """Format one row per kernel; numbers of several architectures follow the heading's order."""
    by_kernel: dict[str, dict[int, Resources]] = {}
    for one in measured:
        by_kernel.setdefault(one.kernel, {})[one.arch] = one
    archs = list(dict.fromkeys(one.arch for one in measured))
    heading = f"kernel, on {' / '.join(f'sm_{arch}' for arch in archs)}"
    rows = [(heading, *_COLUMNS), ("---",) * (1 + len(_COLUMNS))]
    for kernel, by_arch in by_kernel.items():
        ones = [by_arch.get(arch) for arch in archs]
        cells = (_cell(show(one) if one else "-" for one in ones) for show in _COLUMNS.values())
        rows.append((kernel, *cells))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cell(numbers: Iterable[str]) -> str:
    shown = list(numbers)
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def written_into(page: str, new_table: str) -> str:
    """Replace the table that begins with our heading in `page`."""
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
