"""Builds the native CPU library beside kernels/cpu; everything else is in pyproject.toml.

A compiler that is missing or fails ends the installation. TOKENLOOM_NATIVE=0 in the environment
installs without the library, which then runs models on a CPU about five times slower. Instruction
sets are chosen at run time, so a wheel runs on any machine of its architecture.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

WANTED = os.environ.get("TOKENLOOM_NATIVE", "1") != "0"
# The slowest files first, so that no core is left alone with one of them at the end.
SOURCES = sorted(glob("kernels/cpu/src/*.cpp"), key=os.path.getsize)
SOURCES.sort(key=lambda path: not path.endswith(("gemm_avx512.cpp", "avx2.cpp", "avxvnni.cpp")))
CPU_SECONDS = 20  # of one core, all files together
NO_LIBRARY = """\
The native CPU library of tokenloom was not built; the compiler's own words are above.
Install a C++17 compiler with OpenMP (on Debian and Ubuntu: apt install g++) and try again, or set
TOKENLOOM_NATIVE=0 to install without it: models then run on a CPU about five times slower.
"""


class ParallelBuild(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Compiles the files of the one extension at the same time, and says so before."""

    def build_extensions(self) -> None:
        cores = os.cpu_count() or 1
        compile_some = self.compiler.compile

        def compile_all(sources: list[str], **options: object) -> list[str]:
            seconds = -(-CPU_SECONDS // cores)
            _say(f"compiling the native CPU library, about {seconds} s on {cores} cores ...\n")
            with ThreadPoolExecutor(cores) as pool:
                compiled = pool.map(lambda source: compile_some([source], **options), sources)
                return [file for files in compiled for file in files]

        self.compiler.compile = compile_all
        try:
            super().build_extensions()
        except (CCompilerError, ExecError, PlatformError):
            _say(NO_LIBRARY)
            raise


def _say(words: str) -> None:
    print(words, end="", file=sys.stderr, flush=True)


NATIVE = Extension(
    "tokenloom.kernels.cpu._native",
    sources=SOURCES,
    depends=[*sorted(glob("kernels/cpu/src/*.h") + glob("kernels/cpu/src/*.inl")), "setup.py"],
    language="c++",
    extra_compile_args=[
        "-O3",
        "-g0",  # what debuggers read would take as long as the rest
        "-std=c++17",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
    extra_link_args=["-fopenmp"],
)

setup(ext_modules=[NATIVE] if WANTED else [], cmdclass={"build_ext": ParallelBuild})
