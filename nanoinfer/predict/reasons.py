"""Why a predicted step takes as long as it does, in a sentence or two."""

from __future__ import annotations

from nanoinfer.configs.config import ModelConfig
from nanoinfer.theory import arithmetic, capacity
from nanoinfer.theory.parameters import BYTES
from nanoinfer.theory.roofline import Step
from nanoinfer.theory.split import Split


def share(step: Step) -> float:
    """Share of the step's time in operators on the side that rules it."""
    return sum(op.seconds for op in step.operators if op.bound == step.bound) / step.seconds


def read(config: ModelConfig, step: Step, split: Split) -> tuple[float, float]:
    """Bytes of weights and of KV cache that a decode step reads on each device, the busiest."""
    dtype, tp = step.machine.dtype, split.tp
    if split.group == tp:
        kv = arithmetic.kv_bytes(config, step.batch, step.context, dtype) * capacity.kv_share(config, tp)
        return arithmetic.step_weight_bytes(config, step.batch, dtype) / tp, kv
    kv = sum(op.nbytes for op in step.operators if op.name == "attention")
    return sum(op.nbytes for op in step.operators if op.flops) - kv, kv


def why_prefill(step: Step) -> str:
    """Of a prefill."""
    rows, ridge = step.batch * step.context, step.machine.ridge
    head = f"Prefill is {step.bound}-bound ({share(step):.0%} of its time)"
    met = f"{step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {ridge:,.0f}"
    if step.bound == "compute":
        return (
            f"{head}: each weight that is read meets {rows:,} tokens, {met}. A smaller batch or a shorter prompt (or a "
            f"cached prefix), arithmetic in fewer bits or more devices shorten it; faster memory only the other "
            f"{1 - share(step):.0%}."
        )
    if step.bound == "memory":
        small = [op for op in step.operators if op.bound == "memory" and not op.flops]
        if (seconds := sum(op.seconds for op in small)) > share(step) * step.seconds / 2:
            return (
                f"{head}: its norms, activations and residuals, run one by one, move "
                f"{sum(op.nbytes for op in small) / 1e9:,.0f} GB and take {seconds / step.seconds:.0%} of the time. "
                "Fused kernels move a fraction of that."
            )
        return f"{head}: {rows:,} tokens are too few to keep the arithmetic busy, {met}. More of them are nearly free."
    return f"{head}: {_overhead(step)}"


def why_decode(config: ModelConfig, step: Step, row_s: float, split: Split) -> str:
    """Of a decode step, to which another row adds ``row_s``."""
    head = f"Decode is {step.bound}-bound ({share(step):.0%} of its time)"
    if step.bound in ("launch", "link", "idle"):
        return f"{head}: {_overhead(step)}"
    machine, row = step.machine, f"another row adds {row_s / step.seconds:.1%} to the step"
    if step.bound == "compute":
        return (
            f"{head}: {step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {machine.ridge:,.0f}. More rows do not "
            f"come free ({row}): arithmetic in fewer bits or more devices shorten the step."
        )
    weights, kv = read(config, step, split)
    reads = f"{head}: a step reads {weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV cache a device."
    if weights < kv:
        return (
            f"{reads} The cache is the larger part and no two rows share theirs, so {row}: a shorter context, a "
            "cache in fewer bits or more devices shorten it."
        )
    # Rows at which a weight's arithmetic takes as long as its reading; experts see a part of the rows each.
    full = machine.ridge * BYTES[machine.dtype] / 2 * (config.moe.n_experts / config.moe.top_k if config.moe else 1)
    # Measured rates do not turn at one ridge; pipelines and experts see a part of the rows at a time.
    several = machine.linear or machine.curves or split.group > split.tp
    until = "" if several else f", until at about {full:,.0f} rows their arithmetic takes as long as their reading"
    return (
        f"{reads} The weights are the larger part and are read once for all rows, so {row}{until}. Half the bits a "
        "weight, half that reading."
    )


def _overhead(step: Step) -> str:
    """The sentence for a step that neither arithmetic nor memory rules."""
    if step.bound == "idle":
        return (
            "the stages wait for each other while rows come to them and leave. More micro-batches than stages fill "
            "the pipeline (--micro-batches), fewer stages empty it sooner."
        )
    if step.bound == "link":
        most = max((op for op in step.operators if op.bound == "link"), key=lambda op: op.seconds)
        they = f"{most.calls:,} {most.name}{'s' if most.calls > 1 else ''}"
        return f"its {they} cost more than its reading. Fewer devices or a faster link shorten it."
    calls = sum(op.calls for op in step.operators)
    return (
        f"starting its {calls:,} operators takes longer than their work. Fused operators, recorded graphs or a "
        "larger batch (nearly free) spread that cost."
    )
