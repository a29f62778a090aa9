"""Histories that once broke a law, shrunk by `run`; each is replayed by the tests for ever.

Those named "by hand" broke laws of a core with a bug made for it: see test_simulation.py.
"""

from sim.run import History

HISTORIES: dict[str, History] = {
    "by hand: a broken row leaks a page": History(
        {
            "scheduling": {
                "page_size": 4,
                "max_running_requests": 8,
                "chunked_prefill_size": 8,
                "max_prefill_tokens": 4,
                "schedule_conservativeness": 0.1,
            },
            "pool_pages": 16,
            "context": 64,
            "learns": False,
        },
        [
            ["submit", 4, {"prefix": 0, "shared": 9, "own": 1}, {"max_new": 43}],
            ["launch"],
            ["land", []],
            ["launch"],
            ["land", []],
            ["launch"],
            ["land", [4]],
        ],
    ),
    "by hand: an abort in flight frees at once": History(
        {
            "scheduling": {
                "page_size": 1,
                "max_running_requests": 2,
                "chunked_prefill_size": 4,
                "max_prefill_tokens": 16,
            },
            "pool_pages": 26,
            "context": 16,
            "learns": True,
        },
        [
            ["submit", 34, {"prefix": 0, "shared": 0, "own": 2}, {"max_new": 9}],
            ["launch"],
            ["stop", 34],
        ],
    ),
    "by hand: a match is a page too long": History(
        {
            "scheduling": {
                "page_size": 2,
                "max_running_requests": 4,
                "chunked_prefill_size": 0,
                "max_prefill_tokens": 2,
            },
            "pool_pages": 97,
            "context": 128,
            "learns": False,
        },
        [
            ["submit", 13, {"prefix": 0, "shared": 30, "own": 0}, {"max_new": 1}],
            ["submit", 17, {"prefix": 0, "shared": 22, "own": 5}, {"max_new": 40}],
        ],
    ),
    "a rid comes again before its end, made while planning, is told": History(
        {
            "scheduling": {
                "page_size": 1,
                "max_running_requests": 2,
                "chunked_prefill_size": 32,
                "max_prefill_tokens": 32,
            },
            "pool_pages": 64,
            "context": 40,
            "learns": True,
            "faults": {"fail_allocation_every": 2},
        },
        [
            ["submit", 1, {"prefix": 0, "shared": 0, "own": 3}, {"max_new": 9, "ignore_eos": True}],
            ["submit", 2, {"prefix": 0, "shared": 0, "own": 3}, {"max_new": 9}],
            ["launch"],
            ["land"],
            ["launch"],
            ["land"],
            ["launch"],
            ["again", 2],
        ],
    ),
    "a namespace spells an adapter's": History(
        {
            "scheduling": {
                "page_size": 4,
                "max_running_requests": 8,
                "chunked_prefill_size": 16,
                "mixed_chunk_size": 1,
                "max_prefill_tokens": 4096,
                "schedule_conservativeness": 0.01,
            },
            "pool_pages": 129,
            "context": 64,
            "learns": True,
            "lora_slots": 2,
            "patience": 1,
        },
        [
            ["load", 1, "b", False],
            [
                "submit",
                5,
                {"prefix": 3, "shared": 15, "own": 5},
                {"max_new": 25, "ignore_eos": True, "namespace": "1/0"},
            ],
            ["launch"],
            ["land", []],
            ["loaded", 1],
            [
                "submit",
                12,
                {"prefix": 3, "shared": 11, "own": 2},
                {"max_new": 27, "ignore_eos": True, "namespace": "0", "lora_id": 1},
            ],
        ],
    ),
    "an overdue request waits for a slot that is kept for one behind it": History(
        {
            "scheduling": {
                "page_size": 2,
                "max_running_requests": 3,
                "chunked_prefill_size": 5,
                "max_prefill_tokens": 48,
                "schedule_policy": "dfs-weight",
                "max_overtakes": 1,
                "lookahead": 0,
                "admission": "quantile",
                "queue_timeout": 20.0,
                "request_timeout": 40.0,
            },
            "pool_pages": 29,
            "context": 40,
            "learns": False,
            "lora_slots": 1,
            "patience": 1,
        },
        [
            ["load", 24, "c", False],
            ["load", 36, "d", False],
            ["launch"],
            ["loaded", 1],
            [
                "submit",
                243,
                {"prefix": 1, "shared": 0, "own": 2},
                {"max_new": 25, "namespace": "0", "lora_id": 24},
            ],
            ["launch"],
            ["land", []],
            ["loaded", 2],
            *[["launch"], ["land", []]] * 4,
            [
                "submit",
                260,
                {"prefix": 0, "shared": 0, "own": 10},
                {
                    "ignore_eos": True,
                    "namespace": "1",
                    "lora_id": 36,
                    "stop_ids": [0, 24, 25, 88],
                },
            ],
            ["launch"],
            ["land", []],
            [
                "submit",
                261,
                {"prefix": 0, "shared": 0, "own": 7},
                {"ignore_eos": True, "priority": 1, "namespace": "0", "lora_id": 24},
            ],
            [
                "submit",
                273,
                {"prefix": 1, "shared": 0, "own": 3},
                {"priority": -1, "namespace": "1", "lora_id": 36},
            ],
            [
                "submit",
                278,
                {"prefix": 0, "shared": 0, "own": 2},
                {"max_new": 1, "ignore_eos": True, "namespace": "1"},
            ],
        ],
    ),
}
