"""IncrementalDecoder: the deltas of any ids, pushed in any pieces, add up to the whole decode."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenloom.detokenizer_proc.incremental import REPLACEMENT, IncrementalDecoder
from tokenloom.model_files.resolve import resolve_model
from tokenloom.model_files.tokenizer import load_tokenizer
from tokenloom.scheduler_proc.core.rows_out import PROMPT_TAIL

WORDS = ["▁", "▁a", "▁b", "a", "b", "▁▁", "。", "한", "한글", "🙂", "e\u0301", "\u0301", "<x>"]


def byte_level() -> Tokenizer:
    """All 256 bytes and some merges, among them ones that end inside characters."""
    spelled = "한글 안녕 🙂🙂 日本語 é the cat \ufffd".encode()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    probe = Tokenizer(models.BPE(vocab=dict(vocab), merges=[]))
    probe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chars = probe.encode(spelled.decode()).tokens
    for size in (2, 3, 4):
        for start in range(0, len(chars) - size, 2):
            vocab.setdefault("".join(chars[start : start + size]), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = probe.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The shape of a SentencePiece vocabulary: words, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
Decode = Callable[[Sequence[int]], str]


def decoding(tokenizer: Tokenizer, skip: bool = True) -> Decode:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=skip)


def stream(
    decode: Decode, ids: Sequence[int], tail: Sequence[int] = (), sizes: Sequence[int] = (1,)
) -> list[str]:
    decoder = IncrementalDecoder(decode, tail)
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(decoder.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*deltas, decoder.flush()]


def fallback_ids(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def piece(text: str) -> int:
    token_id = BYTE_FALLBACK.token_to_id(text)
    assert token_id is not None
    return token_id


IDS = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(IDS, SIZES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_whole_decode_of_any_ids(
    ids: list[int], sizes: list[int], skip: bool
) -> None:
    decode = decoding(BYTE_LEVEL, skip)
    assert "".join(stream(decode, ids, sizes=sizes)) == decode(ids)


@given(
    st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0xA0, 0xFF, 0x41]), max_size=40)
)
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_whole_decode_of_broken_characters(raw: list[int]) -> None:
    chars = byte_chars()
    ids = [BYTE_LEVEL.token_to_id(chars[byte]) for byte in raw]
    decode = decoding(BYTE_LEVEL)
    deltas = stream(decode, ids)
    assert "".join(deltas) == decode(ids) == bytes(raw).decode("utf-8", "replace")


def byte_chars() -> list[str]:
    """How the byte-level alphabet spells each byte: as itself, or from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte if byte in own else 256 + others.index(byte)) for byte in range(256)]


@given(IDS, IDS)
@settings(max_examples=200, deadline=None)
def test_prompt_tail_is_context_and_is_never_repeated(tail: list[int], ids: list[int]) -> None:
    decode = decoding(BYTE_LEVEL)
    prompt = [*tail[-6:], BYTE_LEVEL.token_to_id("a")]
    assert "".join(stream(decode, ids, prompt)) == decode(prompt + ids)[len(decode(prompt)) :]


TEXTS = st.text(st.sampled_from("ab 日本한글🙂é\n"), max_size=12)
PARTS = st.lists(
    st.one_of(
        st.sampled_from(WORDS).map(lambda word: [piece(word)]),
        st.just([BYTE_FALLBACK.token_to_id("<end>")]),
        TEXTS.map(fallback_ids),
    ),
    max_size=12,
)


@given(PARTS, SIZES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_fallback_stream_equals_whole_decode_of_valid_text(
    parts: list[list[int]], sizes: list[int], skip: bool
) -> None:
    ids = [token_id for part in parts for token_id in part]
    decode = decoding(BYTE_FALLBACK, skip)
    assert "".join(stream(decode, ids, sizes=sizes)) == decode(ids)


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=40), SIZES)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_stream_of_any_ids_does_not_depend_on_the_pieces(
    ids: list[int], sizes: list[int]
) -> None:
    decode = decoding(BYTE_FALLBACK)
    text = "".join(stream(decode, ids, sizes=sizes))
    assert text == "".join(stream(decode, ids))
    if REPLACEMENT not in decode(ids):
        assert text == decode(ids)


