"""Tokenizers from model files: GGUF vocabularies against transformers and sentencepiece."""

import io
import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from tokenloom.model_files.chat_template import read_chat_template
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.gguf_tokenizer import gguf_tokenizer
from tokenloom.model_files.gguf_vocabulary import gguf_tokenizer_size
from tokenloom.model_files.resolve import resolve_model
from tokenloom.model_files.tokenizer import load_tokenizer, read_special_tokens, tokenizer_size

TEXTS = [
    "Hello world",
    " two  spaces   and\ttabs\t\t\n\n\nlines \n end  ",
    "def f(x):\n    return x**2  # don't, we'll, I'M\n\n\n\tpass",
    "日本語のテキストと中文文本\uff0c以及标点。",
    "안녕하세요 세계",
    "🙂👩\u200d👩\u200d👧🇩🇪 e\u0301 \u0301x",
    "3.14159 and 2024-01-01, 1000000 ½ ②",
    "naïve café — “quotes” … §¶ <b>&amp;</b>",
    "مرحبا بالعالم नमस्ते ไทย",
    "a" * 40 + "\r\n" + "=" * 17,
    "",
]


@pytest.fixture(scope="module")
def embedded() -> str:
    return resolve_model(None, None)


def byte_vocab(*more: str) -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more]


def byte_meta(**changes: object) -> dict[str, object]:
    tokens = byte_vocab("<end>", "<mark>", "[PAD0]", "[PAD1]")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 5, 5],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.slow
