"""The engines against Hugging Face transformers: greedy tokens in fp32, wherever the margin is clear."""

from __future__ import annotations

import pytest
import torch

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.load import ENGINES
from nanoinfer.measure.reference import to_transformers, transformers_greedy
from nanoinfer.models.registry import LoadedModel, load_model
from tests.engines.helpers import GPT2, LLAMA, tiny

COUNT = 20


def agree(loaded: LoadedModel, prompts: list[list[int]], count: int) -> int:
    """Check every engine on every prompt; return how many tokens of each engine were compared.

    transformers reads prompt and answer in one pass. What it would have said at each place is what it says
    greedily, as long as every token before was its own choice, by more than 1e-3.
    """
    theirs, compared = to_transformers(loaded), 0
    for name in ENGINES:
        done = nanoinfer.load(loaded, name).generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        compared = 0
        for completion, prompt in zip(done, prompts, strict=True):
            assert len(completion.token_ids) == count
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2)
            close = (best.values[:, 0] - best.values[:, 1] <= 1e-3).tolist()
            clear = close.index(True) if True in close else count
            assert completion.token_ids[:clear] == best.indices[:clear, 0].tolist()
            compared += clear
    return compared


@pytest.mark.slow
def test_smollm2(loaded_smollm2: LoadedModel) -> None:
    tokenizer = loaded_smollm2.tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}]),
        tokenizer.encode("def fibonacci(n):"),
        tokenizer.encode("Once upon a time, in a land far away,"),
    ]
    assert agree(loaded_smollm2, prompts, COUNT) >= 2 * COUNT


@pytest.mark.slow
def test_random_gpt2_at_its_true_shape() -> None:
    loaded = load_model("random:gpt2", seed=1)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(50_257, (n,), generator=generator).tolist() for n in (5, 17)]
    assert agree(loaded, prompts, 12) >= 12


def test_scaled_rotary_positions_and_an_untied_head() -> None:
    assert agree(tiny(LLAMA), [[1, 2, 3], [9]], 12) >= 12


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_its_own_generate_says_the_same(config: ModelConfig) -> None:
    loaded = tiny(config)
    (done,) = nanoinfer.load(loaded).generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert transformers_greedy(to_transformers(loaded), [1, 2, 3], 9) == done.token_ids


@pytest.mark.slow
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
