"""What a model costs before it runs: counts, bytes, times of steps and messages, from shapes and datasheets alone.

Read `arithmetic` first (what there is to compute and to move), then `hardware` (what a device can do) and `roofline`
(how long a step takes); `communication` and `parallel` go on to several devices. No torch here.
"""
