"""Files of adapters: what is refused, by which words, and where files may lie."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenloom.model_files.errors import AdapterError
from tokenloom.scheduler_proc.models.config import ModelSpec, RopeSpec
from tokenloom.scheduler_proc.models.lora import EMBED, HEAD, LoRAAdapter
from tokenloom.scheduler_proc.runner.lora_loader import load_adapter

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=12,
    intermediate_size=20,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=30,
    context_length=64,
    rms_norm_eps=1e-6,
    rope=RopeSpec(10000.0),
    tied=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
LAYER_0 = "base_model.model.model.layers.0"
EMBEDDING = "base_model.model.model.embed_tokens"


class Files:
    """An adapter of rank 2 for k and down, to be spoilt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "adapter"
        self.path.mkdir()
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["k_proj", "down_proj"],
        }
        sizes = {"self_attn.k_proj": (12, 4), "mlp.down_proj": (20, 12)}
        self.tensors: dict[str, torch.Tensor] = {}
        for layer in range(2):
            for name, (inputs, outputs) in sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                self.tensors[f"{prefix}.lora_A.weight"] = torch.randn(2, inputs)
                self.tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 2)

    def write(self) -> None:
        (self.path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "adapter_model.safetensors")

    def load(self, path: str | Path = "adapter", max_rank: int = 8) -> LoRAAdapter:
        return load_adapter(Path(path), SPEC, [self.root], max_rank)

    def target(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """One more module."""
        self.config["target_modules"].append(module.rpartition(".")[2])
        names = ("lora_embedding_A", "lora_embedding_B")
        if module == "lm_head":
            names = ("lora_A.weight", "lora_B.weight")
        for name, tensor in zip(names, (a, b), strict=True):
            self.tensors[f"base_model.model.{module}.{name}"] = tensor


@pytest.fixture
def files(tmp_path: Path) -> Files:
    root = tmp_path / "root"
    root.mkdir()
    return Files(root)


def test_every_tensor_finds_its_place(files: Files) -> None:
    files.target("model.embed_tokens", torch.randn(2, 30), torch.randn(12, 2))
    files.target("lm_head", torch.randn(2, 12), torch.randn(30, 2))
    files.tensors[f"{EMBEDDING}.base_layer.weight"] = torch.randn(30, 12)
    files.write()
    adapter = files.load()
    assert list(adapter.modules) == [EMBED, (0, "k"), (0, "down"), (1, "k"), (1, "down"), HEAD]
    assert adapter.rank == 2
    down = adapter.modules[0, "down"]
    assert torch.equal(down.a, files.tensors[f"{LAYER_0}.mlp.down_proj.lora_A.weight"])
    assert torch.equal(down.b, files.tensors[f"{LAYER_0}.mlp.down_proj.lora_B.weight"] * 3)
    assert torch.equal(adapter.modules[EMBED].a, files.tensors[f"{EMBEDDING}.lora_embedding_A"])
    assert adapter.modules[HEAD].b.shape == (30, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_floats_become_float32(dtype: torch.dtype, files: Files) -> None:
    files.tensors = {name: tensor.to(dtype) for name, tensor in files.tensors.items()}
    files.write()
    k = files.load().modules[0, "k"]
    assert (k.a.dtype, k.b.dtype) == (torch.float32, torch.float32)
    assert torch.equal(k.a, files.tensors[f"{LAYER_0}.self_attn.k_proj.lora_A.weight"].float())


REFUSED_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora True is not supported"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
    "lora_bias": ({"lora_bias": True}, "lora_bias True"),
    "saved": ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
    "tokens": ({"trainable_token_indices": [3]}, r"trainable_token_indices \[3\]"),
    "qalora": ({"use_qalora": True}, "use_qalora"),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "parameters": ({"target_parameters": ["a"]}, "target_parameters"),
    "tying": ({"ensure_weight_tying": True}, "ensure_weight_tying"),
    "of_the_future": ({"use_hyperlora": {"depth": 3}}, "use_hyperlora"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' .* changed base weights"),
    "type": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    "no_type": ({"peft_type": None}, "peft_type None"),
    "task": ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
    "no_targets": ({"target_modules": None}, "target_modules"),
    "no_match": ({"target_modules": ["c_attn"]}, r"\['c_attn'\] name no module"),
    "bad_regex": ({"target_modules": "(q_proj"}, "'\\(q_proj' is no regular expression"),
    "bad_pattern": ({"rank_pattern": {"*": 2}}, "'\\*' is no regular expression"),
    "layers_of_a_regex": (
        {"target_modules": ".*k_proj", "layers_to_transform": [0]},
        "layers_to_transform and layers_pattern need target_modules as a list",
    ),
    "pattern_alone": ({"layers_pattern": "layers"}, "with layers_to_transform only"),
    "rank_0": ({"r": 0}, r"`int` >= 1 - at `\$.r`"),
    "rank_is_text": ({"r": "2"}, r"Expected `int`, got `str` - at `\$.r`"),
    "alpha": ({"lora_alpha": None}, r"\$.lora_alpha"),
    "rank": ({"r": 9}, "k_proj has rank 9, above --max-lora-rank 8"),
    "one_rank": (
        {"rank_pattern": {"1.mlp.down_proj": 64}},
        "layers.1.mlp.down_proj has rank 64, above --max-lora-rank 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED_KEYS)
def test_refused_by_the_key(case: str, files: Files) -> None:
    fields, said = REFUSED_KEYS[case]
    files.config |= fields
    files.write()
    with pytest.raises(AdapterError, match=said):
        files.load()


def test_keys_that_change_nothing_are_let_by(files: Files) -> None:
    files.config |= {
        "base_model_name_or_path": "/home/someone/another-name",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": "gaussian",
        "layer_replication": None,
        "lora_dropout": 0.1,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "modules_to_save": [],
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "task_type": "CAUSAL_LM",
    }
    files.write()
    assert files.load().rank == 2


def _unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.ones(12)


def _deep(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.2.self_attn.k_proj.lora_A.weight"] = torch.ones(2, 12)


def _untargeted(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.v_proj.lora_A.weight"] = torch.ones(2, 12)


def _resized(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EMBEDDING}.weight"] = torch.ones(33, 12)


def _copy_of_a_matrix(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.base_layer.weight"] = torch.ones(4, 12)


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER_0}.mlp.down_proj.lora_B.weight"]


def _wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.mlp.down_proj.lora_A.weight"] = torch.ones(2, 24)


def _turned(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.mlp.down_proj.lora_B.weight"] = torch.ones(2, 12)


def _of_another_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_A.weight"] = torch.ones(3, 12)


def _not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_A.weight"][1, 3] = torch.nan


def _infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_B.weight"][1, 0] = -torch.inf


def _overflowing(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_B.weight"][1, 0] = 3e38


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_B.weight"] = torch.ones(4, 2, dtype=torch.int8)


def _doubles(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER_0}.self_attn.k_proj.lora_B.weight"] = torch.ones(4, 2, dtype=torch.float64)


REFUSED_TENSORS: dict[Callable[[dict[str, torch.Tensor]], None], str] = {
    _unknown: r"holds tensors .*: base_model.model.model.norm.weight$",
    _deep: r"holds tensors .*: .*layers.2.self_attn.k_proj.lora_A.weight$",
    _untargeted: r"holds tensors that the config does not target.*layers.0.self_attn.v_proj.lora_A",
    _resized: r"holds tensors .*: base_model.model.model.embed_tokens.weight$",
    _copy_of_a_matrix: r"holds tensors .*k_proj.base_layer.weight$",
    _missing: r"lacks tensors .*: base_model.model.model.layers.0.mlp.down_proj.lora_B.weight$",
    _wide: r"0.mlp.down_proj.lora_A.weight has shape \[2, 24\], .* ask for \[2, 20\]",
    _turned: r"0.mlp.down_proj.lora_B.weight has shape \[2, 12\], .* ask for \[12, 2\]",
    _of_another_rank: r"k_proj.lora_A.weight has shape \[3, 12\], .* ask for \[2, 12\]",
    _not_a_number: r"0.self_attn.k_proj.lora_A.weight holds values that are not finite",
    _infinite: r"0.self_attn.k_proj.lora_B.weight holds values that are not finite",
    _overflowing: r"0.self_attn.k_proj.lora_B.weight overflows .* scaling 3.0",
    _integers: r"0.self_attn.k_proj.lora_B.weight is of type torch.int8",
    _doubles: r"0.self_attn.k_proj.lora_B.weight is of type torch.float64",
}


@pytest.mark.parametrize("spoil", REFUSED_TENSORS, ids=lambda spoil: spoil.__name__)
def test_refused_by_the_tensor(
    spoil: Callable[[dict[str, torch.Tensor]], None], files: Files
) -> None:
    spoil(files.tensors)
    files.write()
    with pytest.raises(AdapterError, match=REFUSED_TENSORS[spoil]):
        files.load()


def test_an_embedding_of_another_vocabulary_is_refused(files: Files) -> None:
    files.target("model.embed_tokens", torch.randn(2, 30), torch.randn(12, 2))
    files.tensors[f"{EMBEDDING}.base_layer.weight"] = torch.randn(33, 12)
    files.write()
    with pytest.raises(
        AdapterError, match=r"\[33, 12\] in training, .* \[30, 12\]: .*added tokens"
    ):
        files.load()


def test_copies_of_the_embedding_belong_to_adapters_of_it(files: Files) -> None:
    files.tensors[f"{EMBEDDING}.base_layer.weight"] = torch.randn(30, 12)
    files.write()
    with pytest.raises(AdapterError, match=r"embed_tokens.base_layer.weight"):
        files.load()


def test_paths_below_the_root(files: Files, tmp_path: Path) -> None:
    files.write()
    (files.root / "inner").symlink_to("adapter")  # links that stay inside are as good as any path
    for path in ("adapter", files.path, "inner", "inner/../adapter"):
        assert files.load(path).rank == 2
    (tmp_path / "empty").mkdir()
    roots = [tmp_path / "gone", tmp_path / "empty", files.root]
    assert load_adapter(Path("adapter"), SPEC, roots, 8).rank == 2


def test_paths_that_lead_elsewhere(files: Files, tmp_path: Path) -> None:
    files.write()
    outside = tmp_path / "outside"
    files.path.rename(outside)
    (files.root / "link").symlink_to(outside)
    (files.root / "loop").symlink_to("loop")
    (files.root / "file").touch()
    paths = ["link", "../outside", outside, "loop", "file", "gone", "a\0b", "x" * 5000, "/"]
    for path in paths:
        with pytest.raises(AdapterError, match="no directory below an adapter root"):
            files.load(path)
    with pytest.raises(AdapterError, match=r"\(none is configured\)"):
        load_adapter(outside, SPEC, [], 8)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_lead_elsewhere(name: str, files: Files, tmp_path: Path) -> None:
    files.write()
    file, outside = files.path / name, tmp_path / name
    file.rename(outside)
    with pytest.raises(AdapterError, match=f"there is no .*/{name}"):
        files.load()
    file.symlink_to(outside)
    with pytest.raises(AdapterError, match=f"{name} is a link that leads out of"):
        files.load()
    file.unlink()
    (files.root / "blob").write_bytes(outside.read_bytes())  # as in the cache of the hub
    file.symlink_to("../blob")
    assert files.load().rank == 2
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(AdapterError, match=f"{name} is no regular file"):
        files.load()
    file.unlink()
    file.mkdir()
    with pytest.raises(AdapterError, match=f"cannot read .*/{name}: Is a directory"):
        files.load()


def test_pickles_are_named_and_left_closed(files: Files) -> None:
    files.write()
    (files.path / "adapter_model.safetensors").rename(files.path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is a pickle, which is not read"):
        files.load()


def test_sizes_are_bounded_before_reading(files: Files) -> None:
    files.write()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.truncate(files.path / name, 1 << 40)  # sparse: reading it would take all memory
        with pytest.raises(AdapterError, match=f"{name} has {1 << 40} bytes, more than any"):
            files.load()
        files.write()


def test_a_config_of_endless_depth(files: Files) -> None:
    files.write()
    (files.path / "adapter_config.json").write_bytes(b'{"a":' + b"[" * 100_000)
    with pytest.raises(AdapterError, match=r"adapter_config.json is no JSON object"):
        files.load()


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, (1 << 60).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0{}x"]
)
def test_files_that_are_not_what_they_seem(data: bytes, files: Files) -> None:
    files.write()
    (files.path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(AdapterError, match=r"is no safetensors file"):
        files.load()
    (files.path / "adapter_config.json").write_bytes(data)
    with pytest.raises(AdapterError, match=r"adapter_config.json is no JSON object"):
        files.load()
