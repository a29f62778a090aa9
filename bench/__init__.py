"""Load on running servers and what it measures: `tokenloom bench`, and peers side by side.

Workloads are seeded values (`workloads`), statistics are arithmetic on records (`summary`), and
only `load`, `targets` and `http_stream` touch a network or a clock.
"""
