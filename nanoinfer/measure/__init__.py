"""Instruments: clock, memory, energy, profiler, quality, and the trace that every metric is computed from.

Read `trace`, then `metrics` (each serving metric, one definition) and `stats` (percentiles and their intervals).
"""
