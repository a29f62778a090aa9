"""Finds stop strings in text that arrives in pieces of any size. PURE.

Called by `streams`, one matcher per request. The stop string that is complete first ends the text;
of several complete at the same character, the longest. So the answer does not depend on how the
text is cut into pieces. Tokens must not enter.

A stop string may contain the text of a special token, which is hidden from the client. Such a
string is searched in the whole text, all others in the shown text only.
"""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice


class StopMatcher:
    def __init__(self, stops: Sequence[str], hidden: Collection[str] = ()) -> None:
        """`stops` are non-empty. `hidden`: texts of special tokens that are not shown."""
        # Longest first: of several complete at one character, the longest wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of each stop's prefix that ends the text
        self._held = ""
        self._in_whole_text = [any(text in stop for text in hidden) for stop in self._stops]
        # Whether each of the last characters of the whole text is shown, as far back as needed.
        longest = max(map(len, self._stops), default=0) if any(self._in_whole_text) else 0
        self._shown: deque[bool] = deque(maxlen=longest)

    def push(
        self, text: str, *, shown: bool = True, may_end: bool = True
    ) -> tuple[str, str | None]:
        """Return the text that can be delivered, and the stop string that matched or None.

        Holds back the longest tail that may begin a stop string. Without `may_end`, a stop string
        that completes in `text` is ignored; one that completes in later text still matches. Do not
        push after a match.
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
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _shown_of(self, index: int) -> int:
        """Count the shown characters in the matched prefix of a stop string."""
        matched = self._matched[index]
        if not self._in_whole_text[index]:
            return matched
        return sum(islice(reversed(self._shown), matched))

    def _advance(self, index: int, char: str) -> int:
        """Take one step of Knuth-Morris-Pratt; return the length of the matched prefix."""
        stop, borders = self._stops[index], self._borders[index]
        length = self._matched[index]
        while length and stop[length] != char:
            length = borders[length - 1]
        if stop[length] == char:
            length += 1
        self._matched[index] = length
        return length


def _borders(stop: str) -> list[int]:
    """Return, per prefix, the length of its longest proper prefix that is also a suffix."""
    borders = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[length] != stop[at]:
            length = borders[length - 1]
        if stop[length] == stop[at]:
            length += 1
        borders[at] = length
    return borders
