"""Merge rules for a SentencePiece BPE vocabulary, which has only pieces and scores.

Called by `gguf_vocabulary`. File formats must not enter.
"""

from collections.abc import Sequence

SPACE = "\u2581"  # how SentencePiece writes a space


def derive_merges(
    tokens: Sequence[str], scores: Sequence[float], pieces: Sequence[int]
) -> list[tuple[str, str]]:
    """Return merge pairs, best first, so that merging by rank equals SentencePiece's by score.

    SentencePiece joins the neighbours whose union is the piece with the best score, the leftmost
    first (bpe_model.cc). So each split of a piece into two pieces is a rule with the score of the
    whole. `pieces` are the ids that text may be encoded to.
    """
    known = {tokens[i]: i for i in pieces}
    rules: list[tuple[float, int, int, str, str]] = []
    for piece, piece_id in known.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                rules.append((-scores[piece_id], known[left], known[right], left, right))
    rules.sort()
    return [(left, right) for *_, left, right in rules]
