"""The C ABI of the native CPU library, bound with ctypes.

Loaded after torch, so that both share one OpenMP runtime. If the library was not built
(TOKENLOOM_NATIVE=0 at installation), `load` raises NativeMissing and callers use torch. Called by
kernels/, and by the runner when it starts.
"""

import ctypes
import importlib.util
import platform
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache

import torch  # noqa: F401  (brings the OpenMP runtime that the library shares)

INT8, INT4, INT8_SUB = 0, 1, 2  # WeightKind
FLOAT_TO_INT8, FLOAT_TO_INT4, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q8_0 = range(5)  # RowFormat
KV_BF16, KV_INT8 = 0, 1  # KvKind
STORE, ADD, SILU_MUL = 0, 1, 2  # Epilogue
BLOCK = 16  # weight rows (outputs) in a packed block
LORA_RANKS, LORA_INPUTS = 8, 4  # tile of an adapter's A: one 64-byte cache line in bf16
GROUP = 64  # inputs that share one activation scale
PHASES = (  # profiled phases of a step, in the order of the library's counters
    "embed",
    "norm",
    "qkv",
    "rotate",
    "attend",
    "merge",
    "o",
    "gate_up",
    "quantise",
    "down",
    "head",
)


_PLAIN = "plain C++ (this processor has none of the instructions that make it fast)"
_X86_LEVELS = (  # indexed by tl_best_isa
    _PLAIN,
    "AVX2 (integer products take several instructions each)",
    "AVX-VNNI (integer products of 256 bits)",
    "AVX-512 VNNI (integer products of 512 bits, attention in bfloat16 by AVX2)",
    "AVX-512 VNNI and BF16 (integer and bfloat16 products of 512 bits, its fastest)",
)
_ARM_LEVELS = (_PLAIN, "NEON with dot products (its fastest on Arm)")


class NativeMissing(RuntimeError):
    """The native library is not built or cannot be loaded; the message says which."""


class Weight(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("k_pad", c_int32),
        ("kind", c_int32),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("k_cache", "v_cache")),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        *((n, c_int32) for n in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((n, c_int32) for n in ("vocab", "num_layers", "page_size", "threads", "kv_kind")),
        ("eps", c_float),
        ("cos_sin", c_void_p),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_requests", "num_tokens", "num_samples")),
        *((name, c_void_p) for name in ("prefix_lens", "extend_lens", "rows", "page_table")),
        ("page_table_stride", c_int64),
        *((name, c_void_p) for name in ("input_ids", "samples", "logits")),
        ("logits_stride", c_int64),
        ("adapters", c_void_p),
        ("max_rank", c_int32),
    ]


class LoraPart(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("a", "b")),
        *((name, c_int32) for name in ("rank", "first_block", "block_step", "num_blocks")),
    ]


class LoraLinear(ctypes.Structure):
    _fields_ = [("parts", LoraPart * 3)]


class LoraAdapter(ctypes.Structure):
    _fields_ = [
        ("linears", POINTER(LoraLinear)),
        *((name, LoraLinear) for name in ("head", "embedding")),
    ]


class Choice(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("n", c_int32),
        ("temperature", c_float),
        ("top_k", c_int32),
        *((name, c_float) for name in ("top_p", "min_p")),
        *((name, c_uint32) for name in ("first", "second")),
        ("id", c_int32),
    ]


class PackJob(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("data", c_void_p),
        ("scales", c_void_p),
        *((name, c_int32) for name in ("n", "k", "k_pad", "format")),
        *((name, c_int32) for name in ("first_block", "block_step", "threads")),
    ]


@cache
def load() -> ctypes.CDLL:
    """Load the library once per process. Raises NativeMissing."""
    spec = importlib.util.find_spec(f"{__package__}._native")
    if spec is None or spec.origin is None:
        raise NativeMissing(
            "the native CPU library was not built: install a C++17 compiler with OpenMP, then "
            "tokenloom again without TOKENLOOM_NATIVE=0"
        )
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        raise NativeMissing(f"the native CPU library cannot be loaded: {error}") from error
    _declare(library)
    return library


@cache
def find() -> ctypes.CDLL | None:
    """Return the library, or None if it cannot be loaded."""
    try:
        return load()
    except NativeMissing:
        return None


def instruction_set() -> str:
    """Describe the instruction set the library uses on this machine. Raises NativeMissing."""
    levels = _X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else _ARM_LEVELS
    return levels[load().tl_best_isa()]


def _declare(library: ctypes.CDLL) -> None:
    library.tl_best_isa.restype = c_int32
    library.tl_block_bytes.restype = c_int64
    library.tl_block_scales.restype = c_int64
    library.tl_pack.argtypes = [POINTER(PackJob)]
    library.tl_pack.restype = c_int32
    library.tl_unpack_row.argtypes = [POINTER(Weight), c_int32, c_void_p]
    library.tl_engine_new.argtypes = [
        POINTER(Shape),
        POINTER(Layer),
        POINTER(Weight),
        POINTER(Weight),
        c_void_p,
        c_int32,
    ]
    library.tl_engine_new.restype = c_void_p
    library.tl_engine_pin.argtypes = [c_void_p, c_void_p]
    library.tl_engine_free.argtypes = [c_void_p]
    library.tl_engine_profile.argtypes = [c_void_p, c_void_p]
    library.tl_engine_forward.argtypes = [c_void_p, POINTER(Step)]
    for name in (library.tl_engine_linear, library.tl_engine_attention):
        name.argtypes = [c_void_p]
        name.restype = c_char_p
    library.tl_choose.argtypes = [POINTER(Choice), c_int32, c_int32, c_int32]
    library.tl_choose.restype = None
    library.tl_linear.argtypes = [
        POINTER(Weight),
        c_void_p,
        c_int32,
        c_void_p,
        c_int64,
        c_int32,
        c_int32,
    ]
