"""Memory is made ready ahead of its use, within bounds; where that fails, nothing else does."""

import errno
import subprocess
import sys

import pytest
import torch

from tokenloom.scheduler_proc.runner import prefault
from tokenloom.scheduler_proc.runner.prefault import Prefault

AHEAD = """
import psutil, torch
from tokenloom.scheduler_proc.runner import prefault
from tokenloom.scheduler_proc.runner.kv_pool import KVShape, MHATokenToKVPool

prefault.AHEAD_BYTES = 16 << 20
shape = KVShape(num_layers=2, num_kv_heads=8, head_dim=64, dtype=torch.float32)  # 8 KiB a token
rss = psutil.Process().memory_info
pool = MHATokenToKVPool(shape, num_tokens=1 << 14, page_size=16)  # 128 MiB
ahead = prefault.Prefault([*pool.k_cache, *pool.v_cache], pool.num_pages)
before = rss().rss
for page in (0, 255, 128, 1024):  # 0, 32, 16 and 128 MiB
    ahead.reach(page)
    while ahead.step():
        pass
    print((rss().rss - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there memory is made ready")
def test_it_stays_ahead_of_the_highest_page() -> None:
    """In a process of its own, whose memory nobody else moves."""
    ran = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    resident = [int(line) for line in ran.stdout.split()]
    for got, wanted in zip(resident, (16, 48, 48, 128), strict=True):
        assert wanted - 8 <= got <= wanted + 16


def test_where_the_system_refuses_it_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refuse(address: int, num_bytes: int) -> int:
        asked.append(num_bytes)
        return errno.EINVAL

    monkeypatch.setattr(prefault, "_populate", refuse)
    caplog.set_level("INFO")
    ahead = Prefault([torch.zeros(4, 1024), torch.zeros(4, 1024)], num_pages=4)
    for page in range(4):
        ahead.reach(page)
        assert not ahead.step()
    assert len(asked) == (1 if sys.platform == "linux" else 0)
    assert ("Invalid argument" in caplog.text) == (sys.platform == "linux")


def test_what_is_ready_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(
        prefault, "_populate", lambda address, num_bytes: ranges.append((address, num_bytes)) or 0
    )
    buffers = [torch.zeros(1 << 20), torch.zeros(1 << 20)]  # 4 MiB each
    monkeypatch.setattr(prefault, "AHEAD_BYTES", 0)
    ahead = Prefault(buffers, num_pages=4)
    for page in (0, 2, 1, 3, 3):
        ahead.reach(page)
        while ahead.step():
            pass
    seen = dict(ranges)
    assert len(seen) == len(ranges)
    if sys.platform == "linux":
        for buffer in buffers:
            covered = sorted(at for at in seen if 0 <= at - buffer.data_ptr() < buffer.nbytes)
            assert [at - buffer.data_ptr() for at in covered] == [0, 2 << 20]
        assert set(seen.values()) == {2 << 20}
