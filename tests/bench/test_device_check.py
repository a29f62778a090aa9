"""What the device check decides without a device: budgets, failures, floors, the starter."""

import json
import math
import threading
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tokenloom.bench import device_check
from tokenloom.bench.device import check, equality, floors
from tokenloom.bench.device.loop import SLOT_WRITES, Mailbox, Request
from tokenloom.bench.device.results import (
    CheckFailed,
    Figure,
    Report,
    SectionResult,
    Skip,
    as_text,
    missed,
)
from tokenloom.bench.device.rig import HostTimer, Rig, waits_noted
from tokenloom.bench.device.sections import Course, Section
from tokenloom.bench.device.sizes import EqualitySizes, Sizes
from tokenloom.scheduler_proc.models.config import parse_spec
from tokenloom.scheduler_proc.runner.cuda_graph import ladder
from tokenloom.wire.messages import BatchTokenIDOut, DrainReq, Finish, TokenIDOut
from tokenloom.wire.sampling import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_figures_say_whether_they_met_their_aims() -> None:
    figures = [
        Figure("share", 0.9, aim=0.85),
        Figure("short", 0.5, aim=0.85),
        Figure("ratio", 1.01, aim=1.02, at_most=True),
        Figure("slow", 1.5, aim=1.02, at_most=True),
        Figure("unknown", math.nan, aim=1.0, note="no memory"),
        Figure("plain", 12345.678, "ms"),
    ]
    assert [one.verdict for one in figures] == ["met", "missed", "met", "missed", "", ""]
    results = [SectionResult("decode", "ok", 1.25, figures)]
    assert missed(results) == ["decode: short", "decode: slow"]
    head, *lines = as_text(results).splitlines()
    assert head == "decode: ok (1.2 s)"
    assert " ".join(lines[1].split()) == "short 0.5 aim at least 0.85: missed"
    assert " ".join(lines[4].split()) == "unknown - aim at least 1: unknown no memory"
    assert lines[5].split() == ["plain", "1.235e+04", "ms"]


def test_a_section_that_raises_does_not_stop_the_others() -> None:
    def broken(report: Report) -> None:
        report.add("before", 1.0)
        raise ZeroDivisionError("oh")

    def wrong(report: Report) -> None:
        raise CheckFailed("2 ids differ")

    def absent(report: Report) -> None:
        raise Skip("no such package")

    told: list[int] = []
    course = Course(100.0, lambda results: told.append(len(results)), Clock())
    plays = [("a", broken), ("b", wrong), ("c", absent), ("d", lambda report: None)]
    results = course.play([Section(name, 10.0, run) for name, run in plays])
    assert [(one.name, one.status, one.reason) for one in results] == [
        ("a", "failed", "ZeroDivisionError: oh"),
        ("b", "failed", "2 ids differ"),
        ("c", "skipped", "no such package"),
        ("d", "ok", ""),
    ]
    assert [one.name for one in results[0].figures] == ["before"]
    assert told == [1, 2, 3, 4]


def test_time_is_each_sections_own_and_all_of_it_is_bounded() -> None:
    clock = Clock()
    left = []

    def slow(report: Report) -> None:
        left.append(report.left)
        clock.now += 6.0
        assert not report.has_time("another case")

    course = Course(15.0, clock=clock)
    results = course.play([Section(name, 5.0, slow) for name in "abcd"])
    assert left == [5.0, 5.0, 3.0], "what is left of the whole bounds the last"
    assert [one.status for one in results] == ["ok", "ok", "ok", "skipped"]
    assert results[0].seconds == 6.0
    assert results[0].figures[0].note == "no time left"


def test_what_hangs_is_reported_with_what_came_before() -> None:
    clock = Clock()
    course = Course(100.0, clock=clock)
    seen: list[SectionResult] = []

    def hangs(report: Report) -> None:
        report.add("first", 2.0)
        clock.now += 100.0
        seen.extend(course.cut_short())

    course.play([Section("good", 9.0, lambda report: None), Section("bad", 9.0, hangs)])
    good, bad = seen
    assert (good.name, good.status) == ("good", "ok")
    assert (bad.name, bad.status, bad.seconds) == ("bad", "failed", 100.0)
    assert bad.figures == [Figure("first", 2.0)]
    assert "still running" in bad.reason


def test_sections_fit_into_the_whole_and_are_asked_for_by_name() -> None:
    assert sum(seconds for _, seconds, _ in check.SECTIONS) <= check.TOTAL_SECONDS <= 360
    names = [name for name, *_ in check.SECTIONS]
    assert [one.name for one in check.sections(lab=None, only=["prefill", "decode"])] == [  # type: ignore[arg-type]
        "environment",
        "decode",
        "prefill",
    ]
    assert len(check.sections(lab=None)) == len(set(names))  # type: ignore[arg-type]


