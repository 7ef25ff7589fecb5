"""llama.cpp (llama-cpp-python) as a worker, rows decoded together. Settings: source, kind, threads, rows, length."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import protocol


def requantised(source: str, kind: str) -> Path:
    """The weights of a GGUF file in another format, made once and kept next to this environment."""
    import llama_cpp

    path = Path(sys.prefix) / f"{Path(source).stem}-{kind}.gguf"
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.allow_requantize = True
        params.ftype = {
            "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
            "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
            "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        }[kind]
        part = path.with_suffix(".part")
        assert llama_cpp.llama_model_quantize(source.encode(), str(part).encode(), params) == 0
        part.replace(path)
    return path


def load(settings: dict[str, Any]) -> tuple[protocol.Run, str]:
    """A GGUF file, in a context that holds all rows."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    path = str(requantised(settings["source"], settings["kind"])).encode()
    model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    rows, length = settings["rows"], settings["length"]
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = rows * length, 2048, 512, rows
    params.n_threads = params.n_threads_batch = settings["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def fill(tokens: list[tuple[int, int, int, bool]]) -> None:
        """Tokens as (id, position, row, logits wanted)."""
        batch.n_tokens = len(tokens)
        for i, (token, position, row, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted

    def best(i: int) -> int:
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab,)).argmax())

    def run(_: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        clock = protocol.Stopwatch()
        out: list[list[int]] = [[] for _ in prompts]
        together = 2048 // len(prompts[0])  # prompts in a call
        for start in range(0, len(prompts), together):
            part = range(start, min(start + together, len(prompts)))
            last = len(prompts[0]) - 1
            fill([(t, p, row, p == last) for row in part for p, t in enumerate(prompts[row])])
            assert llama_cpp.llama_decode(context, batch) == 0
            for n, row in enumerate(part):
                out[row].append(best(n * len(prompts[0]) + last))
        clock.lap()
        for step in range(new - 1):
            position = len(prompts[0]) + step
            fill([(ids[-1], position, row, True) for row, ids in enumerate(out)])
            assert llama_cpp.llama_decode(context, batch) == 0
            for row, ids in enumerate(out):
                ids.append(best(row))
        return out, *clock.end()

    return run, llama_cpp.__version__


if __name__ == "__main__":
    protocol.serve(load)