def test_embedded_model_agrees_with_transformers(embedded: str) -> None:
    path = Path(embedded)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It splits words as GPT-2 does; this vocabulary also takes each digit for itself.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer = load_tokenizer(embedded)
    for text in [*TEXTS, "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = tokenizer.encode(text).ids
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>").ids) == "a"


def test_embedded_model_facts(embedded: str) -> None:
    assert tokenizer_size(embedded) == 49152
    specials = read_special_tokens(embedded)
    assert (specials["bos_token"], specials["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    template = read_chat_template(embedded)
    assert template is not None
    assert "add_generation_prompt" in template
    # The published ids of this model's chat tokens and of plain words.
    assert load_tokenizer(embedded).encode("<|im_start|>Hello<|im_end|>").ids == [1, 19556, 2]


SPLITS = {
    "gpt-2": ["I", "'m", " 12345", "??", "\n"],
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", "5", "??", "\n"],
    "llama-bpe": ["I", "'m", " ", "123", "45", "??\n"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", "5", "??\n"],
    "default": ["I", "'", "m", " ", "123", "45", "??", "\n"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_pre_tokenizers_cut_as_their_models_do(name: str) -> None:
    text = "I'm 12345??\n"
    words = gguf_tokenizer(byte_meta(pre=name)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in words] == SPLITS[name]


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="kumquat"):
        gguf_tokenizer(byte_meta(pre="kumquat"))
    with pytest.raises(ModelError, match="bert"):
        gguf_tokenizer(byte_meta(model="bert"))


def test_token_types_and_bos() -> None:
    tokenizer = gguf_tokenizer(byte_meta(add_bos_token=True))
    assert tokenizer.encode("<mark>").ids == [256, 257]
    assert tokenizer.decode([256, 257]) == "<mark>"
    assert tokenizer.encode("<mark>", add_special_tokens=False).ids == [257]
    assert gguf_tokenizer(byte_meta()).encode("<end>").ids == [256]
    assert gguf_tokenizer(byte_meta(pre="llama-bpe")).encode("<mark>").ids == [256, 257]
    assert gguf_tokenizer_size(byte_meta()) == 258
    with pytest.raises(ModelError, match="BOS"):
        gguf_tokenizer(byte_meta(add_bos_token=True, bos_token_id=None))


def test_markers_that_a_file_types_as_text_are_one_id_each() -> None:
    tokens = byte_vocab("<|im_start|>", "<|im_end|>", "<think>", "<b>")
    meta = byte_meta(tokens=tokens, token_type=[1] * 260) | {
        "tokenizer.chat_template": "{{ '<|im_' + 'start|>' + messages[0].content }}<|im_end|>"
        "{% if false %}<think>{% endif %}"
    }
    tokenizer = gguf_tokenizer(meta)
    assert tokenizer.encode("<|im_start|>a<|im_end|><think>").ids == [
        256,
        tokens.index("a"),
        257,
        258,
    ]
    # Marks of a model's own text stay visible, and what the template does not use is text.
    assert tokenizer.decode([256, 257, 258]) == "<think>"
    assert tokenizer.encode("<b>").tokens == ["<", "b", ">"]


def test_llama3_takes_a_whole_word_without_merging() -> None:
    tokens, merges = byte_vocab("ab", "abc"), ["a b"]
    assert [
        gguf_tokenizer(byte_meta(tokens=tokens, token_type=[1] * 258, merges=merges, pre=pre))
        .encode("abc", add_special_tokens=False)
        .ids
        for pre in ("llama-bpe", "gpt-2")
    ] == [[257], [256, tokens.index("c")]]


CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other quick foxes",
    "pack my box with five dozen liquor jugs, then there were three more boxes",
    "banana bandana anagram aaaa aaaaa abab ababab 2024 1999 100 000",
    "日本語の文章 日本 日曜日 本日 文章を書く",
    "안녕하세요 안녕히 가세요 하세요",
] * 8


def train(**options: object) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_gguf(path: Path, oracle: sentencepiece.SentencePieceProcessor, prefix: bool) -> None:
    ids = range(oracle.get_piece_size())
    kinds = [
        gguf.TokenType.UNKNOWN
        if oracle.is_unknown(i)
        else gguf.TokenType.CONTROL
        if oracle.is_control(i)
        else gguf.TokenType.BYTE
        if oracle.is_byte(i)
        else gguf.TokenType.NORMAL
        for i in ids
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([oracle.id_to_piece(i).encode() for i in ids])
    writer.add_token_scores([oracle.get_score(i) for i in ids])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_agrees_with_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    oracle = train(add_dummy_prefix=prefix)
    file = tmp_path / "spm.gguf"
    write_gguf(file, oracle, prefix)
    tokenizer = load_tokenizer(str(file))
    assert tokenizer_size(str(file)) == oracle.get_piece_size()
    for text in [*CORPUS[:5], *TEXTS, " the", "the  quick\nbanana"]:
        ids = tokenizer.encode(text).ids
        assert ids == [1, *oracle.encode(text)], text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_agreement_on_random_text(tmp_path: Path) -> None:
    oracle = train(add_dummy_prefix=True)
    write_gguf(tmp_path / "spm.gguf", oracle, True)
    tokenizer = load_tokenizer(str(tmp_path / "spm.gguf"))
    seeded = random.Random(7)
    words = [*" ".join(CORPUS[:5]).split(), *"ab ban an the日本한가🙂 \n0"]
    for _ in range(400):
        text = "".join(seeded.choices([*words, " "], k=seeded.randrange(1, 12)))
        assert tokenizer.encode(text).ids == [1, *oracle.encode(text)], text


def test_a_model_of_its_own_normalisation_is_refused() -> None:
    meta = byte_meta(model="llama", precompiled_charsmap=[1])
    with pytest.raises(ModelError, match="normalisation"):
        gguf_tokenizer(meta)


def save(directory: Path, config: dict[str, object] | None = None) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(byte_vocab())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return tokenizer


def test_directory(tmp_path: Path) -> None:
    save(
        tmp_path,
        {
            "bos_token": {"content": "<s>"},
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "256": {"content": "<s>", "special": True},
                "257": {"content": "<|end|>", "special": True},
                "258": {"content": "<think>", "special": False},
            },
            "chat_template": [
                {"name": "tool_use", "template": "t"},
                {"name": "default", "template": "d"},
            ],
        },
    )
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("longer than four<think><|end|>").ids
    assert (ids[0], ids[-2:], len(ids)) == (256, [258, 257], 19)
    assert tokenizer_size(str(tmp_path)) == 259
    assert read_special_tokens(str(tmp_path)) == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert read_chat_template(str(tmp_path)) == "d"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert read_chat_template(str(tmp_path)) == "from a file"


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.json, which is needed"):
        tokenizer_size(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizer_size(str(tmp_path))
    save(tmp_path, {"added_tokens_decoder": {"300": {"content": "<far>", "special": True}}})
    with pytest.raises(ModelError, match="<far>"):
        load_tokenizer(str(tmp_path))
