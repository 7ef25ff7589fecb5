"""Optimizations of a step, each a file, and each a field of :class:`~nanoinfer.optimize.options.Optimizations`.

Read ``options`` first, then ``apply``, which puts them on a model: ``fuse``, ``pack``, ``quantise`` (number formats in
``formats``) and ``compile`` replace modules. ``cpu_kernel`` (C++ in ``csrc/``) and ``cuda_graphs`` run a whole step.
"""
