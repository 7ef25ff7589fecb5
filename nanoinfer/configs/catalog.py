"""Real models as their publishers' config.json describes them, each with the parameter count it is known by.

Only what a count depends on is kept of each config. The counts are those that the published weights have
(``model.safetensors`` totals, model cards), a tied head counted once; DeepSeek-V3 without its extra
prediction layer, its 14,848 selection biases included.
"""

from __future__ import annotations

from typing import Any


def gpt2(d: int, layers: int, heads: int) -> dict[str, Any]:
    """Config of a gpt2 shape."""
    sizes = {"n_embd": d, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50_257}
    return {"model_type": "gpt2", **sizes}


def config(family: str, d: int, f: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Config of a config shape."""
    return {
        "model_type": family,
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        **more,
    }


def tied(*args: Any, **more: Any) -> dict[str, Any]:
    """Config of a tied shape."""
    return config(*args, tie_word_embeddings=True, **more)


def gemma(*args: Any, head_dim: int = 256, window: int = 4096) -> dict[str, Any]:
    """Config of a gemma shape."""
    return config(*args, head_dim=head_dim, sliding_window=window, hidden_activation="gelu_pytorch_tanh")


def qwen3(*args: Any, **more: Any) -> dict[str, Any]:
    """Config of a qwen3 shape."""
    return config("qwen3", *args, head_dim=128, **more)


def qwen3_moe(d: int, d_expert: int, layers: int, heads: int) -> dict[str, Any]:
    """Config of a qwen3_moe shape."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": d_expert}
    return config("qwen3_moe", d, 3 * d, layers, heads, 4, 151_936, head_dim=128, decoder_sparse_step=1, **experts)


def mixtral(d: int, f: int, layers: int, heads: int) -> dict[str, Any]:
    """Config of a mixtral shape."""
    return config("mixtral", d, f, layers, heads, 8, 32_000, num_local_experts=8, num_experts_per_tok=2)


