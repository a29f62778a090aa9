"""Who gives way when all places for HTTP connections are taken."""

import pytest

from tokenloom.tokenizer_proc.doors.connection_table import ConnectionTable, TableFull, network


def test_room_for_all() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    assert table.add("a", "10.0.0.1") is None
    assert table.add("b", "10.0.0.1") is None
    table.remove("a")
    assert table.add("c", "10.0.0.1") is None
    assert len(table) == 2


def test_the_longest_wait_gives_way() -> None:
    table: ConnectionTable[str] = ConnectionTable(3)
    for name in "abc":
        table.add(name, "10.0.0.1")
    table.works("a")
    table.waits("a")  # its wait began after those of b and c
    table.waits("b")  # told again: its place stays
    assert [table.add(name, "10.0.0.1") for name in "def"] == ["b", "c", "a"]
    assert len(table) == 3


def test_whoever_is_served_stays() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    table.add("a", "10.0.0.1")
    table.add("b", "10.0.0.1")
    table.works("a")
    assert table.add("c", "10.0.0.1") == "b"
    table.works("c")
    with pytest.raises(TableFull):
        table.add("d", "10.0.0.2")
    table.waits("c")
    assert table.add("d", "10.0.0.2") == "c"


def test_a_crowd_from_one_address_pushes_out_only_itself() -> None:
    table: ConnectionTable[str] = ConnectionTable(10)
    table.add("quiet", "10.0.0.1")
    victims = [table.add(f"loud{index}", "10.0.0.2") for index in range(1000)]
    assert victims[:9] == [None] * 9
    assert victims[9:] == [f"loud{index}" for index in range(991)]
    probe = table.add("probe", "10.0.0.3")
    assert probe is not None
    assert probe.startswith("loud")


def test_what_was_removed_is_forgotten() -> None:
    table: ConnectionTable[str] = ConnectionTable(1)
    table.add("a", "10.0.0.1")
    assert table.add("b", "10.0.0.1") == "a"
    table.waits("a")
    table.works("a")
    table.remove("a")
    assert len(table) == 1
    table.remove("b")
    assert len(table) == 0
    assert table._waiting == {}


def test_one_address_of_ipv6_is_a_network() -> None:
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"
    assert network("fe80::1%eth0") == network("fe80::2")
    assert network("") == ""
