"""Optimizations of a step, each a field of :class:`~nanoinfer.optimize.options.Optimizations`.

Read ``options`` first. Of what it applies to a model, ``linear`` (fused and packed layers), ``quantise`` (in the
``formats``) and ``compile`` replace modules. ``cpu_kernel`` and ``cuda_graphs`` run a whole step.
"""
