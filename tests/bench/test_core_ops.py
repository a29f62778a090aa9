"""The bench of the scheduler's core runs, at sizes that take no time."""

import pytest

from tokenloom.bench import core_ops


def test_every_operation_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in {"LONG": 4096, "TREE_NODES": 300, "POOL_PAGES": 2_000, "DECODES": 3}.items():
        monkeypatch.setattr(core_ops, name, size)
    assert core_ops.main() == 0
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert (header.count("|"), rule.count("|")) == (4, 4)
    for operation in ("match", "insert", "split", "evict 10,000", "plan and commit"):
        assert any(operation in row for row in rows), operation
    assert all(float(row.split("|")[2].replace(",", "")) > 0 for row in rows)
