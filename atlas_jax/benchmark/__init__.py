"""Measurements of the memory layer: speed and memory, and what its bound does.

`speed` times one memory layer against the obvious ways to compute the same
thing and against attention; `bounds` compares what keeps the inner descent
finite. `python -m experiments.benchmark` runs both and writes the reports.
"""
