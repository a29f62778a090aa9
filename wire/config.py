"""ServerConfig and the slice of it that each process gets. The flags are derived from these fields.

PURE: msgspec only. Built once by the launcher, never written after; a child receives its slice as
JSON on standard input. Metadata of a field: `description` is its help text, `extra["aliases"]`
other spellings of its flag.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .lora_config import LoRAConfig

SchedulePolicy = Literal["fcfs", "lpm", "dfs-weight", "hrrn", "priority"]
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "priority", "cost"]


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


class DoorConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address that HTTP listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of HTTP; 0 takes a free one")] = (
        30000
    )
    socket: Annotated[
        str | None,
        Meta(
            description="address of the socket door, e.g. tcp://127.0.0.1:31000; "
            "default: an ipc path that clients find from the port"
        ),
    ] = None
    max_queued_requests: Annotated[
        int, Meta(ge=1, description="requests in flight at the front before it answers 503")
    ] = 1024
    max_connections: Annotated[
        int, Meta(ge=1, description="open HTTP connections; more are answered with 503 and closed")
    ] = 2048
    max_body_bytes: Annotated[int, Meta(ge=1024, description="larger HTTP bodies get 413")] = (
        4 << 20
    )


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_running_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="requests computed at the same time",
            extra={"aliases": ["--max-num-seqs"]},
        ),
    ] = 64
    max_prefill_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="prompt tokens computed in one step at most, where prompts are not cut",
            extra={"aliases": ["--max-num-batched-tokens"]},
        ),
    ] = 4096
    chunked_prefill_size: Annotated[
        int,
        Meta(
            ge=0,
            description="prompt tokens computed in one step at most; longer prompts are cut; "
            "0: prompts are never cut",
        ),
    ] = 512
    mixed_chunk_size: Annotated[
        int,
        Meta(
            ge=0,
            description="token budget of a step that also decodes, where prompts may be cut: "
            "bounds how long running answers wait; 0: no bound of its own",
        ),
    ] = 64
    page_size: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="tokens in a KV page",
            extra={"aliases": ["--block-size"]},
        ),
    ] = 16
    schedule_conservativeness: Annotated[
        float, Meta(gt=0.0, description="above 1: fewer admissions and fewer retractions")
    ] = 1.0
    disable_radix_cache: Annotated[bool, Meta(description="no prefix reuse between requests")] = (
        False
    )
    schedule_policy: Annotated[
        SchedulePolicy, Meta(description="which waiting request starts next")
    ] = "fcfs"
    low_priority_first: Annotated[
        bool, Meta(description="smaller priorities go before larger ones")
    ] = False
    max_overtakes: Annotated[
        int,
        Meta(
            ge=0,
            description="later arrivals that may start before a waiting request; then it goes "
            "first, whatever the policy (but priority)",
        ),
    ] = 256
    prefix_group_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a waiting request lets another one compute a prompt prefix that they "
            "share from so many tokens on; 0: never",
        ),
    ] = 64
    max_skips: Annotated[
        int,
        Meta(
            ge=0,
            description="requests that may start before one that is next and does not fit the "
            "pool; then the pool is held for it",
        ),
    ] = 16
    lookahead: Annotated[
        int,
        Meta(ge=0, description="requests tried in one step behind one that does not fit"),
    ] = 16
    fairness: Annotated[
        Literal["none", "vtc"],
        Meta(description="vtc: tenants get equal shares, counted in tokens"),
    ] = "none"
    vtc_output_weight: Annotated[
        float,
        Meta(
            gt=0.0, description="with --fairness vtc: what an answer's token counts, a prompt's 1"
        ),
    ] = 2.0
    eviction_policy: Annotated[
        EvictionPolicy,
        Meta(
            description="which cached prefix goes first when pages are needed",
            extra={"aliases": ["--radix-eviction-policy"]},
        ),
    ] = "lru"
    kv_events: Annotated[
        str | None,
        Meta(description="address where changes of the prefix cache are published"),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        Meta(description="address where published changes can be asked for again"),
    ] = None
    admission: Annotated[
        Literal["ratio", "quantile"],
        Meta(
            description="how much of answers to come is reserved: a share of max_tokens that "
            "decays, or what finished answers predict"
        ),
    ] = "ratio"
    retraction_risk: Annotated[
        float,
        Meta(
            gt=0.0,
            lt=1.0,
            description="with --admission quantile: chance of a retraction that an admission "
            "may leave",
        ),
    ] = 0.05
    preemption_threshold: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="a request that comes next and does not fit retracts running ones whose "
            "priority is lower by at least this; default: never"
        ),
    ] = None
    max_waiting_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that wait at most; more get 503; default: no bound"),
    ] = None
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="prompt tokens that wait at most; more get 503; default: no bound"),
    ] = None
    queue_timeout: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        Meta(description="seconds until a request must have started, else 503; default: no bound"),
    ] = None
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        Meta(description="seconds until a request must have ended, else 408; default: no bound"),
    ] = None


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
    """Where the processes of one server meet: ipc sockets in its own 0700 directory."""

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
    scheduling: SchedulingConfig = SchedulingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    lora: LoRAConfig = LoRAConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig  # `model` is a local path by now
    doors: DoorConfig
    log_level: str
    links: Links
    lora: LoRAConfig = LoRAConfig()
    drain_timeout: float = RuntimeConfig().drain_timeout


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    scheduling: SchedulingConfig
    execution: ExecutionConfig
    log_level: str
    links: Links
    lora: LoRAConfig = LoRAConfig()


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    log_level: str
    links: Links


def contradiction(scheduling: SchedulingConfig) -> str | None:
    """Flags that are fine one by one but not together, with their values; None if all agree."""
    page = scheduling.page_size
    for flag, tokens in (
        ("--chunked-prefill-size", scheduling.chunked_prefill_size or page),
        ("--max-prefill-tokens", scheduling.max_prefill_tokens),
    ):
        if tokens < page:
            return f"{flag} {tokens} is less than one page (--page-size {page})"
    policy = scheduling.schedule_policy
    if scheduling.disable_radix_cache and policy in ("lpm", "dfs-weight"):
        return (
            f"--schedule-policy {policy} orders by cached prefixes: not with --disable-radix-cache"
        )
    if scheduling.kv_events_replay and not scheduling.kv_events:
        return "--kv-events-replay has nothing to replay without --kv-events"
    if scheduling.disable_radix_cache:
        if scheduling.eviction_policy != "lru":
            return f"--eviction-policy {scheduling.eviction_policy} with --disable-radix-cache"
        if scheduling.kv_events:
            return "--kv-events has nothing to publish with --disable-radix-cache"
    return None


def tp_contradiction(execution: ExecutionConfig, lora: LoRAConfig) -> str | None:
    """As `contradiction`, of what is not shared out over ranks."""
    if execution.tensor_parallel == 1:
        return None
    flag = f"--tp {execution.tensor_parallel}"
    if execution.dtype in ("int8", "int4"):
        return f"{flag} does not share out {execution.dtype} weights: it needs a --dtype of floats"
    if lora.enabled:
        adapters = "--lora" if lora.lora else "--lora-root"
        return f"{flag} does not share out adapters: not with {adapters}"
    return None
