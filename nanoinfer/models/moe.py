"""A mixture of experts in place of the MLP, as Mixtral has it.

A layer holds ``E`` MLPs. A router chooses ``k`` of them for each token, the token goes through those only, and their
answers are added up by the router's weights: many weights to hold, few to compute with. Source: Jiang et al.,
"Mixtral of Experts" (2024).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.llama import MLP


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Of a router's logits ``[T, E]``: the weights of the chosen experts, fp32, and the experts, ``[T, k]`` each.

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
        one = replace(config, d_ff=config.moe.d_expert)
        self.gate = nn.Linear(config.d_model, self.n_experts, bias=False)
        self.experts = nn.ModuleList(MLP(one) for _ in range(self.n_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # [T, d]
        weights, chosen = route(self.gate(rows), self.top_k)  # [T, k]
        order = chosen.flatten().argsort(stable=True)  # one expert's tokens behind the other's
        counts = chosen.flatten().bincount(minlength=self.n_experts)
        computed = self.compute(rows[order // self.top_k], counts)
        answers = torch.empty_like(computed)
        answers[order] = computed
        summed = (answers.view(-1, self.top_k, x.shape[-1]) * weights[..., None]).sum(1)
        return summed.to(x.dtype).view_as(x)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows ``[N, d]`` through their experts: the first ``counts[0]`` through the first one, and so on."""
        parts = zip(self.experts, torch.split(rows, counts.tolist()), strict=True)
        done = [expert(part) for expert, part in parts if len(part)]
        return torch.cat(done) if done else rows
