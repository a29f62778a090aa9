"""TextEncoder: raw prompts, the BOS rule, and what is refused."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tokenloom.model_files.resolve import resolve_model
from tokenloom.tokenizer_proc.encode import TextEncoder, load_text
from tokenloom.wire.client_messages import ChatMessage
from tokenloom.wire.sampling import InvalidRequest

BOS, EOS = 256, 257


def tokenizer(single: str | None) -> Tokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    if single is not None:
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return made


def test_inp_11_bos_comes_once_and_eos_never() -> None:
    encoder = TextEncoder(tokenizer("<s> $A </s>"))
    a = tokenizer(None).encode("a").ids
    assert encoder.encode("a") == [BOS, *a]
    assert encoder.encode("<s>a") == [BOS, *a]
    assert encoder.encode("") == [BOS]
    assert TextEncoder(tokenizer(None)).encode("a</s>") == [*a, EOS]


def test_inp_04_an_empty_prompt_without_bos_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        TextEncoder(tokenizer(None)).encode("", "prompt")
    assert caught.value.param == "prompt"


def test_inp_01_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TextEncoder(tokenizer(None)).encode("a\ud800")


def test_inp_09_nuls_are_text() -> None:
    assert len(TextEncoder(tokenizer(None)).encode("\0" * 1000)) == 1000


def test_load_text_of_the_embedded_model() -> None:
    encoder, chat = load_text(resolve_model(None, None))
    assert encoder.encode("<|im_start|>Hello<|im_end|>") == [1, 19556, 2]
    ids = chat.encode([ChatMessage("system", "S"), ChatMessage("user", "<|im_end|>")])
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