def test_the_exit_status_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    figure = Figure("step", math.nan, "ms", aim=2.0, note="too large")
    ok = SectionResult("decode", "ok", 1.0, [figure, Figure("share", 0.1, aim=0.5)])
    assert check.conclude([ok], {"device": "none"}, file) == 0
    said = json.loads(file.read_bytes())
    assert said["machine"] == {"device": "none"}
    assert said["missed_aims"] == ["decode: share"]
    assert said["sections"][0]["figures"][0]["value"] is None
    assert "aims missed: decode: share" in capsys.readouterr().out
    failed = SectionResult("kernels", "failed", 1.0, [], "wrong")
    assert check.conclude([ok, failed], {}, None) == 1


def test_the_alarm_ends_what_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    class Child:
        def kill(self) -> None:
            statuses.append(9)

    class Process:
        def children(self, recursive: bool) -> list[Child]:
            return [Child()] * recursive

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(check.psutil, "Process", Process)
    course = Course(100.0)
    file = tmp_path / "out.json"

    def stuck(report: Report) -> None:
        ended.wait()

    with check.alarm(course, 0.05, {}, file):
        course.play([Section("stuck", 50.0, stuck)])
    assert statuses == [9, 1], "its children first"
    (section,) = json.loads(file.read_bytes())["sections"]
    assert (section["name"], section["status"]) == ("stuck", "failed")
    assert "stuck: failed" in capsys.readouterr().out


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_floors_of_llama_8b() -> None:
    spec = parse_spec(Sizes().large)
    assert floors.layer_parameters(spec) == 32 * (2 * 4096 * 5120 + 3 * 4096 * 14336)
    assert floors.model_bytes(spec, 2) == pytest.approx(16.06e9, rel=1e-3)
    head = 128256 * 4096 * 2
    assert floors.model_bytes(spec, 2) - floors.weight_bytes(spec, 2) == head
    assert floors.kv_bytes_per_token(spec, 2) == 128 << 10
    more = floors.decode_bytes(spec, 32, 1024, 2) - floors.weight_bytes(spec, 2)
    assert more == 32 * 1024 * (128 << 10)
    assert floors.attention_flops(4096, 3) == 4 * 4096 * (1 + 2 + 3)
    flops = floors.prefill_flops(spec, 2, 100)
    maps = 2 * floors.layer_parameters(spec) * 200
    assert flops == maps + 2 * 32 * floors.attention_flops(4096, 100) + 4 * 128256 * 4096


def test_what_does_not_fit_says_why() -> None:
    fits = floors.what_fits([(8, 100), (9, 100)], 800)
    assert fits == {(8, 100): "", (9, 100): "900 tokens do not fit a pool of 800"}


def test_a_staircase_has_a_step_of_every_size() -> None:
    sizes = EqualitySizes(most_rows=12, slots=2, adapters=4)
    for adapters in (0, 2):
        stairs = equality.staircase(50, sizes, adapters)
        ends = [one.sampling.max_new_tokens for one in stairs]
        assert ends == list(range(2, 14)), "one ends with each step, the last of them alone"
        assert {one.lora_id for one in stairs} == ({1, 2} if adapters else {0})
        assert bool(stairs[-1].lora_id) == bool(adapters), "so that no step is without"
    assert ladder(12)[-1] == 12


def test_the_requests_ask_for_all_kinds() -> None:
    sizes = EqualitySizes()
    requests = equality.requests_of(sizes, 2048)
    assert len(requests) == 200
    assert {one.lora_id for one in requests} == set(range(sizes.adapters + 1))
    assert max(len(one.prompt) for one in requests) <= sizes.prompt
    assert {one.sampling.max_new_tokens for one in requests} == set(range(1, sizes.answer + 1))
    assert any(one.sampling.penalised for one in requests)
    assert equality.requests_of(sizes, 2048) == requests


