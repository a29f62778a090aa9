"""The real scheduler core driven by logical time and a model without weights: no process, no clock.

`driver` turns timed arrivals into steps, `hash_model` answers them, `step_time` says how long each
would have taken. Tests of the scheduler and studies of its policies share them.
"""
