"""Quality of each weight mode: perplexity on a fixed text, greedy answers against float32.

`python -m tokenloom.bench.quality`. Runs models in this process, without scheduler, server or
sampler. Speed is not measured.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..kernels.cpu.native import NativeMissing
from ..kernels.decoder import cache_width
from ..kernels.quantised_linear import Kind
from ..model_files.errors import ModelError
from ..model_files.resolve import model_name, resolve_model
from ..model_files.tokenizer import load_tokenizer, tokenizer_size
from ..scheduler_proc.models.forward_batch import ForwardBatch
from ..scheduler_proc.models.llama import LlamaForCausalLM
from ..scheduler_proc.models.loader import load_model, load_packed_model
from ..scheduler_proc.models.packed import PackedLlama
from ..scheduler_proc.worker_batch import ForwardMode
from .report import as_json, number, table

WINDOW = 512  # tokens that a perplexity window sees
PROMPT = 32  # tokens of a prompt, cut from the text
ANSWER = 32  # tokens of each greedy answer; ends of text do not end it
REFERENCE = "float32"
KV_INT8 = "-kv8"  # suffix of a mode with int8 keys and values
MODES = (REFERENCE, "bfloat16", "int8", "int4", "int8-kv8", "int4-kv8")
_FLOATS = {REFERENCE: torch.float32, "bfloat16": torch.bfloat16}
_PAGE = 16
_TOGETHER = 25  # prompts answered at a time
_CAPACITY = max(WINDOW, _TOGETHER * (PROMPT + ANSWER))  # tokens that the cache holds

Model = LlamaForCausalLM | PackedLlama
Ids = list[int]


class Material(msgspec.Struct, frozen=True):
    """Token ids of the text for one tokenizer; windows and prompts begin with BOS if it has one."""

    windows: list[Ids]  # [WINDOW] each
    prompts: list[Ids]  # of one length
    vocab: int  # ids beyond it are padding of the model's head


class Raw(msgspec.Struct, frozen=True):
    """Results of one mode."""

    losses: list[float]  # of each window, nats a token
    answers: list[Ids]  # of each prompt


class Quality(msgspec.Struct, frozen=True):
    mode: str
    perplexity: float
    change: float  # of the perplexity, relative to float32
    change_error: float  # its standard error over the windows; NaN for a single one
    identical: float  # share of answers equal to float32's
    common_prefix: float  # mean tokens before the first difference


class KVSpace:
    """Paged keys and values of a batch whose requests advance together."""

    def __init__(self, model: Model, packed_dtype: torch.dtype = torch.bfloat16) -> None:
        spec, packed = model.spec, isinstance(model, PackedLlama)
        dtype = model.dtype if isinstance(model, LlamaForCausalLM) else packed_dtype
        width = cache_width(spec.head_dim, dtype) if packed else spec.head_dim
        shape = (_CAPACITY + _PAGE, spec.num_kv_heads, width)  # the first page is padding
        self._model = model
        self._k = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)]
        self._v = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)]
        self.start(1, 0)

    def start(self, requests: int, tokens: int) -> None:
        """Start new requests of up to `tokens` each; drop the earlier ones."""
        pages = -(-tokens // _PAGE)
        assert requests * pages * _PAGE <= _CAPACITY
        self._page_table = torch.arange(1, requests * pages + 1, dtype=torch.int32)
        self._page_table = self._page_table.view(requests, pages)
        slots = self._page_table[:, :, None].long() * _PAGE + torch.arange(_PAGE)
        self._slots = slots.view(requests, pages * _PAGE)
        self._length = 0

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Run ids [B, n] of all requests; return logits [S, vocab] at `wanted` [S] of B x n."""
        requests, new = ids.shape
        before, self._length = self._length, self._length + new
        slots = self._slots[:, : self._length]
        return self._model.forward(
            ForwardBatch(
                mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
                input_ids=ids.flatten(),
                positions=torch.arange(before, self._length).repeat(requests),
                out_cache_loc=slots[:, before:].flatten(),
                rows=list(range(requests)),
                page_table=self._page_table,
                page_size=_PAGE,
                extend_lens=[new] * requests,
                prefix_lens=[before] * requests,
                request_slots=list(slots),
                logit_indices=wanted,
                k_cache=self._k,
                v_cache=self._v,
            )
        )


def window_loss(space: KVSpace, window: Ids, vocab: int) -> float:
    """Return the mean negative log likelihood per token, each given those before it."""
    ids = torch.tensor(window)
    space.start(1, len(window))
    logits = space.forward(ids[None], torch.arange(len(window) - 1))
    return float(F.cross_entropy(logits[:, :vocab], ids[1:]))


def greedy(space: KVSpace, prompts: Sequence[Ids], tokens: int, vocab: int) -> list[Ids]:
    """Return the `tokens` greedy ids after each of the prompts, which have equal lengths."""
    ids = torch.tensor(prompts)  # [B, n]
    space.start(len(prompts), ids.shape[1] + tokens)
    answers = []
    for _ in range(tokens):
        last = (torch.arange(len(prompts)) + 1) * ids.shape[1] - 1
        ids = space.forward(ids, last)[:, :vocab].argmax(1, keepdim=True)
        answers.append(ids)
    return torch.cat(answers, dim=1).tolist()


