"""Free lists: pages of the KV pool, and rows of the running batch.

Owned by core/kv_cache.py. Page 0 is padding and never handed out. PURE.
"""


class PoolError(RuntimeError):
    """A bug: more pages or rows were asked for than are free, or one was freed twice."""


class _FreeList:
    """A free list of the numbers [first, first + count), most recently freed first."""

    def __init__(self, what: str, first: int, count: int) -> None:
        self._what = what
        self._free = list(range(first + count - 1, first - 1, -1))
        self._is_free = bytearray(first) + bytearray(b"\x01" * count)
        self.capacity = count

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` numbers; raise PoolError when fewer are free: the caller must make room."""
        if count > len(self._free):
            raise PoolError(f"asked for {count} {self._what}s, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for number in taken:
            self._is_free[number] = 0
        taken.reverse()
        return taken

    def free(self, numbers: list[int]) -> None:
        for number in numbers:
            if self._is_free[number]:
                raise PoolError(f"{self._what} {number} was given back twice")
            self._is_free[number] = 1
        self._free.extend(numbers)

    def free_numbers(self, start: int = 0, stop: int | None = None) -> list[int]:
        """A slice of the free numbers, for conservation checks."""
        return self._free[start:stop]


class TokenToKVPoolAllocator(_FreeList):
    """Pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a KV pool needs at least 2 pages, one of them padding: {num_pages}")
        super().__init__("page", 1, num_pages - 1)


class ReqToTokenPool(_FreeList):
    """Rows of the page table: one per request that is being computed."""

    def __init__(self, num_rows: int) -> None:
        super().__init__("row", 0, num_rows)
