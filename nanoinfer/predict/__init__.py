"""What a model would do on devices that need not be there: the records behind predict, fit, simulate and plan.

Each command takes one options dataclass and gives one JSON record, which `terminal` prints. Read `latency` first.
"""
