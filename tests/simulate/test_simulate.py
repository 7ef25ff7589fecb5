"""The virtual clock runs the real scheduler: exact times by hand, and the plans of a real run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.scheduler import Scheduler, StepPlan
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import load_model
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.simulate.simulate import simulate, step_seconds, watch
from nanoinfer.theory.roofline import Machine, decode_step, prefill_step
from nanoinfer.workload.items import WorkItem, log_normal, log_normal_work


def house(blocks: int = 16, running: int = 4, budget: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), running, budget)


def by_tokens(plan: StepPlan) -> float:
    """A step takes a second, and a tenth for each token."""
    return 1 + plan.n_tokens / 10


def times(trace: Trace) -> list[float]:
    return [round(t, 6) for t, _ in trace.chunks]


def test_two_requests_by_hand() -> None:
    scheduler = house()
    one, two = simulate([WorkItem([1] * 6, 3), WorkItem([2] * 4, 2, at=0.5)], scheduler, by_tokens)
    # 0 to 1.6: six tokens of the first. Then one of it beside four of the second: 1.5 s. Then two: 1.2 s.
    assert times(one) == [1.6, 3.1, 4.3]
    assert times(two) == [3.1, 4.3]
    assert (one.t_start, two.t_start, two.t_scheduled) == (0.0, 1.6, 0.5)
    assert (one.t_end, one.output_tokens, two.prompt_tokens) == (pytest.approx(4.3), 3, 4)
    assert scheduler.pool.used == 0


def test_the_clock_jumps_over_idle_time() -> None:
    one, two = simulate([WorkItem([1] * 2, 1), WorkItem([2] * 2, 1, at=100.0)], house(), by_tokens)
    assert times(one) == [1.2] and times(two) == [101.2]


def test_a_long_prompt_comes_in_chunks_and_others_decode_beside_it() -> None:
    one, two = simulate([WorkItem([1] * 2, 4), WorkItem([2] * 20, 1, at=0.1)], house(), by_tokens)
    # 7 tokens of the long prompt beside each decoding row, then the last 6 of it.
    assert times(one) == [1.2, 3.0, 4.8, 6.5]
    assert times(two) == [6.5]


def test_found_prefixes_are_not_computed_again() -> None:
    first, again = simulate([WorkItem([1] * 8, 1), WorkItem([1] * 8, 1, at=50)], house(budget=9), by_tokens)
    assert (first.cached_tokens, again.cached_tokens) == (0, 4)
    assert times(again) == [51.4]


def test_what_never_fits_is_refused_before_anything_runs() -> None:
    with pytest.raises(RequestError, match="cannot fit in a KV cache of 64"):
        simulate([WorkItem([1] * 4, 1), WorkItem([1] * 60, 6)], house(), by_tokens)


def test_the_model_prices_a_plan() -> None:
    config, machine = SHAPES["smollm2-135m"], Machine.datasheet("H100", "bfloat16")
    (trace,) = simulate([WorkItem([1] * 64, 3)], house(32, 4, 512), step_seconds(config, machine))
    steps = [prefill_step(config, machine, 1, 64), *(decode_step(config, machine, 1, n) for n in (65, 66))]
    assert trace.chunks[-1][0] == pytest.approx(sum(s.seconds for s in steps), rel=0.01)


@pytest.mark.parametrize("blocks", [8, 64])
def test_the_same_plans_as_a_real_run(blocks: int) -> None:
    loaded = load_model("random:tiny-llama")
    rng = random.Random(3)
    lengths = [(rng.randrange(1, 40), rng.randrange(1, 20)) for _ in range(12)]
    work = [WorkItem([rng.randrange(1, 200) for _ in range(p)], new) for p, new in lengths]
    engine = ContinuousEngine(loaded, max_running=4, token_budget=16, block_size=8, cache_tokens=8 * blocks)
    ours = Scheduler(BlockPool(blocks, 8), 4, 16)
    real, virtual = watch(engine.scheduler), watch(ours)
    params = [SamplingParams(max_tokens=w.output, ignore_eos=True) for w in work]
    engine.generate([list(w.prompt) for w in work], params)
    simulate(work, ours, by_tokens)
    assert [spans(plan) for plan in real] == [spans(plan) for plan in virtual]
    assert len(real) > 40
    assert (ours.preemptions > 0) == (blocks == 8)


def spans(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.n) for chunk in plan.chunks]


def test_log_normal_lengths_keep_their_bounds_and_their_middle() -> None:
    rng = random.Random(0)
    lengths = sorted(log_normal(rng, 16, 512) for _ in range(4000))
    assert lengths[0] >= 16 and lengths[-1] <= 512
    assert lengths[2000] == pytest.approx((16 * 512) ** 0.5, rel=0.05)
    assert within(lengths, 38, 215) == pytest.approx(0.683 / 0.954, abs=0.03)  # one deviation of the two that are kept
    with pytest.raises(RequestError, match="upwards"):
        log_normal(rng, 0, 4)


def within(values: Sequence[int], low: int, high: int) -> float:
    return sum(low <= v <= high for v in values) / len(values)


def test_work_is_what_its_seed_says() -> None:
    work = log_normal_work(50, 100, (4, 64), (2, 32), seed=7)
    assert work == log_normal_work(50, 100, (4, 64), (2, 32), seed=7) != log_normal_work(50, 100, (4, 64), (2, 32))
    assert all(4 <= len(w.prompt) <= 64 and 2 <= w.output <= 32 and max(w.prompt) < 100 for w in work)
