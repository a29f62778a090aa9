"""Names by which chat models call the token that ends a turn or a text, whoever made the file."""

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
# With this one in the vocabulary, <|end|> ends a message of which an answer has several.
ENDS_SEVERAL_MESSAGES = "<|return|>"
