"""What core and front must know of a runner. Made by each at its start, never changed."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RunnerFacts:
    vocab_size: int  # ids that the tokenizer knows; the logits may be wider
    context_length: int
    page_size: int
    max_total_tokens: int
    num_pages: int  # with the padding page 0
    dtype_name: str  # of the weights, as --dtype spells it
    max_running_requests: int
    max_loras: int
