"""The engines beside Hugging Face transformers: greedy tokens in fp32, wherever the margin is clear."""

from __future__ import annotations

import pytest
import torch

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.engines.load import ENGINES
from nanoinfer.models.reference import to_transformers, transformers_greedy
from nanoinfer.models.registry import LoadedModel, load_model
from tests.engines.helpers import LLAMA, tiny

COUNT = 24


def clear_prefix(loaded: LoadedModel, prompt: list[int], tokens: list[int]) -> int:
    """How many of the tokens come before the first whose best two logits are within 1e-3."""
    row = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = loaded.model(row, torch.arange(row.shape[1])[None])[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    close = ((best[:, 0] - best[:, 1]) <= 1e-3).nonzero()
    return int(close[0]) if len(close) else len(tokens)


def agree(loaded: LoadedModel, prompts: list[list[int]], count: int) -> int:
    """Check every engine on every prompt; return how many tokens were compared."""
    theirs = to_transformers(loaded)
    expected = [transformers_greedy(theirs, prompt, count) for prompt in prompts]
    clear = [clear_prefix(loaded, p, e) for p, e in zip(prompts, expected, strict=True)]
    for name in ENGINES:
        done = nanoinfer.load(loaded, name).generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        for completion, tokens, n in zip(done, expected, clear, strict=True):
            assert completion.token_ids[:n] == tokens[:n]
    return sum(clear)


def test_smollm2(loaded_smollm2: LoadedModel) -> None:
    tokenizer = loaded_smollm2.tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}]),
        tokenizer.encode("def fibonacci(n):"),
        tokenizer.encode("Once upon a time, in a land far away,"),
    ]
    assert agree(loaded_smollm2, prompts, COUNT) >= 2 * COUNT


def test_random_gpt2_at_its_true_shape() -> None:
    loaded = load_model("random:gpt2", seed=1)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(50_257, (n,), generator=generator).tolist() for n in (5, 17)]
    assert agree(loaded, prompts, 12) >= 12


def test_scaled_rotary_positions_and_an_untied_head() -> None:
    assert agree(tiny(LLAMA), [[1, 2, 3], [9]], 12) >= 12


def test_logits_of_smollm2(loaded_smollm2: LoadedModel) -> None:
    ids = torch.arange(100, 164)[None]
    with torch.inference_mode():
        ours = loaded_smollm2.model(ids, torch.arange(64)[None])
        theirs = to_transformers(loaded_smollm2)(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-4)


def test_transformers_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(nanoinfer.NanoinferError, match="pip install transformers"):
        to_transformers(tiny(LLAMA))