def deepseek(
    family: str,
    sizes: tuple[int, int, int, int, int],
    experts: tuple[int, int, int, int, int],
    q_rank: int | None,
) -> dict[str, Any]:
    """Config of a DeepSeek shape."""
    d, f, layers, heads, vocab = sizes
    n_experts, top_k, d_expert, shared, dense = experts
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    moe = {"n_routed_experts": n_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": d_expert}
    rest = {"n_shared_experts": shared, "first_k_dense_replace": dense, "moe_layer_freq": 1, "q_lora_rank": q_rank}
    return config(family, d, f, layers, heads, heads, vocab, **mla, **moe, **rest)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Config of a gpt_oss shape."""
    moe = {"num_local_experts": experts, "num_experts_per_tok": 4}
    return config("gpt_oss", 2880, 2880, layers, 64, 8, 201_088, head_dim=64, sliding_window=128, **moe)


MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (gpt2(768, 12, 12), 124_439_808),
    "gpt2-medium": (gpt2(1024, 24, 16), 354_823_168),
    "gpt2-large": (gpt2(1280, 36, 20), 774_030_080),
    "gpt2-xl": (gpt2(1600, 48, 25), 1_557_611_200),
    "Llama-2-7B": (config("llama", 4096, 11_008, 32, 32, 32, 32_000), 6_738_415_616),
    "Llama-2-13B": (config("llama", 5120, 13_824, 40, 40, 40, 32_000), 13_015_864_320),
    "Llama-2-70B": (config("llama", 8192, 28_672, 80, 64, 8, 32_000), 68_976_648_192),
    "Llama-3-8B": (config("llama", 4096, 14_336, 32, 32, 8, 128_256), 8_030_261_248),
    "Llama-3-70B": (config("llama", 8192, 28_672, 80, 64, 8, 128_256), 70_553_706_496),
    "Llama-3.1-405B": (config("llama", 16_384, 53_248, 126, 128, 8, 128_256), 405_853_388_800),
    "Llama-3.2-1B": (tied("llama", 2048, 8192, 16, 32, 8, 128_256), 1_235_814_400),
    "Llama-3.2-3B": (tied("llama", 3072, 8192, 28, 24, 8, 128_256), 3_212_749_824),
    "TinyLlama-1.1B": (config("llama", 2048, 5632, 22, 32, 4, 32_000), 1_100_048_384),
    "SmolLM2-135M": (tied("llama", 576, 1536, 30, 9, 3, 49_152), 134_515_008),
    "SmolLM2-360M": (tied("llama", 960, 2560, 32, 15, 5, 49_152), 361_821_120),
    "SmolLM2-1.7B": (tied("llama", 2048, 8192, 24, 32, 32, 49_152), 1_711_376_384),
    "Mistral-7B-v0.1": (config("mistral", 4096, 14_336, 32, 32, 8, 32_000, sliding_window=4096), 7_241_732_096),
    "Mistral-Nemo-12B": (config("mistral", 5120, 14_336, 40, 32, 8, 131_072, head_dim=128), 12_247_782_400),
    "Mixtral-8x7B": (mixtral(4096, 14_336, 32, 32), 46_702_792_704),
    "Mixtral-8x22B": (mixtral(6144, 16_384, 56, 48), 140_620_634_112),
    "Qwen2.5-0.5B": (tied("qwen2", 896, 4864, 24, 14, 2, 151_936), 494_032_768),
    "Qwen2.5-1.5B": (tied("qwen2", 1536, 8960, 28, 12, 2, 151_936), 1_543_714_304),
    "Qwen2.5-3B": (tied("qwen2", 2048, 11_008, 36, 16, 2, 151_936), 3_085_938_688),
    "Qwen2.5-7B": (config("qwen2", 3584, 18_944, 28, 28, 4, 152_064), 7_615_616_512),
    "Qwen2.5-14B": (config("qwen2", 5120, 13_824, 48, 40, 8, 152_064), 14_770_033_664),
    "Qwen2.5-32B": (config("qwen2", 5120, 27_648, 64, 40, 8, 152_064), 32_763_876_352),
    "Qwen2.5-72B": (config("qwen2", 8192, 29_568, 80, 64, 8, 152_064), 72_706_203_648),
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, 8, 151_936, tie_word_embeddings=True), 596_049_920),
    "Qwen3-1.7B": (qwen3(2048, 6144, 28, 16, 8, 151_936, tie_word_embeddings=True), 1_720_574_976),
    "Qwen3-4B": (qwen3(2560, 9728, 36, 32, 8, 151_936, tie_word_embeddings=True), 4_022_468_096),
    "Qwen3-8B": (qwen3(4096, 12_288, 36, 32, 8, 151_936), 8_190_735_360),
    "Qwen3-14B": (qwen3(5120, 17_408, 40, 40, 8, 151_936), 14_768_307_200),
    "Qwen3-32B": (qwen3(5120, 25_600, 64, 64, 8, 151_936), 32_762_123_264),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 768, 48, 32), 30_532_122_624),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 1536, 94, 64), 235_093_634_560),
    "gemma-2-2b": (gemma("gemma2", 2304, 9216, 26, 8, 4, 256_000), 2_614_341_888),
    "gemma-2-9b": (gemma("gemma2", 3584, 14_336, 42, 16, 8, 256_000), 9_241_705_984),
    "gemma-2-27b": (gemma("gemma2", 4608, 36_864, 46, 32, 16, 256_000, head_dim=128), 27_227_128_320),
    "gemma-3-270m": (gemma("gemma3_text", 640, 2048, 18, 4, 1, 262_144, window=512), 268_098_176),
    "gemma-3-1b": (gemma("gemma3_text", 1152, 6912, 26, 4, 1, 262_144, window=512), 999_885_952),
    "Phi-3-mini-4k": (config("phi3", 3072, 8192, 32, 32, 32, 32_064, sliding_window=2047), 3_821_079_552),
    "Phi-3-medium": (config("phi3", 5120, 17_920, 40, 40, 10, 32_064), 13_960_238_080),
    "Phi-4": (config("phi3", 5120, 17_920, 40, 40, 10, 100_352), 14_659_507_200),
    "Phi-4-mini": (tied("phi3", 3072, 8192, 32, 24, 8, 200_064), 3_836_021_760),
    "OLMo-2-1B": (config("olmo2", 2048, 8192, 16, 16, 16, 100_352), 1_484_916_736),
    "OLMo-2-7B": (config("olmo2", 4096, 11_008, 32, 32, 32, 100_352), 7_298_617_344),
    "OLMo-2-13B": (config("olmo2", 5120, 13_824, 40, 40, 40, 100_352), 13_716_198_400),
    "DeepSeek-V2-Lite": (
        deepseek("deepseek_v2", (2048, 10_944, 27, 16, 102_400), (64, 6, 1408, 2, 1), None),
        15_706_484_224,
    ),
    "DeepSeek-V2": (
        deepseek("deepseek_v2", (5120, 12_288, 60, 128, 102_400), (160, 6, 1536, 2, 1), 1536),
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        deepseek("deepseek_v3", (7168, 18_432, 61, 128, 129_280), (256, 8, 2048, 1, 3), 1536),
        671_026_419_200,
    ),
    "gpt-oss-20b": (gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": (gpt_oss(36, 128), 116_829_156_672),
}

#: Parameters that a token uses, in billions as the model cards print them, without the input embedding
#: (Mixtral's and Qwen's count it: the flag).
ACTIVE: dict[str, tuple[float, float, bool]] = {
    "Mixtral-8x7B": (12.9, 0.05, True),
    "Mixtral-8x22B": (39, 0.5, True),
    "Qwen3-30B-A3B": (3.3, 0.06, True),
    "Qwen3-235B-A22B": (22, 0.5, True),
    "DeepSeek-V2-Lite": (2.4, 0.06, False),
    "DeepSeek-V2": (21, 0.5, False),
    "DeepSeek-V3": (37, 0.5, False),
    "gpt-oss-20b": (3.61, 0.005, False),
    "gpt-oss-120b": (5.13, 0.005, False),
}

#: Tokens that each can hold, as its model card says: a prediction may ask for no more.
CONTEXTS: dict[str, int] = {
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 1024),
    "TinyLlama-1.1B": 2048,
    **dict.fromkeys(("Llama-2-7B", "Llama-2-13B", "Llama-2-70B", "Phi-3-mini-4k", "Phi-3-medium"), 4096),
    **dict.fromkeys(("OLMo-2-1B", "OLMo-2-7B", "OLMo-2-13B"), 4096),
    **dict.fromkeys(("Llama-3-8B", "Llama-3-70B", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b"), 8192),
    **dict.fromkeys(("SmolLM2-135M", "SmolLM2-360M", "SmolLM2-1.7B"), 8192),
    "Phi-4": 16_384,
    **dict.fromkeys(("Mistral-7B-v0.1", "Mixtral-8x7B", "gemma-3-270m", "gemma-3-1b", "DeepSeek-V2-Lite"), 32_768),
    **dict.fromkeys(("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"), 32_768),
    **dict.fromkeys((name for name in MODELS if name.startswith("Qwen3-")), 32_768),
    "Mixtral-8x22B": 65_536,
    **dict.fromkeys(("Llama-3.1-405B", "Llama-3.2-1B", "Llama-3.2-3B", "Mistral-Nemo-12B", "Phi-4-mini"), 131_072),
    **dict.fromkeys(("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B"), 131_072),
    **dict.fromkeys(("DeepSeek-V2", "DeepSeek-V3", "gpt-oss-20b", "gpt-oss-120b"), 131_072),
}
