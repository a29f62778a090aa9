"""Names of tokens that end a turn or a text. Used by `gguf_vocabulary` and `end_tokens`."""

ENDS_BY_NAME = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end_of_turn|>",
        "<|endofturn|>",
        "<|eot|>",
        "<|eom|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# If the vocabulary has this token, an answer has several messages and <|end|> ends one of them.
ENDS_SEVERAL_MESSAGES = "<|return|>"
