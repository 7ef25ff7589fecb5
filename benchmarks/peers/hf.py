"""Hugging Face transformers' ``generate`` as a worker. Settings: folder, dtype, compiled."""

from __future__ import annotations

from typing import Any

import protocol


def load(settings: dict[str, Any]) -> tuple[protocol.Run, str]:
    """A model from a folder; with ``compiled``, a static cache and a compiled forward pass."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["folder"], dtype=getattr(torch, settings["dtype"])
    )
    model.eval()
    extra: dict[str, Any] = {}
    if settings.get("compiled"):
        extra["cache_implementation"] = "static"
        torch._dynamo.config.recompile_limit = 64  # two graphs a batch size; beyond the limit it would not compile
        model.forward = torch.compile(model.forward, dynamic=False, fullgraph=True)

    class Watch(transformers.StoppingCriteria):
        def __init__(self, clock: protocol.Stopwatch) -> None:
            self.clock = clock

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.clock.lap()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(_: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        ids = torch.tensor(prompts)
        clock = protocol.Stopwatch()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[Watch(clock)],
                **extra,
            )
            tokens = out[:, ids.shape[1] :].tolist()
        return tokens, *clock.end()

    return run, transformers.__version__


if __name__ == "__main__":
    protocol.serve(load)
