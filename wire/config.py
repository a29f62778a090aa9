"""ServerConfig and the part of it that each process gets. The flags are derived from these fields.

PURE: msgspec only. The launcher builds it once; a child receives its part as JSON on standard
input. Metadata of a field: `description` is its help text, `extra["aliases"]` lists other spellings
of its flag.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .door_config import DoorConfig
from .lora_config import LoRAConfig
from .scheduling_config import SchedulingFlags


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str | None,
        Meta(
            description="directory in Hugging Face layout, .gguf file or hub name; "
            "default: the embedded SmolLM2-135M-Instruct",
            extra={"aliases": ["--model-path"]},
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="name in /v1/models and answers; default: from the model")
    ] = None
    revision: Annotated[str | None, Meta(description="branch, tag or commit of a hub model")] = None
    context_length: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(
            description="longest prompt plus answer in tokens; default: the model's own limit",
            extra={"aliases": ["--max-model-len"]},
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="dummy: random weights from the config alone"),
    ] = "auto"


class ExecutionConfig(msgspec.Struct, frozen=True, kw_only=True):
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="where the model runs; auto: the first CUDA device, or the CPU"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "int4", "int8", "bfloat16", "float16", "float32"],
        Meta(
            description="how weights are held and multiplied; auto: on a CPU int4 for a file of "
            "4-bit weights, else int8, and float32 where the native library is missing; on a CUDA "
            "device bfloat16"
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"],
        Meta(
            description="how keys and values are kept; int8 with the int8 and int4 modes, fp8 on a "
            "CUDA device, halve their memory; auto: bfloat16, in a float mode what it computes in"
        ),
    ] = "auto"
    cuda_graph_max_bs: Annotated[
        int,
        Meta(ge=0, description="largest decode step that is captured as a CUDA graph; 0: none"),
    ] = 256
    disable_cuda_graph: Annotated[
        bool, Meta(description="run every step of a CUDA device eagerly, as to look for an error")
    ] = False
    kv_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="KV pool capacity in tokens; default: from free memory",
            extra={"aliases": ["--max-total-tokens"]},
        ),
    ] = None
    mem_fraction: Annotated[
        Annotated[float, Meta(gt=0.0, lt=1.0)] | None,
        Meta(
            description="share of the memory left after the weights that the KV pool may take; "
            "default: 0.5, on a CUDA device 0.9",
            extra={"aliases": ["--mem-fraction-static", "--gpu-memory-utilization"]},
        ),
    ] = None
    cpu_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="threads of the model; default: one per physical core"),
    ] = None
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="processes that share the model's heads and weights, each with a CUDA "
            "device of its own",
            extra={"aliases": ["--tp", "--tp-size", "--tensor-parallel-size"]},
        ),
    ] = 1
    disable_overlap_schedule: Annotated[
        bool,
        Meta(
            description="on a GPU, plan a step only after the result of the last one has been "
            "read; on a CPU that is so anyway"
        ),
    ] = False


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line shown")
    ] = "info"
    start_timeout: Annotated[
        float, Meta(gt=0.0, description="seconds until every process must be ready")
    ] = 600.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0.0, description="seconds that running requests get after SIGTERM; then 503"),
    ] = 30.0


class Links(msgspec.Struct, frozen=True):
    """ipc addresses of the mailboxes of one server, in its own 0700 directory."""

    run_dir: str

    @property
    def launcher(self) -> str:
        return f"ipc://{self.run_dir}/launcher.sock"

    @property
    def scheduler(self) -> str:
        return f"ipc://{self.run_dir}/scheduler.sock"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.run_dir}/detokenizer.sock"

    @property
    def front(self) -> str:
        return f"ipc://{self.run_dir}/front.sock"

    def rank(self, rank: int) -> str:
        return f"ipc://{self.run_dir}/rank{rank}.sock"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig = ModelConfig()
    doors: DoorConfig = DoorConfig()
    scheduling: SchedulingFlags = SchedulingFlags()
    execution: ExecutionConfig = ExecutionConfig()
    lora: LoRAConfig = LoRAConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig  # `model` is a local path
    doors: DoorConfig
    log_level: str
    links: Links
    lora: LoRAConfig = LoRAConfig()
    drain_timeout: float = RuntimeConfig().drain_timeout


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    scheduling: SchedulingFlags
    execution: ExecutionConfig
    log_level: str
    links: Links
    lora: LoRAConfig = LoRAConfig()


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    log_level: str
    links: Links


def tp_contradiction(execution: ExecutionConfig, lora: LoRAConfig) -> str | None:
    """Return why these flags do not work with tensor parallelism; None if they do."""
    if execution.tensor_parallel == 1:
        return None
    flag = f"--tp {execution.tensor_parallel}"
    if execution.dtype in ("int8", "int4"):
        return f"{flag} does not share out {execution.dtype} weights: it needs a --dtype of floats"
    if lora.enabled:
        adapters = "--lora" if lora.lora else "--lora-root"
        return f"{flag} does not share out adapters: not with {adapters}"
    return None
