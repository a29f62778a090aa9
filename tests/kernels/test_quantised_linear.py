"""Packed int8 and int4 linear maps: formats, every instruction set here, independence of rows."""

import re
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from support.source_tree import ROOT

from tokenloom.kernels.cpu import native
from tokenloom.kernels.quantised_linear import (
    Kind,
    RowFormat,
    Rows,
    pack,
    quantised_linear,
    quantised_linear_reference,
    unpack,
)

ISAS = range(native.load().tl_best_isa() + 1)
SHAPES = [(1, 1), (16, 64), (17, 65), (48, 100), (130, 33), (96, 576)]  # n, k


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(weight: torch.Tensor) -> Rows:
    return Rows(weight, weight.shape[1])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_rounds_to_the_nearest_value_of_the_format(kind: Kind, n: int, k: int) -> None:
    weight = random(n, k)
    got = unpack(pack([rows(weight)], kind))
    size, levels = (64, 254) if kind == "int8" else (32, 15)
    for start in range(0, k, size):
        group, back = weight[:, start : start + size], got[:, start : start + size]
        padded = torch.nn.functional.pad(group, (0, size - group.shape[1]))
        span = padded.amax(1) - padded.amin(1)
        step = 2 * padded.abs().amax(1) / levels if kind == "int8" else span / levels
        assert ((group - back).abs().amax(1) <= step * 0.75 + 1e-6).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13])
def test_against_the_reference(isa: int, kind: Kind, n: int, k: int, tokens: int) -> None:
    weight = pack([rows(random(n, k))], kind)
    x = random(tokens, k, seed=1)
    x[0] *= 100.0  # an outlier row must not touch the others
    expected = quantised_linear_reference(x, unpack(weight))
    got = quantised_linear(x, weight, isa=isa)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_does_not_depend_on_its_batch_mates(isa: int, kind: Kind) -> None:
    weight = pack([rows(random(80, 200))], kind)
    x = random(23, 200, seed=2)
    whole = quantised_linear(x, weight, isa=isa)
    for start, count in [(0, 1), (3, 1), (2, 5), (7, 6), (4, 13)]:
        part = quantised_linear(x[start : start + count], weight, isa=isa)
        assert torch.equal(part, whole[start : start + count])


@pytest.mark.parametrize("isa", ISAS)
def test_adding_and_bias(isa: int) -> None:
    plain, bias = random(40, 64), random(40, seed=3)
    weight = pack([rows(plain)], "int8", biases=[bias])
    x, residual = random(7, 64, seed=4), random(7, 40, seed=5)
    expected = quantised_linear_reference(x, unpack(weight)) + bias
    torch.testing.assert_close(quantised_linear(x, weight, isa=isa), expected, rtol=0, atol=1e-4)
    got = quantised_linear(x, weight, out=residual.clone(), isa=isa)
    torch.testing.assert_close(got, residual + expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("inner", [16, 40, 112])
def test_gate_and_up_in_turns(isa: int, kind: Kind, inner: int) -> None:
    gate, up, biases = random(inner, 96), random(inner, 96, seed=1), random(2, inner, seed=2)
    weight = pack([rows(gate), rows(up)], kind, alternate=True, biases=list(biases))
    alone = [unpack(pack([rows(part)], kind)) for part in (gate, up)]
    x = random(9, 96, seed=6)
    g, u = (
        quantised_linear_reference(x, part) + bias for part, bias in zip(alone, biases, strict=True)
    )
    got = quantised_linear(x, weight, silu_mul=True, isa=isa)[:, :inner]
    torch.testing.assert_close(got, torch.nn.functional.silu(g) * u, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_held_exactly(isa: int, name: RowFormat) -> None:
    blocks = quantize(random(34, 160).numpy(), GGMLQuantizationType[name])
    weight = pack([Rows(torch.from_numpy(blocks), 160, name)], "int4")
    exact = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[name]))
    torch.testing.assert_close(unpack(weight), exact, rtol=1e-6, atol=1e-7)
    x = random(8, 160, seed=7)
    expected = quantised_linear_reference(x, exact)
    torch.testing.assert_close(quantised_linear(x, weight, isa=isa), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_makes_its_row_none_and_no_other(isa: int) -> None:
    """Wherever it stands: a wrong answer must be seen to be one."""
    weight = pack([rows(random(20, 100))], "int8")
    x = random(7, 100)
    clean = quantised_linear(x, weight, isa=isa)
    x[1, 5], x[2, 63], x[3, 99], x[4, 64:66] = torch.nan, torch.inf, -torch.inf, torch.nan
    got = quantised_linear(x, weight, isa=isa)
    assert got[1:5].isnan().all()
    assert torch.equal(got[[0, 5, 6]], clean[[0, 5, 6]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tiny", [0.0, 1e-44, 1e-38, 1e-36])
def test_a_row_of_almost_nothing_gives_almost_nothing(isa: int, tiny: float) -> None:
    weight = pack([rows(random(20, 64))], "int8")
    got = quantised_linear(torch.full((2, 64), tiny), weight, isa=isa)
    assert (got.abs() <= 100 * tiny).all()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Rows(torch.zeros(8, 64), 64), Rows(torch.zeros(8, 64), 64)], "multiple of 16"),
        ([Rows(torch.zeros(16, 64), 64), Rows(torch.zeros(16, 32), 32)], "share"),
        ([Rows(torch.zeros(16, 64).half(), 64)], "float32"),
        ([Rows(torch.zeros(16, 30, dtype=torch.uint8), 64, "Q4_0")], "18 bytes"),
    ],
)
def test_what_cannot_be_packed_is_refused(parts: list[Rows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(parts, "int8")


def test_every_level_of_the_library_has_a_name_for_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = (ROOT / "kernels/cpu/src/api.cpp").read_text()
    x86, arm = (levels.split(",") for levels in re.findall(r"^  (kAnyMachine,.*)$", source, re.M))
    for machine, levels in (("x86_64", x86), ("aarch64", arm)):
        monkeypatch.setattr(native.platform, "machine", lambda machine=machine: machine)
        names = []
        for level in range(len(levels)):
            library = SimpleNamespace(tl_best_isa=lambda level=level: level)
            monkeypatch.setattr(native, "load", lambda library=library: library)
            names.append(native.instruction_set())
        assert len(set(names)) == len(levels)
        assert "plain C++" in names[0]
        assert "its fastest" in names[-1]
