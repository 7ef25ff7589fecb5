"""What this machine really does, measured: its ceilings, a model's operators, the links between ranks.

Read `machine` (the ceilings of MBU and MFU), then `operators` (`this_machine`, what chapters predict with).
"""
