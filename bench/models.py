"""The models of the GPU workloads, with random weights N(0, 0.02) made on the device."""

from __future__ import annotations

from typing import Any

import torch


def llama_8b(num_layers: int = 32) -> Any:
    """Returns a model with the dimensions of Llama-3.1-8B in bf16."""
    from transformers import LlamaConfig

    return _random(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=num_layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131_072,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )


def qwen3_06b() -> Any:
    """Returns a model with the dimensions of Qwen3-0.6B in bf16."""
    from transformers import Qwen3Config

    return _random(
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
        )
    )


def gemma3_4b() -> Any:
    """Returns a model with the dimensions of Gemma-3-4B's text part in bf16: five layers with a
    window of 1,024 tokens to each with full attention."""
    from transformers import Gemma3TextConfig

    return _random(
        Gemma3TextConfig(
            vocab_size=262_208,
            hidden_size=2560,
            intermediate_size=10_240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            max_position_embeddings=131_072,
            tie_word_embeddings=True,
        )
    )


def _random(config: Any) -> Any:
    """Returns the model of a configuration; weights never pass through host memory."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    with torch.device("cuda"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)
    return model.eval()
