"""Every Triton kernel compiles for both architectures without spills, and stands in the docs.

Kernels that are marked as pipelined must copy later tiles while they compute.

The compiling runs in a process of its own: in this one kernels are interpreted.
"""

import os
import re
import subprocess
import sys

import pytest
from support.source_tree import ROOT

from tokenloom.bench import kernel_resources
from tokenloom.bench.kernel_resources import Resources, specialisations, table, written_into

PAGE = ROOT / "docs" / "kernels.md"


def kernels_in(text: str) -> list[str]:
    """First cells of the table that the command prints."""
    found = re.search(r"^\| kernel, on .*\n\| --- .*\n((?:\| .*\n)*)", text, re.MULTILINE)
    assert found is not None
    return [line.split(" | ")[0].removeprefix("| ") for line in found[1].splitlines()]


@pytest.mark.slow
def test_all_compile_without_spills_and_are_documented() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tokenloom.bench.kernel_resources"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    measured = kernels_in(ended.stdout)
    assert measured == list(specialisations())
    assert kernels_in(PAGE.read_text()) == measured, "make the table anew: docs/kernels.md"


GOOD = Resources("k", 80, 255, 0, 163 << 10)


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (GOOD, None),
        (Resources("k", 80, 32, 8, 0), "k spills 8 bytes on sm_80"),
        (Resources("k", 80, 32, 0, (163 << 10) + 1), "k needs 166913 of 166912 bytes shared"),
        (Resources("k", 90, 32, 0, 227 << 10), None),
        (Resources("k", 90, 32, 0, (227 << 10) + 1), "on sm_90"),
        (Resources("k", 90, 32, 0, 0, buffers=2, in_flight=2, pipelined=True), None),
        (Resources("k", 90, 32, 0, 0, buffers=1, in_flight=0), None),
        (
            Resources("k", 90, 32, 0, 0, buffers=1, in_flight=1, pipelined=True),
            "k is not pipelined on sm_90: 1 buffers, 1 copies in flight",
        ),
        (
            Resources("k", 90, 32, 0, 0, buffers=2, in_flight=0, pipelined=True),
            "k is not pipelined on sm_90: 2 buffers, 0 copies in flight",
        ),
    ],
)
def test_a_fault_is_the_exit_status(
    one: Resources,
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernel_resources, "measure_all", lambda archs: [GOOD, one])
    monkeypatch.setattr(kernel_resources.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(sys, "argv", ["kernel_resources"])
    assert kernel_resources.main() == (fault is not None)
    assert (fault or "") in capsys.readouterr().err


def test_the_table_of_a_page_is_exchanged() -> None:
    old, new = table([GOOD]), table([GOOD, Resources("k", 90, 40, 0, 163 << 10)])
    assert "| k | 255 / 40 | 0 | 163.0 | 1 | 0 | 0 |" in new
    assert written_into(f"above\n\n{old}\nbelow\n", new) == f"above\n\n{new}\nbelow\n"
    with pytest.raises(ValueError, match="2 tables"):
        written_into(f"{old}\n{old}", new)


@pytest.mark.parametrize(
    ("one", "blocks"),
    [
        (Resources("k", 80, 32, 0, 0), 16),  # 64 warps
        (Resources("k", 80, 16, 0, 0, num_warps=1), 32),
        (Resources("k", 80, 162, 0, 0), 3),  # 168 registers of a thread are taken
        (Resources("k", 80, 40, 0, 70 << 10), 2),
        (Resources("k", 90, 40, 0, 70 << 10), 3),
    ],
)
def test_how_many_blocks_share_a_multiprocessor(one: Resources, blocks: int) -> None:
    assert one.blocks == blocks


LOOPS = """
  scf.for %split = %first to %last step %1 : i32 {
    %k = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable>
    %v = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable>
    %q = ttg.local_alloc %query : (tensor<16x64xbf16>) -> !ttg.memdesc<16x64xbf16, #shared>
    %acc:2 = scf.for %start = %begin to %end step %64 iter_args(%a = %b) -> (i32) : i32 {
      %t = ttg.async_wait %x, %y {num = 2 : i32}
      scf.yield %a : i32
    }
    %done = ttg.async_wait {num = 0 : i32}
    %d = tt.load %p
  }
"""


def test_pipelining_is_read_from_the_innermost_loops() -> None:
    assert kernel_resources.pipelining(LOOPS) == (2, 2)
    waits_at_once = LOOPS.replace("num = 2", "num = 0")
    assert kernel_resources.pipelining(LOOPS + waits_at_once) == (2, 0)
    assert kernel_resources.pipelining("tt.func { tt.return }") == (0, 0)
