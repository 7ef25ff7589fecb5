"""Measurements that are too long for a chapter or a test; run one with ``python -m benchmarks.NAME``."""
