"""Free lists never hand out a number twice, nor take one back twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.scheduler_proc.core.kv_allocator import (
    PoolError,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_against_a_set(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    pool = TokenToKVPoolAllocator(num_pages)
    free, held = set(range(1, num_pages)), []
    for is_alloc, count in moves:
        if is_alloc and count > len(free):
            with pytest.raises(PoolError, match=f"asked for {count} pages"):
                pool.alloc(count)
        elif is_alloc:
            pages = pool.alloc(count)
            assert len(set(pages)) == count
            assert free.issuperset(pages)
            free -= set(pages)
            held += pages
        else:
            back, held = held[:count], held[count:]
            pool.free(back)
            free |= set(back)
        assert pool.available == len(free)
        assert set(pool.free_numbers()) == free


def test_double_free_is_a_bug() -> None:
    pool = TokenToKVPoolAllocator(4)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(PoolError, match="given back twice"):
        pool.free(pages[:1])


def test_the_most_recently_freed_go_first() -> None:
    pool = TokenToKVPoolAllocator(9)
    assert pool.alloc(4) == [1, 2, 3, 4]
    pool.free([2, 3])
    assert pool.alloc(3) == [3, 2, 5]


def test_page_0_is_padding_and_row_0_is_a_row() -> None:
    assert sorted(TokenToKVPoolAllocator(4).alloc(3)) == [1, 2, 3]
    assert sorted(ReqToTokenPool(3).alloc(3)) == [0, 1, 2]


def test_a_pool_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        TokenToKVPoolAllocator(1)
