"""The KV buffers cost nothing until they are used; the slot table follows the page arithmetic."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.scheduler_proc.runner.kv_pool import KVShape, MHATokenToKVPool, SlotTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_have_a_padding_page_and_start_as_zeros(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, dtype=dtype)
    pool = MHATokenToKVPool(shape, num_tokens=32, page_size=4)
    assert pool.num_pages == 9
    assert shape.bytes_per_token == 2 * 2 * 3 * 8 * dtype.itemsize
    buffers = pool.k_cache + pool.v_cache
    assert len({buffer.data_ptr() for buffer in buffers}) == 4
    for buffer in buffers:
        assert buffer.shape == (36, 3, 8)
        assert buffer.dtype == dtype
        assert buffer.is_contiguous()
        assert not buffer.any()
        buffer[-1] = 1.0
        assert buffer[-1].sum() == 24


UNTOUCHED = """
import psutil, torch
from tokenloom.scheduler_proc.runner.kv_pool import KVShape, MHATokenToKVPool, SlotTable

shape = KVShape(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32)
before = psutil.Process().memory_info().rss
pool = MHATokenToKVPool(shape, num_tokens=1 << 15, page_size=16)  # 512 MiB
table = SlotTable(num_rows=64, max_tokens=1 << 20, page_size=16)  # 512 MiB
pool.k_cache[0][16] = 1.0
table.set_pages([(63, 5, 1)])
print(psutil.Process().memory_info().rss - before)
"""


def test_an_untouched_pool_takes_no_memory() -> None:
    """In a process of its own: what other tests leave behind moves this one's memory."""
    ran = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 16 << 20


@settings(derandomize=True, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4, 16]))
def test_slots_follow_the_page_table(data: st.DataObject, page_size: int) -> None:
    table = SlotTable(num_rows=3, max_tokens=5 * page_size - page_size // 2, page_size=page_size)
    pages = {}
    entry = st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 99))
    for new_pages in data.draw(st.lists(st.lists(entry, max_size=6), max_size=4)):
        table.set_pages(new_pages)
        pages.update({(row, index): page for row, index, page in new_pages})
    for row in range(3):
        expected = [
            pages[row, p // page_size] * page_size + p % page_size
            if (row, p // page_size) in pages
            else 0  # never given: padding
            for p in range(5 * page_size)
        ]
        assert table.of_row(row, 5 * page_size).tolist() == expected
        positions = np.arange(5 * page_size)
        assert table.of_tokens(np.full_like(positions, row), positions).tolist() == expected


def test_a_page_index_beyond_the_context_is_an_error() -> None:
    table = SlotTable(num_rows=2, max_tokens=32, page_size=16)
    with pytest.raises(IndexError):
        table.set_pages([(0, 2, 1)])