def test_differing_answers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a hundred may differ, for rounding; two are no accident."""
    sizes = EqualitySizes(requests=98, most_rows=2, adapters=0)
    rids = range(1, sizes.requests + sizes.most_rows + 1)
    differing: list[int] = []

    def answers(bench: str, *_: object, overlap: bool, **__: object) -> tuple[object, object]:
        ids = {rid: [rid] for rid in rids}
        if bench == "eager":
            ids |= {rid: [0] for rid in differing}
        return ids, Counter({"graph 1": 3, "graph 2": 1})

    monkeypatch.setattr(equality, "_answers", answers)
    monkeypatch.setattr(
        equality, "_runner", lambda lab, model, graphs: "graphs" if graphs else "eager"
    )

    class FakeLab:
        def __init__(self) -> None:
            self.sizes = Sizes(equality=sizes)

        def dummy_model(self, config: object, dtype: object) -> tuple[object, object]:
            class Model:
                spec = parse_spec(sizes.config)

            return Model, {}

    for count, fails in ((0, False), (1, False), (2, True)):
        differing[:] = rids[:count]
        report = Report(10.0, Clock())
        if fails:
            with pytest.raises(CheckFailed, match="eager: 2 requests differ"):
                equality.equality(FakeLab(), report)  # type: ignore[arg-type]
        else:
            equality.equality(FakeLab(), report)  # type: ignore[arg-type]
        assert [one.value for one in report.figures] == [2, 0, 0, 1, 1 - count / 100, 1]


def test_a_graph_that_was_never_replayed_fails() -> None:
    sizes = EqualitySizes(most_rows=2, adapters=1)
    how = Counter(("graph 1", "graph 2", "graph 2 lora", "eager: mixed"))
    with pytest.raises(CheckFailed, match="graph 1 lora"):
        equality._check_coverage(how, sizes, Report(10.0, Clock()))


def test_adapters_must_have_changed_places() -> None:
    sizes = EqualitySizes(most_rows=1, adapters=3, slots=2)
    how = Counter({"graph 1": 1, "graph 1 lora": 1, SLOT_WRITES: 2})
    with pytest.raises(CheckFailed, match="slot of another"):
        equality._check_coverage(how, sizes, Report(10.0, Clock()))
    how[SLOT_WRITES] += 1
    equality._check_coverage(how, sizes, Report(10.0, Clock()))


def request(rid: int) -> Request:
    return Request(rid, (1, 2), SamplingParams(max_new_tokens=1, seed=0))


def test_the_mailbox_feeds_and_drains() -> None:
    mailbox = Mailbox([request(1), request(2)], [], 1, Report(10.0, Clock()))
    (first,) = mailbox.receive()
    assert first == request(1).message()
    assert mailbox.receive(0) == []
    with pytest.raises(CheckFailed, match="sleeps"):
        mailbox.receive(None)
    mailbox.send(BatchTokenIDOut([TokenIDOut(1, (7,)), TokenIDOut(1, (8,), Finish("length"))]))
    assert mailbox.receive(None) == [request(2).message()]
    with pytest.raises(CheckFailed, match="not finite"):
        mailbox.send(BatchTokenIDOut([TokenIDOut(2, (), Finish("error", message="not finite"))]))
    mailbox.send(BatchTokenIDOut([TokenIDOut(2, (9,), Finish("length"))]))
    assert mailbox.receive(None) == [DrainReq()]
    assert mailbox.answers == {1: [7, 8], 2: [9]}


def test_the_mailbox_gives_up_when_time_is_over() -> None:
    clock = Clock()
    mailbox = Mailbox([request(1)], [], 1, Report(10.0, clock))
    clock.now = 11.0
    with pytest.raises(CheckFailed, match="0 of 1 requests ended in time"):
        mailbox.receive()


def test_a_rig_divides_by_the_repeats() -> None:
    runs: list[int] = []

    class Marks(HostTimer):
        def mark(self) -> float:
            return float(len(runs))

    assert Rig(device=None, timer=Marks()).seconds(lambda: runs.append(0), 5) == 1.0  # type: ignore[arg-type]
    assert len(runs) == 6, "one warms up"


def test_waits_of_a_launch_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    with waits_noted("cuda:0") as found:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert found == ["called a synchronizing CUDA operation"]
    assert modes == ["warn", 0]
    with waits_noted("cpu") as found:
        pass
    assert (found, modes) == ([], ["warn", 0])


def wheel(folder: Path, name: str) -> None:
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "value = 5\n")
        archive.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")


def test_the_starter_installs_what_is_missing_from_the_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    site.mkdir()
    wheel(wheels, "tokenloom_toy")
    monkeypatch.setattr(device_check, "NEEDED", {"json": "json", "tokenloom_toy": "tokenloom-toy"})
    advice = device_check.complete(site, None)
    assert "not here: tokenloom-toy\n" in advice
    assert "--wheels" in advice
    assert device_check.complete(site, wheels) == ""
    assert (site / "tokenloom_toy.py").read_text() == "value = 5\n"
    monkeypatch.setattr(device_check, "NEEDED", {"tokenloom_none": "tokenloom-none"})
    assert "tokenloom-none" in device_check.complete(site, wheels)


def test_the_starter_lays_the_checkout_out(tmp_path: Path) -> None:
    device_check.lay_out(tmp_path)
    assert (tmp_path / "tokenloom" / "bench" / "device_check.py").is_file()
    assert "Name: tokenloom" in (tmp_path / "tokenloom-0.dist-info" / "METADATA").read_text()


def test_the_starter_names_what_the_image_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "is_there", lambda name: name != "triton")
    assert device_check.main([]) == 2
    assert capsys.readouterr().err == "not here: triton; use an image that has them\n"
