"""vLLM on the processor as a worker. Settings: folder, dtype, threads, rows, length.

Not named after the package: a script's own folder comes first where Python looks for modules.
"""

from __future__ import annotations

import os
from typing import Any

import protocol

GIB_OF_CACHE = 2


def load(settings: dict[str, Any]) -> tuple[protocol.Run, str]:
    """A model from a folder, with vLLM's own defaults (it compiles), stepped in this process."""
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ.update(  # read when vllm is imported
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE=str(GIB_OF_CACHE),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # no messages between processes in what is timed
        VLLM_LOGGING_LEVEL="WARNING",
    )
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(
        settings["folder"],
        skip_tokenizer_init=True,  # the folder has none
        dtype=settings["dtype"],
        max_model_len=settings["length"],
        max_num_seqs=settings["rows"],
        max_num_batched_tokens=settings["rows"] * settings["length"],  # all prompts in one step, as with the others
        enable_prefix_caching=False,  # a prompt that was seen before would cost nothing
    ).llm_engine
    jobs = 0

    def run(_: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        nonlocal jobs
        jobs += 1
        greedy = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"{jobs}-{row}" for row in range(len(prompts))]
        out: dict[str, list[int]] = {name: [] for name in names}
        clock = protocol.Stopwatch()
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=ids), greedy)
        while engine.has_unfinished_requests():
            for output in engine.step():
                out[output.request_id] += output.outputs[0].token_ids
            if all(out.values()):
                clock.lap()
        first, total = clock.end()
        return [list(out[name]) for name in names], first, total

    return run, vllm.__version__


if __name__ == "__main__":
    protocol.serve(load)
