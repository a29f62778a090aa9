"""Finds stop strings in text that arrives in pieces of any size. PURE.

Called by `streams`, one matcher per request that has stop strings. The rule: the stop string that
is complete first ends the text; of several that are complete with the same character, the longest
does. So the answer does not depend on where the pieces were cut. Tokens do not enter.

A stop string may hold the text of a special token, which is not shown to the client. Such a string
is looked for in the whole text; all others in what is shown.
"""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice


class StopMatcher:
    def __init__(self, stops: Sequence[str], hidden: Collection[str] = ()) -> None:
        """`stops`: strings of at least one character. `hidden`: texts that are not shown."""
        # Longest first: the first that is complete wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""
        self._in_whole_text = [any(text in stop for text in hidden) for stop in self._stops]
        # Whether each of the last characters of the whole text is shown.
        longest = max(map(len, self._stops), default=0) if any(self._in_whole_text) else 0
        self._shown: deque[bool] = deque(maxlen=longest)

    def push(
        self, text: str, *, shown: bool = True, may_end: bool = True
    ) -> tuple[str, str | None]:
        """Text that can be delivered, and the stop string that ended it. No push after a match.

        The longest tail that may begin a stop string is held back. Without `may_end` a stop string
        that is complete in `text` is passed over; one that goes on in later text can still match.
        """
        if not self._stops:
            return text if shown else "", None
        for at, char in enumerate(text):
            self._shown.append(shown)
            for index, stop in enumerate(self._stops):
                if not (shown or self._in_whole_text[index]):
                    continue
                length = self._advance(index, char)
                if length < len(stop):
                    continue
                if may_end:
                    before = self._held + (text[: at + 1] if shown else "")
                    self._held = ""
                    return before[: len(before) - self._shown_of(index)], stop
                self._matched[index] = self._borders[index][-1]
        whole = self._held + (text if shown else "")
        sure = len(whole) - max(map(self._shown_of, range(len(self._stops))))
        self._held = whole[sure:]
        return whole[:sure], None

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _shown_of(self, index: int) -> int:
        """How many shown characters there are in what the text has of this stop string."""
        matched = self._matched[index]
        if not self._in_whole_text[index]:
            return matched
        return sum(islice(reversed(self._shown), matched))

    def _advance(self, index: int, char: str) -> int:
        """One step of Knuth, Morris and Pratt's search."""
        stop, borders = self._stops[index], self._borders[index]
        length = self._matched[index]
        while length and stop[length] != char:
            length = borders[length - 1]
        if stop[length] == char:
            length += 1
        self._matched[index] = length
        return length


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[length] != stop[at]:
            length = borders[length - 1]
        if stop[length] == stop[at]:
            length += 1
        borders[at] = length
    return borders
