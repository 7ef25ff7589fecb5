"""The same weights in Hugging Face transformers, to compare with; not a dependency of the library."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import ModelError
from nanoinfer.models.moe import MixtureOfExperts
from nanoinfer.models.registry import LoadedModel
from nanoinfer.models.weights import CONV1D


def hf_config(config: ModelConfig) -> Any:
    """The transformers config of the same shape. Raises :class:`ModelError` without transformers."""
    try:
        from transformers import GPT2Config, LlamaConfig, MixtralConfig
    except ImportError:
        raise ModelError("transformers is not installed here; install it with: pip install transformers") from None
    common: dict[str, Any] = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tied}
    common |= {"bos_token_id": None, "eos_token_id": None}
    if config.family == "gpt2":
        return GPT2Config(
            n_positions=config.context,
            n_embd=config.d_model,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_inner=config.d_ff,
            layer_norm_epsilon=config.norm_eps,
            **common,
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= asdict(scaling) | {"rope_type": "llama3"}
        rope["original_max_position_embeddings"] = rope.pop("original_context")
    if (moe := config.moe) is not None:
        common |= {"num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k}
    return (LlamaConfig if moe is None else MixtralConfig)(
        hidden_size=config.d_model,
        intermediate_size=config.d_ff if moe is None else moe.d_expert,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.d_head,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        **common,
    )


def to_transformers(loaded: LoadedModel) -> Any:
    """A transformers model with the very tensors of ``loaded``: shared, but for GPT-2's transposed ones and experts."""
    config = hf_config(loaded.model.config)
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM

    ours: nn.Module = loaded.model
    gpt2 = loaded.model.config.family == "gpt2"
    state: dict[str, Tensor] = {}
    for name, tensor in ours.state_dict().items():
        if name.startswith("lm_head"):
            state[name] = tensor
        elif gpt2:
            state[f"transformer.{name}"] = tensor.T.contiguous() if CONV1D.fullmatch(name) else tensor
        elif ".experts." not in name:
            state[f"model.{name}"] = tensor
    for name, module in ours.named_modules():
        if isinstance(module, MixtureOfExperts):  # there, all experts' matrices are in two tensors
            experts: list[dict[str, Tensor]] = [dict(expert.named_parameters()) for expert in module.experts]
            gate_up = [torch.cat((expert["gate_proj.weight"], expert["up_proj.weight"])) for expert in experts]
            state[f"model.{name}.experts.gate_up_proj"] = torch.stack(gate_up)
            state[f"model.{name}.experts.down_proj"] = torch.stack([expert["down_proj.weight"] for expert in experts])
    embedding = loaded.model.embedding.weight
    state.setdefault("lm_head.weight", embedding)
    kind = GPT2LMHeadModel if gpt2 else LlamaForCausalLM if loaded.model.config.moe is None else MixtralForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(embedding.dtype)
    try:  # transformers builds in the default dtype; its rotary tables stay fp32 all the same
        theirs: Any = kind(config)
    finally:
        torch.set_default_dtype(before)
    theirs.load_state_dict(state, assign=True)
    theirs.tie_weights()
    return theirs.to(embedding.device).eval().requires_grad_(False)


def transformers_greedy(theirs: Any, prompt_ids: list[int], count: int) -> list[int]:
    """``count`` greedy tokens of transformers' own ``generate``, end-of-sequence ignored."""
    ids = torch.tensor([prompt_ids], device=theirs.device)
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(i) for i in out[0, len(prompt_ids) :]]
