"""The sections of the device check on a stand-in for a device, with interpreted kernels.

What they find of speed means nothing here; that they run, and find our answers right, does.
"""

from collections.abc import Iterator

import pytest
import torch
from runner.fake_device import FakeDevice

from tokenloom.bench.device import attention, equality, kernels, overlap, peers, server, steps
from tokenloom.bench.device.lab import Lab
from tokenloom.bench.device.results import Figure, Report
from tokenloom.bench.device.rig import HostTimer, Rig
from tokenloom.bench.device.sizes import (
    LARGE,
    AttentionSizes,
    EqualitySizes,
    KernelSizes,
    Sizes,
)
from tokenloom.kernels import backend

pytestmark = pytest.mark.slow

CONFIG = LARGE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TINY = Sizes(
    large=CONFIG,
    dtype=torch.float32,
    copy_bytes=1 << 16,
    matrix_side=32,
    decodes=((1, 8), (2, 8), (2, 1 << 20)),
    aimed=(2, 8),
    prompts=((1, 8),),
    steps=1,
    most_rows=2,
    most_prompt_tokens=16,
    adapters=(0, 1),
    rank=4,
    loop_answer=3,
    server_loads=((1, 8, 4),),
    server_flags=("--device", "cpu", "--dtype", "float32", "--kv-tokens", "256"),
    equality=EqualitySizes(
        CONFIG,
        requests=2,
        most_rows=2,
        prompt=6,
        answer=2,
        adapters=2,
        slots=1,
        rank=4,
        page_size=4,
        chunk=16,
    ),
    attention=AttentionSizes(2, 1, 16, 16, ((1, 20),), ((1, 6),), (1, 20)),
    kernels=KernelSizes(
        hidden=32,
        vocab=50,
        tokens=5,
        heads=((2, 1, 16),),
        contexts=(1, 18),
        extends=((3, 2),),
        dtypes=(torch.float32,),
        rank=4,
    ),
)


@pytest.fixture(scope="module", name="lab")
def _lab() -> Iterator[Lab]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small would wait for threads longer than they take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "on_triton", lambda x: True)
        yield Lab(Rig(FakeDevice(free=1 << 26), HostTimer()), TINY, 1e9, 1e9)
    torch.set_num_threads(threads)


@pytest.fixture
def report() -> Report:
    return Report(300.0, HostTimer().mark)


def names(report: Report) -> list[str]:
    return [figure.name for figure in report.figures]


def figure(report: Report, name: str) -> Figure:
    (found,) = [one for one in report.figures if one.name == name]
    return found


def test_environment(report: Report) -> None:
    lab = Lab(Rig(FakeDevice(free=1 << 26), HostTimer()), TINY)
    steps.environment(lab, report)
    assert lab.copy_rate > 0
    assert lab.matrix_rate > 0
    assert len(report.figures) == 3


def test_kernels(lab: Lab, report: Report) -> None:
    kernels.kernels(lab, report)
    assert len(report.figures) == 10
    assert {one.verdict for one in report.figures} == {"met"}


def test_a_wrong_kernel_is_named(lab: Lab, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])
    broken = kernels.Case("silu_mul", "bf16", 0.1, lambda: wrong)
    raises = kernels.Case("embedding", "fp16", 0.1, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    good = kernels.Case("rms_norm", "", 0.1, lambda: (torch.ones(2), torch.ones(2)))
    monkeypatch.setattr(kernels, "cases", lambda *_: [broken, raises, good])
    with pytest.raises(kernels.CheckFailed) as failure:
        kernels.kernels(lab, report)
    assert "silu_mul bf16: inf of the tolerance" in str(failure.value)
    assert "embedding fp16: ZeroDivisionError" in str(failure.value)
    assert names(report)[-1] == "rms_norm: error over tolerance"


def test_attention(lab: Lab, report: Report) -> None:
    attention.attention(lab, report)
    assert names(report) == [
        f"{lengths}: {who}"
        for lengths in ("decode 1 x 20", "prompt 1 x 6")
        for who in ("ours", "torch SDPA")
    ]
    assert figure(report, "decode 1 x 20: ours").aim == 0.8


def test_other_attention_is_not_begun_without_time(lab: Lab) -> None:
    report = Report(1.0, HostTimer().mark)
    attention.other_attention(lab, report)
    assert {one.note for one in report.figures} == {"no time left"}


def test_answers_are_equal(lab: Lab, report: Report) -> None:
    equality.equality(lab, report)
    assert [one.value for one in report.figures] == [4.0, 3.0, 0.0, 1.0, 1.0, 1.0]


def test_steps(lab: Lab, report: Report) -> None:
    steps.decode(lab, report)
    steps.prefill(lab, report)
    assert figure(report, "2 rows, context 8: share of the floor").aim == 0.85
    assert "do not fit" in figure(report, "2 rows, context 1048576").note
    assert figure(report, "1 x 8: share of the matrix rate").aim == 0.6


def test_the_loop_and_adapters(lab: Lab, report: Report) -> None:
    overlap.loop(lab, report)
    assert figure(report, "graphs, overlapped: over the device").aim == 1.02
    assert figure(report, "eager: step").value > 0
    steps.lora(lab, report)
    assert figure(report, "0 adapters, 8 slots: step").value > 0
    assert figure(report, "1 adapters over none").value > 0


# Its new name is not known to the releases that devices have.
@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_transformers(lab: Lab, report: Report) -> None:
    peers.transformers_peer(lab, report)
    assert figure(report, "eager: step").value > 0
    assert figure(report, "captured: step").value > 0


def test_the_server(lab: Lab, report: Report) -> None:
    server.server(lab, report)
    assert figure(report, "1 in flight, 8 -> 4: output").value > 0


def test_a_server_that_does_not_start_says_why(report: Report) -> None:
    sizes = Sizes(large=CONFIG, server_flags=("--device", "abacus"))
    with pytest.raises(server.CheckFailed, match="abacus"):
        server.server(Lab(Rig(FakeDevice(), HostTimer()), sizes), report)
