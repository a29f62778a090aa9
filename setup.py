"""Builds the native CPU library beside kernels/cpu; everything else is in pyproject.toml.

The extension is optional: without a C++ compiler the package installs and runs its torch path.
Instruction sets are chosen at run time, so a wheel runs on any machine of its architecture.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tokenloom.kernels.cpu._native",
            sources=sorted(glob("kernels/cpu/src/*.cpp")),
            depends=sorted(glob("kernels/cpu/src/*.h") + glob("kernels/cpu/src/*.inl")),
            language="c++",
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
