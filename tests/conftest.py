"""Models that several tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.typecheck import unchecked

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "0")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gemma2", "gpt_oss", "qwen3_moe"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "compiled: runs in a process of its own, without type checks"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            for item in needing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests of compiled steps where the type checks are off: they do not trace."""
    checks = pyfuncitem.config.getoption("--jaxtyping-packages", default=None)
    if not checks or not pyfuncitem.get_closest_marker("compiled"):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", pyfuncitem.nodeid]
    root = pyfuncitem.config.rootpath
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    return True


def small_model(family: str, seed: int = 0, head_dim: int = 8) -> Any:
    """Returns a random model of a few thousand parameters; sliding windows are 16 tokens."""
    import torch
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    common = {**SMALL, "head_dim": head_dim}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common, num_hidden_layers=2),
        "qwen3": lambda: transformers.Qwen3Config(**common, num_hidden_layers=2),
        "mistral": lambda: transformers.MistralConfig(
            **common, num_hidden_layers=2, sliding_window=16
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **common, num_hidden_layers=6, sliding_window=16, query_pre_attn_scalar=8
        ),
        "gemma2": lambda: transformers.Gemma2Config(
            **common, num_hidden_layers=2, sliding_window=16
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **common,
            num_hidden_layers=2,
            num_local_experts=4,
            sliding_window=16,
            rope_parameters=rope,
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **common,
            num_hidden_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            configs[family](), dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough for logits without near ties
                torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def greedy_alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns what transformers' own `generate` continues one prompt with."""
    import torch

    out = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def word_tokenizer() -> Any:
    """Returns a tokenizer of 128 words for the small models: w4 is token 4, and so on."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", "user", *(f"w{token}" for token in range(4, 127))]
    words.append("assistant")
    backend = Tokenizer(WordLevel({w: token for token, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        chat_template="{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}",
    )


@pytest.fixture
def without_annotation_checks() -> Iterator[None]:
    """The library's own checks answer, as they do for users; and many steps take half the time."""
    with unchecked():
        yield


@pytest.fixture(scope="session")
def llama() -> Any:
    return small_model("llama")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    from cbfn import demo
    from cbfn.model import load

    return load(demo.smollm2())


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices are faster on one thread, by far where other processes want the cores too."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """For tests of real models; workers of pytest-xdist share the cores."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max((os.cpu_count() or 1) // workers, 1))
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Keeps progress bars and advice of transformers out of the reports."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_interpreted(script: str) -> None:
    """Runs a script in Triton's interpreter; skips the test where that does not run.

    The interpreter is chosen when triton is imported, hence a process of its own.
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    old = [int(part) for part in version("triton").split(".")[:2]] < [3, 7]
    if old and "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton needs numpy < 2.4")
    assert done.returncode == 0, done.stderr