def load(path: str, mode: str, threads: int) -> Model:
    """Load a model; raises ModelError, and NativeMissing for int8 and int4 without the library."""
    if mode in _FLOATS:
        return load_model(
            path, dtype=_FLOATS[mode], device="cpu", load_format="auto", context_length=None
        )
    kind: Kind = "int4" if mode.startswith("int4") else "int8"
    return load_packed_model(path, kind, load_format="auto", context_length=None, threads=threads)


def read_material(path: str, windows: int | None, prompts: int) -> Material:
    """Take `windows` (all, if None) and prompts at equal distances. Raises ModelError."""
    tokenizer = load_tokenizer(path)
    text = files(__package__).joinpath("data", "quality.txt").read_text("utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    front = tokenizer.encode("").ids
    size = WINDOW - len(front)
    whole = len(ids) // size
    count = whole if windows is None else min(windows, whole)
    cuts = [index * whole // count * size for index in range(count)]
    places = [index * (len(ids) - PROMPT) // prompts for index in range(prompts)]
    return Material(
        windows=[front + ids[start : start + size] for start in cuts],
        prompts=[front + ids[start : start + PROMPT - len(front)] for start in places],
        vocab=tokenizer_size(path),
    )


def measure(model: Model, mode: str, material: Material, progress: Callable[[int], object]) -> Raw:
    """Measure a mode; call `progress` with the windows and prompts done. Raises ModelError."""
    if model.spec.context_length < WINDOW:
        raise ModelError(f"the model's context is below the {WINDOW} tokens of a window")
    packed_dtype = torch.int8 if mode.endswith(KV_INT8) else torch.bfloat16
    space, vocab = KVSpace(model, packed_dtype), min(material.vocab, model.spec.vocab_size)
    losses, answers = [], []
    for window in material.windows:
        losses.append(window_loss(space, window, vocab))
        progress(1)
    for start in range(0, len(material.prompts), _TOGETHER):
        group = material.prompts[start : start + _TOGETHER]
        answers += greedy(space, group, ANSWER, vocab)
        progress(len(group))
    return Raw(losses, answers)


def compare(mode: str, raw: Raw, reference: Raw) -> Quality:
    differences = [a - b for a, b in zip(raw.losses, reference.losses, strict=True)]
    change = math.expm1(statistics.fmean(differences))
    error = math.nan
    if len(differences) > 1:
        error = (1 + change) * statistics.stdev(differences) / math.sqrt(len(differences))
    pairs = list(zip(raw.answers, reference.answers, strict=True))
    return Quality(
        mode=mode,
        perplexity=math.exp(statistics.fmean(raw.losses)),
        change=change,
        change_error=error,
        identical=statistics.fmean(mine == theirs for mine, theirs in pairs),
        common_prefix=statistics.fmean(_common_prefix(mine, theirs) for mine, theirs in pairs),
    )


def _common_prefix(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def show(results: Sequence[Quality]) -> str:
    header = ["mode", "perplexity", "change", "identical answers", f"common tokens of {ANSWER}"]
    return table(
        header,
        [
            [
                one.mode,
                f"{one.perplexity:.3f}",
                "" if one.mode == REFERENCE else f"{one.change:+.2%} ± {one.change_error:.2%}",
                f"{one.identical:.0%}",
                number(one.common_prefix),
            ]
            for one in results
        ],
    )


def main(argv: list[str]) -> int:
    """Run it; return 0 done, 1 not possible here, 2 wrong flags, 130 Ctrl-C."""
    flags = _parser().parse_args(argv)
    torch.set_num_threads(flags.threads)
    try:
        path = resolve_model(flags.model, None)
        material = read_material(path, flags.windows, flags.prompts)
        raw: dict[str, Raw] = {}
        for mode in dict.fromkeys((REFERENCE, *flags.modes)):
            model = load(path, mode, flags.threads)
            with _bar(mode, material) as bar:
                raw[mode] = measure(model, mode, material, bar.update)
            del model  # two at a time may be too many
    except (ModelError, NativeMissing) as error:
        print(f"tokenloom.bench.quality: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    results = [compare(mode, one, raw[REFERENCE]) for mode, one in raw.items()]
    name, count = model_name(path, flags.model), len(material.windows)
    print(f"{name}: {count} windows of {WINDOW} tokens, {len(material.prompts)} prompts\n")
    print(show(results))
    if flags.json is not None:
        said = {"model": name, "windows": count, "prompts": flags.prompts, "results": results}
        flags.json.write_bytes(as_json(said))
    return 0


def _bar(mode: str, material: Material) -> "tqdm[None]":
    """Progress bar, on a terminal only; standard output stays clean."""
    total = len(material.windows) + len(material.prompts)
    return tqdm(total=total, desc=mode, disable=None, file=sys.stderr, leave=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom.bench.quality",
        description="Perplexity of a model's modes on a fixed English text, and how far their "
        "greedy answers are those of float32, which always runs first.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="PATH_OR_NAME", help="as of tokenloom serve (default: the embedded one)")
    add("--modes", type=_modes, default=MODES, metavar="A,B", help=f"of {','.join(MODES)} (all)")
    add("--windows", type=_count, metavar="N", help="only so many, spread over the text")
    add("--prompts", type=_count, default=100, metavar="N", help="(default: %(default)s)")
    add("--threads", type=_count, default=torch.get_num_threads(), help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(MODES)}")
    return modes


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
