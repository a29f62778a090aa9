"""Delta debugging: a shorter list that fails as the whole does (Zeller, Hildebrandt 2002)."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Fails = Callable[[Sequence[T]], bool]


def ddmin(items: Sequence[T], fails: Fails[T]) -> list[T]:
    """`items` fails. Of the result no single item can be left out."""
    left, size = list(items), max(1, len(items) // 2)
    while True:
        start, smaller = 0, False
        while start < len(left):
            rest = left[:start] + left[start + size :]
            if fails(rest):
                left, smaller = rest, True
            else:
                start += size
        if size > 1:
            size = size // 2
        elif not smaller:
            return left


def shrink(items: Sequence[T], fails: Fails[T], matters: Callable[[T], bool]) -> list[T]:
    """As ddmin, and leaves out an item that matters along with a run of others elsewhere.

    A request that is left out makes its neighbours faster: some of their steps must go with it.
    """
    left = ddmin(items, fails)
    while (rest := next(filter(fails, _two_gaps(left, matters)), None)) is not None:
        left = ddmin(rest, fails)
    return left


def _two_gaps(items: list[T], matters: Callable[[T], bool]) -> Iterator[list[T]]:
    for at in [at for at, item in enumerate(items) if matters(item)]:
        others = items[:at] + items[at + 1 :]
        size = len(others) // 2
        while size > 0:
            for start in range(0, len(others) - size + 1, max(1, size // 2)):
                yield others[:start] + others[start + size :]
            size //= 2
