"""A mixture of experts in place of the MLP, as in Mixtral.

A router chooses ``k`` of ``E`` MLPs for each token, and weights their outputs: many weights to hold, few to compute
with. Source: Jiang et al., "Mixtral of Experts" (2024).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.llama import LlamaMLP


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """From a router's logits ``[T, E]``, the weights of the chosen experts, fp32, and the experts, ``[T, k]`` each.

    The weights of a token sum to one: a softmax over its ``k`` best logits.
    """
    best = logits.float().topk(top_k)
    return best.values.softmax(-1), best.indices


class MixtureOfExperts(nn.Module):
    """A router and ``E`` gated MLPs, ``k`` of which compute each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k, self.n_experts = config.moe.top_k, config.moe.n_experts
        expert = replace(config, d_ff=config.moe.d_expert)
        self.gate = nn.Linear(config.d_model, self.n_experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(expert) for _ in range(self.n_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # [T, d]
        weights, chosen = route(self.gate(rows), self.top_k)  # [T, k]
        order = chosen.flatten().argsort(stable=True)  # the tokens of one expert after another's
        counts = chosen.flatten().bincount(minlength=self.n_experts)
        computed = self.compute(rows[order // self.top_k], counts)
        outputs = torch.empty_like(computed)
        outputs[order] = computed
        summed = (outputs.view(-1, self.top_k, x.shape[-1]) * weights[..., None]).sum(1)
        return summed.to(x.dtype).view_as(x)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows ``[N, d]`` through their experts: the first ``counts[0]`` through the first one, and so on."""
        parts = zip(self.experts, torch.split(rows, counts.tolist()), strict=True)
        outputs = [expert(part) for expert, part in parts if len(part)]
        return torch.cat(outputs) if outputs else rows
