"""Benchmarks: load on servers (`tokenloom bench`, `peers`), and costs of parts in this process.

Workloads are seeded values (`workloads`), statistics are arithmetic on records (`summary`); `load`
drives a workload, `targets` and `http_stream` talk to servers. Nothing outside bench imports it,
except cli and tests.
"""