@given(st.text(min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_delta_holds_half_a_character(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = BYTE_LEVEL.encode(text).ids
    deltas = stream(decoding(BYTE_LEVEL), ids)
    assert "".join(deltas) == text
    assert REPLACEMENT not in "".join(deltas)


def test_txt_05_and_07_unfinished_bytes_come_out_at_the_flush() -> None:
    decoder = IncrementalDecoder(decoding(BYTE_FALLBACK))
    assert decoder.push(fallback_ids("🙂")[:2]) == ""
    assert decoder.flush() == REPLACEMENT * 2
    assert decoder.flush() == ""


def test_txt_05_a_byte_that_never_completes_comes_out_with_what_follows() -> None:
    decode = decoding(BYTE_FALLBACK)
    assert stream(decode, [1 + 0xFF, piece("a")]) == ["", REPLACEMENT + "a", ""]
    # Three newer tokens prove it too, and the character after it is not spoilt.
    assert "".join(stream(decode, [1 + 0xFF, *fallback_ids("🙂你")])) == REPLACEMENT + "🙂你"
    assert "".join(stream(decode, [*fallback_ids("你"), 1 + 0xFF, piece("b")])) == "你\ufffdb"


def test_txt_06_byte_fallback_pieces_become_the_one_syllable() -> None:
    ids = [piece("한"), 1 + 0xEA, 1 + 0xB9, 1 + 0x80, piece("한글")]
    assert "".join(stream(decoding(BYTE_FALLBACK), ids)) == "한김한글"


def test_txt_08_spaces_neither_vanish_nor_double() -> None:
    decode = decoding(BYTE_FALLBACK)
    ids = [piece("▁a"), piece("▁b"), piece("▁"), piece("▁a")]
    assert stream(decode, ids) == ["a", " b", " ", " a", ""]
    assert stream(decode, ids, tail=[piece("a")]) == [" a", " b", " ", " a", ""]
    end = BYTE_FALLBACK.token_to_id("<end>")
    assert "".join(stream(decode, [piece("▁a"), *[end] * 50, piece("▁b")])) == "a b"


def test_txt_09_hangul_one_token_a_time() -> None:
    text = "안녕하세요 한글 긴 문장입니다 " * 20
    ids = BYTE_LEVEL.encode(text).ids
    assert "".join(stream(decoding(BYTE_LEVEL), ids)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_txt_10_special_tokens_show_only_when_wanted(skip: bool) -> None:
    ids = BYTE_LEVEL.encode("a<think>b<end>").ids
    text = "".join(stream(decoding(BYTE_LEVEL, skip), ids))
    assert text == ("a<think>b" if skip else "a<think>b<end>")


def test_txt_11_no_byte_level_marks_leak() -> None:
    text = "two words\n\tthree  spaces   é"
    assert "".join(stream(decoding(BYTE_LEVEL), BYTE_LEVEL.encode(text).ids)) == text


@pytest.mark.parametrize("word", ["\ufffd", "a", "<end>", "\ufffd\ufffd日"])
def test_a_token_costs_the_same_however_long_the_answer(word: str) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=True)

    ids = BYTE_LEVEL.encode(word * 500).ids
    text = "".join(stream(decode, ids))
    assert text == decoding(BYTE_LEVEL)(ids)
    assert longest <= 20


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    first, *rest = fallback_ids("你")
    assert "".join(stream(decoding(BYTE_FALLBACK), rest, tail=[piece("▁a"), first])) == "你"


def byte_ids(raw: bytes) -> list[int]:
    return [BYTE_LEVEL.token_to_id(byte_chars()[byte]) for byte in raw]


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "a", "語", "\ufffd"])
def test_each_way_to_end_a_prompt_inside_a_character(before: str, cut: int) -> None:
    raw = "🙂".encode()
    tail, ids = before.encode() + raw[:cut], raw[cut:] + b"!"
    assert "".join(stream(decoding(BYTE_LEVEL), byte_ids(ids), byte_ids(tail))) == "🙂!"
    tail, ids = [1 + byte for byte in tail], [1 + byte for byte in ids]
    assert "".join(stream(decoding(BYTE_FALLBACK), ids, tail)) == "🙂!"


def test_a_special_token_between_prompt_and_answer_parts_no_character() -> None:
    end, raw = BYTE_LEVEL.token_to_id("<end>"), "🙂".encode()
    tail = [*byte_ids(raw[:2]), end, end]
    assert "".join(stream(decoding(BYTE_LEVEL), byte_ids(raw[2:]), tail)) == "🙂"


def test_replacement_characters_of_a_prompt_are_not_repeated() -> None:
    for tail in ("a\ufffd".encode(), b"\xff", b"a\xf0\x9f", b"\xff\xfe\xff\xff\xff"):
        for answer in ("b", " \ufffd", "日"):
            ids = byte_ids(answer.encode())
            assert "".join(stream(decoding(BYTE_LEVEL), ids, byte_ids(tail))) == answer


def added_text(decode: Decode, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """What the answer adds to the prompt: the whole without what both begin with."""
    before, after = decode(prompt), decode([*prompt, *answer])
    same = len(before)
    while not after.startswith(before[:same]):
        same -= 1
    assert not before[same:].strip(REPLACEMENT)
    return after[same:]


@cache
def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model(None, None))


def test_a_robot_that_a_prompt_begins_and_the_answer_completes() -> None:
    assert stream(decoding(embedded()), [114, 240], [10813]) == ["", "🤖", ""]


ODD_TEXTS = st.text(
    st.one_of(
        st.sampled_from("a \n🤖🙂👩\u200d日本한글e\u0301é\ufffd\U000e0067"),
        st.characters(codec="utf-8"),
    ),
    min_size=1,
    max_size=16,
)


@given(text=ODD_TEXTS, cut=st.integers(0, 64), sizes=SIZES, window=st.integers(PROMPT_TAIL, 64))
@settings(max_examples=300, deadline=None)
def test_any_cut_of_any_text_into_prompt_and_answer(
    text: str, cut: int, sizes: list[int], window: int
) -> None:
    ids = embedded().encode(text).ids
    prompt, answer = ids[: cut % (len(ids) + 1)], ids[cut % (len(ids) + 1) :]
    decode = decoding(embedded())
    added = "".join(stream(decode, answer, prompt[-window:], sizes))
    assert added == added_text(decode, prompt, answer)
    # No character is lost: the prompt's whole ones and the answer's are all of the text.
    whole = decode(ids)  # `text`, but for bytes that the vocabulary lacks
    assert whole == decode(prompt)[: len(whole) - len(added)] + added


@given(
    prompt=st.lists(st.integers(0, 49151), max_size=PROMPT_TAIL),
    answer=st.lists(st.integers(0, 49151), max_size=12),
    sizes=SIZES,
)
@settings(max_examples=200, deadline=None)
def test_any_ids_as_prompt_and_answer(
    prompt: list[int], answer: list[int], sizes: list[int]
) -> None:
    decode = decoding(embedded())
    added = "".join(stream(decode, answer, prompt, sizes))
    assert added == added_text(decode, prompt, answer)


@given(text=TEXTS, cut=st.integers(0, 64), sizes=SIZES)
@settings(max_examples=200, deadline=None)
def test_any_cut_of_byte_tokens(text: str, cut: int, sizes: list[int]) -> None:
    raw = b"a" + text.encode()
    cut = 1 + cut % len(raw)
    prompt, answer = ([1 + byte for byte in part] for part in (raw[:cut], raw[cut:]))
    added = "".join(stream(decoding(BYTE_FALLBACK), answer, prompt[-PROMPT_TAIL:], sizes))
    assert "a" + text == raw[:cut].decode(errors="ignore") + added


def test_a_tail_cut_inside_a_character_spoils_nothing() -> None:
    tail = fallback_ids("日本")[1:]
    assert "".join(stream(decoding(BYTE_FALLBACK), fallback_ids("語"), tail=tail)) == "語"
