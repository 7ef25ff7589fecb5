"""The scheduler of the real engine on a clock that is only computed.

Nothing runs but the policy: the step-time model says how long each step would take. The same
:class:`~nanoinfer.engines.scheduler.Scheduler` object, fed the same work, makes the same plans as in a real run.

This is the plain form, a step at a time. :mod:`nanoinfer.simulate.virtual` gives the same traces sooner and in bounded
memory, and is held to this one by a test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.scheduler import Scheduler, StepPlan
from nanoinfer.engines.scheduler import SequenceState as Text
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.theory.roofline import Machine, StepTimes
from nanoinfer.workload.items import WorkItem


def step_seconds(config: ModelConfig, machine: Machine) -> Callable[[StepPlan], float]:
    """What a plan takes by the step-time model."""
    times = StepTimes(config, machine)

    def seconds(plan: StepPlan) -> float:
        rows = [(chunk.start, chunk.n) for chunk in plan.chunks]
        return times.seconds(rows, sum(chunk.reaches_end for chunk in plan.chunks))

    return seconds


def watch(scheduler: Scheduler) -> list[StepPlan]:
    """A list to which every plan is added that the scheduler makes from now on."""
    plans: list[StepPlan] = []
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        plans.append(schedule())
        return plans[-1]

    scheduler.schedule = watched  # type: ignore[method-assign]
    return plans


def text_of(work: WorkItem) -> Text:
    """The request as the scheduler sees it: its last token is never fed, so the cache need not hold it.

    Raises:
        RequestError: a prompt that is a text, an empty one, or no token wanted.
    """
    ids = work.ids
    if not ids or work.output < 1:
        raise RequestError(f"a request has at least 1 token in and 1 out, got {len(ids)} and {work.output}")
    return Text(ids, len(ids) + work.output - 1)


def simulate(work: Sequence[WorkItem], scheduler: Scheduler, seconds: Callable[[StepPlan], float]) -> list[Trace]:
    """Serve the work on a virtual clock that starts at 0.

    Args:
        work: in any order; each request ends after its ``output`` tokens.
        scheduler: with an empty house.
        seconds: how long a step of this plan takes.

    Returns:
        one trace a request, in the order of ``work``.

    Raises:
        RequestError: before anything runs, for work that can never fit.
    """
    traces = [Trace(w.at, w.at, prompt_tokens=len(w.prompt)) for w in work]
    for w in work:
        scheduler.refuse(text_of(w).limit)
    due = deque(sorted(range(len(work)), key=lambda i: work[i].at))
    here: dict[Text, int] = {}
    clock = 0.0
    while due or here:
        if not here:
            clock = max(clock, work[due[0]].at)
        while due and work[due[0]].at <= clock:
            index = due.popleft()
            text = text_of(work[index])
            scheduler.add(text)
            here[text] = index
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            trace = traces[here[chunk.sequence]]
            if trace.t_start is None:
                trace.t_start, trace.cached_tokens = clock, chunk.sequence.cached_tokens
        clock += seconds(plan)
        scheduler.commit(plan)
        for text in [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]:
            trace = traces[here[text]]
            trace.token(clock)
            if trace.output_tokens == work[here[text]].output:
                trace.t_end, trace.preemptions = clock, text.preemptions
                del here[text]
                scheduler.remove(text)
            else:
                text.tokens.append(0)
    return traces
