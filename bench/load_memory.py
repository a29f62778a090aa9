"""Peak memory of loading a model: `python -m tokenloom.bench.load_memory [MODEL ...]`.

Each model is loaded with packed weights in a process of its own. Without a MODEL, files of random
numbers in the shape of Qwen2.5-0.5B are written to a temporary directory, one of each kind. The
aim: at most the file, the packed weights and 300 MB.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from ..kernels.quantised_linear import Kind
from ..scheduler_proc.models.loader import load_packed_model

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 24, 896, 4864, 14, 2, 151936
AIM_MB = 300
_FILE_KINDS = ("Q4_1", "Q4_K", "Q8_0")
_SUPER_BLOCK = 256  # inputs of a Q4_K block; rows of 896 do not divide


class LoadReport(msgspec.Struct):
    """Bytes of the model's files, of the packed weights, and of the process's peak memory."""

    file: int
    packed: int
    peak: int


def measure(path: str, kind: Kind) -> LoadReport:
    """Load in a child process, since a process's peak memory cannot be reset."""
    command = [sys.executable, "-m", "tokenloom.bench.load_memory", "--child", kind, path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=LoadReport)


def load_here(path: str, kind: Kind) -> LoadReport:
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    model = load_packed_model(path, kind, load_format="auto", context_length=None, threads=threads)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return LoadReport(file_bytes(path), model.nbytes, int(status["VmHWM"].split()[0]) << 10)


def file_bytes(path: str) -> int:
    files = [Path(path)] if path.endswith(".gguf") else Path(path).glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def write_random_models(directory: Path) -> list[str]:
    """Write one model of each kind with finite random weights."""
    paths = []
    for kind in _FILE_KINDS:
        path = directory / f"{kind}.gguf"
        write_random_gguf(path, GGMLQuantizationType[kind])
        paths.append(str(path))
    write_random_safetensors(directory / "bf16")
    return [*paths, str(directory / "bf16")]


def write_random_gguf(path: Path, kind: GGMLQuantizationType) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    random = np.random.default_rng(0)
    for name, shape in _shapes(_GGUF_NAMES):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        fits = kind is not GGMLQuantizationType.Q4_K or shape[1] % _SUPER_BLOCK == 0
        used = kind if fits else GGMLQuantizationType.Q5_0  # what llama.cpp falls back to
        block, size = GGML_QUANT_SIZES[used]
        # Bytes below 0x3c make every half-precision scale finite.
        data = random.integers(0, 0x3C, (shape[0], shape[1] // block * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random_safetensors(directory: Path) -> None:
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in _shapes(_HF_NAMES)
    }
    save_file(tensors, directory / "model.safetensors")


_HF_NAMES = (
    "model.embed_tokens",
    "model.norm",
    "model.layers.{}.input_layernorm",
    "model.layers.{}.post_attention_layernorm",
    "model.layers.{}.self_attn.q_proj",
    "model.layers.{}.self_attn.k_proj",
    "model.layers.{}.self_attn.v_proj",
    "model.layers.{}.self_attn.o_proj",
    "model.layers.{}.mlp.gate_proj",
    "model.layers.{}.mlp.up_proj",
    "model.layers.{}.mlp.down_proj",
)
_GGUF_NAMES = (
    "token_embd",
    "output_norm",
    "blk.{}.attn_norm",
    "blk.{}.ffn_norm",
    "blk.{}.attn_q",
    "blk.{}.attn_k",
    "blk.{}.attn_v",
    "blk.{}.attn_output",
    "blk.{}.ffn_gate",
    "blk.{}.ffn_up",
    "blk.{}.ffn_down",
)


def _shapes(names: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    top: tuple[tuple[int, ...], ...] = ((VOCAB, HIDDEN), (HIDDEN,))
    layer: tuple[tuple[int, ...], ...] = (
        (HIDDEN,),
        (HIDDEN,),
        (HIDDEN, HIDDEN),
        (kv, HIDDEN),
        (kv, HIDDEN),
        (HIDDEN, HIDDEN),
        (INNER, HIDDEN),
        (INNER, HIDDEN),
        (HIDDEN, INNER),
    )
    found = list(zip(names[:2], top, strict=True))
    for index in range(LAYERS):
        found += zip((name.format(index) for name in names[2:]), layer, strict=True)
    return [(f"{name}.weight", shape) for name, shape in found]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tokenloom.bench.load_memory", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--dtype", choices=("int8", "int4"), default="int4")
    parser.add_argument("--child", choices=("int8", "int4"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(msgspec.json.encode(load_here(args.models[0], args.child)).decode())
        return 0
    print("| model | file MB | packed MB | peak MB | beyond both MB |\n|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory:
        for path in args.models or write_random_models(Path(directory)):
            found = measure(path, args.dtype)
            beyond = found.peak - found.file - found.packed
            sizes = (found.file, found.packed, found.peak, beyond)
            print(f"| {Path(path).name} |", " | ".join(f"{size / 1e6:.0f}" for size in sizes), "|")
    print(f"\nAim: at most {AIM_MB} MB beyond the file and the packed weights.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
