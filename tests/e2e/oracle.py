"""Oracle of greedy answers: transformers over the same GGUF file, dequantised to float32.

One forward pass over prompt and answer gives the greedy id and its margin at each position. If
every id of the answer is greedy, then by induction transformers would have generated that answer.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from e2e.prompts import Prompt
from tokenizers import pre_tokenizers

from tokenloom.model_files.resolve import resolve_model

END = 2


@dataclass(frozen=True)
class Difference:
    """Position where an answer is not greedy, and its logit's distance from the greedy one's."""

    place: int
    id: int
    winner: int
    margin: float


class Oracle:
    def __init__(self) -> None:
        self._path = path = Path(resolve_model(None, None))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name
        )
        # transformers assumes GPT-2's splitting; this vocabulary splits digits one by one.
        self.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Difference]] = {}

    @cached_property
    def _model(self) -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self._path.parent, gguf_file=self._path.name, dtype=torch.float32
        ).eval()

    def encode_text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        if not prompt.chat:
            return self.encode_text(prompt.text)
        text = self.tokenizer.apply_chat_template(
            prompt.messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode_text(text)

    def differences(self, prompt: list[int], answer: tuple[int, ...]) -> list[Difference]:
        """Compare an answer with the greedy one; cached, as configurations often agree."""
        key = (tuple(prompt), answer)
        if key not in self._judged:
            self._judged[key] = self._judge(prompt, answer)
        return self._judged[key]

    def _judge(self, prompt: list[int], answer: tuple[int, ...]) -> list[Difference]:
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.no_grad():
            logits = self._model(ids, logits_to_keep=len(answer)).logits[0]
        winners = logits.argmax(-1).tolist()
        return [
            Difference(place, given, winner, float(logits[place, winner] - logits[place, given]))
            for place, (given, winner) in enumerate(zip(answer, winners, strict=True))
            if given != winner
        ]


def margins(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Return how far each id's logit is below the greedy one's."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, -len(ids) :]
    return logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
