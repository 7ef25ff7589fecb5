"""Engines: prompts in, a stream of tokens out.

Read ``request`` and ``engine`` first (what all engines share), then ``static``: three engines, each a step
from the one before. Then ``scheduler`` (which tokens the next step computes), ``continuous`` (the step), and
``async_engine`` (many callers of one engine). ``speculative`` stands by itself. ``load`` makes an engine by name.
"""
