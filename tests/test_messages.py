"""What the package says when something is missing or misspelt: what was expected, what to do."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers

import cbfn
from cbfn import (
    Engine,
    EngineConfig,
    ModelNotSupported,
    Request,
    RequestRejected,
    Runner,
    SamplingParams,
    loading,
    memory,
    scheduler,
)
from cbfn.model import adopt, load
from cbfn.trace import Trace
from cbfn.types import CacheSpec
from tests.conftest import small_model, word_tokenizer

pytestmark = pytest.mark.usefixtures("without_annotation_checks")

GIB = 2**30
ROOT = Path(cbfn.__file__).parent.parent


def said(call: Callable[[], Any], kind: type[BaseException] = ValueError) -> str:
    """Returns the message of what a call raises."""
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


# Settings


def test_misspelt_policy_is_asked_back() -> None:
    text = said(lambda: EngineConfig(scheduler="prefil_first"))
    assert text.startswith('EngineConfig.scheduler: expected "fifo", "prefill_first" or a policy f')
    assert text.endswith("got 'prefil_first'; did you mean 'prefill_first'?")
    assert said(lambda: EngineConfig(scheduler="FIFO")).endswith("; did you mean 'fifo'?")
    assert said(lambda: EngineConfig(scheduler="xyz")).endswith("got 'xyz'")
    assert said(lambda: EngineConfig(scheduler=["fifo"])).endswith("got ['fifo']")
    text = said(lambda: EngineConfig(after_weights_update="recomputed"))
    assert text.endswith("got 'recomputed'; did you mean 'recompute'?")


@pytest.mark.parametrize("field", ["num_beams", "no_repeat_ngram_size", "penalty_alpha"])
def test_generation_config_with_more_than_cbfn_does_says_how_to_go_on(field: str) -> None:
    config = transformers.GenerationConfig(**{field: 3})
    text = said(lambda: SamplingParams.from_generation_config(config))
    assert f"generation_config.{field}: expected it unset" in text
    assert f"got 3; unset it, generation_config.{field} = None, or pass SamplingParams" in text
    setattr(config, field, None)
    assert SamplingParams.from_generation_config(config).greedy


def test_what_is_no_generation_config_is_not_taken_for_an_empty_one() -> None:
    take = SamplingParams.from_generation_config
    text = said(lambda: take({"num_beams": 4}))
    assert text == (
        "generation_config: expected a GenerationConfig, got dict; did you mean "
        "transformers.GenerationConfig(**generation_config)?"
    )
    model = SimpleNamespace(generation_config=transformers.GenerationConfig())
    assert "did you mean its attribute .generation_config?" in said(lambda: take(model))
    assert "pass model.generation_config" in said(lambda: take(None))


def test_parameters_of_another_kind_are_asked_back(llama: Any) -> None:
    text = said(lambda: cbfn.generate(llama, [[1]], {"max_tokens": 2}))
    assert text.endswith("got {'max_tokens': 2}; did you mean SamplingParams(**sampling_params)?")
    config = SimpleNamespace(do_sample=True)
    text = said(lambda: cbfn.generate(llama, [[1]], config))
    assert text.endswith("; did you mean SamplingParams.from_generation_config(sampling_params)?")
    text = said(lambda: Engine(llama, config={"page_size": 4}))
    assert text.endswith("; did you mean EngineConfig(**config)?")


# Models, tokenizers, paths


def saved(folder: Path) -> Path:
    small_model("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


PLACES: dict[str, tuple[str, str]] = {
    "file": ("model.safetensors", "it is a file; pass the folder that it lies in"),
    "GGUF file": (
        "model.gguf",
        "it is a file; load it with AutoModelForCausalLM.from_pretrained(folder, gguf_file=name), "
        "and pass what that returns",
    ),
    "folder with a GGUF file": ("here/model.gguf", "it has no config.json; its GGUF file: load it"),
    "folder without a model": (
        "here/notes.txt",
        "it has no config.json; pass a folder that save_pretrained has written",
    ),
    "adapter": (
        "here/adapter_config.json",
        "it has no config.json; it holds an adapter (PEFT): merge it into its base model, "
        "PeftModel.from_pretrained(base, folder).merge_and_unload(), and pass the result",
    ),
    "folder of a cache": (
        "here/snapshots/abc/config.json",
        "it has no config.json; pass the folder of one revision, below its folder snapshots",
    ),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("as_text", [False, True])
def test_path_that_leads_to_no_model_says_what_to_pass(
    tmp_path: Path, kind: str, as_text: bool
) -> None:
    name, expected = PLACES[kind]
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    place = tmp_path / "here" if name.startswith("here") else file
    text = said(lambda: load(str(place) if as_text else place))
    assert text.startswith(f"model: expected a folder or an id, got {str(place)!r}: {expected}")


def test_tokenizer_that_is_a_file_is_named(tmp_path: Path, llama: Any) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    text = said(lambda: load(llama, file))
    assert text.startswith(
        f"tokenizer: expected a folder or an id, got {str(file)!r}: it is a file"
    )


def test_home_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "model")
    assert load("~/model")[1]("w9").input_ids == [9]


def test_id_without_a_network_says_what_to_check(llama: Any) -> None:
    text = said(lambda: load("nobody/no-such-model"), OSError)
    assert text.startswith("model: expected a folder that exists here, or an id that the hub knows")
    assert "got 'nobody/no-such-model': " in text
    assert "Without a network, pass a folder." in text
    assert said(lambda: load(llama, "nobody/none"), OSError).startswith("tokenizer: expected a ")


def test_folder_without_a_tokenizer_warns_what_to_pass(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match="no tokenizer, so no text: pass tokenizer=..., or prompts"
    ):
        load(tmp_path)


def test_what_is_no_tokenizer_says_what_to_pass(llama: Any) -> None:
    processor = type("TinyProcessor", (), {"tokenizer": word_tokenizer(), "decode": lambda _: ""})
    assert said(lambda: load(llama, processor())).endswith(
        "got a TinyProcessor: pass its attribute .tokenizer"
    )
    text = said(lambda: load(llama, word_tokenizer().backend_tokenizer))
    assert "PreTrainedTokenizerFast(tokenizer_object=tokenizer)" in text
    text = said(lambda: load(word_tokenizer(), llama))
    assert text.endswith("got LlamaForCausalLM, a model: the model comes first, then the tokenizer")


def test_text_without_a_tokenizer_says_what_to_pass(llama: Any) -> None:
    (output,) = cbfn.generate(llama, ["w4"], SamplingParams(max_tokens=1))
    assert str(output.error) == (
        "prompts[0]: expected token ids without a tokenizer, got the text 'w4'; "
        "pass tokenizer=... beside the model"
    )


def test_devices_say_how_to_move_the_model() -> None:
    model = small_model("llama").to("meta")
    assert "load them all, without offloading" in said(lambda: adopt(model), ModelNotSupported)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (
            ["mps:0"],
            "on ['mps:0'], expected one device, CPU or CUDA: model.to(\"cpu\", torch.float32)",
        ),
        (["xpu:0"], 'model.to("cpu", torch.float32)'),
        (["cuda:0", "cuda:1"], 'model.to("cuda:0"), or load it without device_map="auto"'),
        (["cpu", "cuda:0"], 'model.to("cpu", torch.float32)'),
    ],
)
def test_parameters_elsewhere_say_how_to_move_them(
    devices: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("llama")
    found = [SimpleNamespace(device=torch.device(device)) for device in devices]
    monkeypatch.setattr(model, "parameters", lambda: iter(found))
    assert expected in said(lambda: adopt(model), ModelNotSupported)


# Versions, extras, GPUs


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = dict(re.match(r"([a-z]+)>=([\d.]+)", n).groups() for n in project["dependencies"])
    assert {name: needs[name] for name in ("torch", "transformers")} == loading.MINIMUM_VERSIONS


@pytest.mark.parametrize(
    ("module", "version", "command"),
    [
        ("torch", "2.10.1+cu128", 'pip install --upgrade "torch>=2.11"'),
        ("torch", "1.13.0", 'pip install --upgrade "torch>=2.11"'),
        ("transformers", "4.57.3", 'pip install --upgrade "transformers>=5.17"'),
        ("transformers", "5.9.0", 'pip install --upgrade "transformers>=5.17"'),
    ],
)
def test_older_releases_are_refused_with_the_command(
    llama: Any, monkeypatch: pytest.MonkeyPatch, module: str, version: str, command: str
) -> None:
    # transformers replaces its own module while it is imported
    monkeypatch.setattr(sys.modules[module], "__version__", version)
    for make in (Engine, Runner):
        text = said(lambda make=make: make(llama), ImportError)
        assert f"got {version}: {command}" in text


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git12", "2.100.0", "3.0.0", "unknown"])
def test_newer_releases_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    loading.check_versions()


@pytest.mark.parametrize(
    ("missing", "program", "command"),
    [
        ("hypothesis", "import cbfn.testing.strategies", 'pip install "cbfn[testing]"'),
        ("hypothesis", "import cbfn.testing.machines", 'pip install "cbfn[testing]"'),
        ("hypothesis", "import cbfn.examples.fuzz_your_scheduler", 'pip install "cbfn[testing]"'),
        ("gguf", "import cbfn.demo as d; d._model_folder('x', [], None)", 'install "cbfn[demo]"'),
    ],
)
def test_missing_extra_comes_with_its_command(
    tmp_path: Path, missing: str, program: str, command: str
) -> None:
    hide = (
        f"import sys, importlib.util as u; real = u.find_spec; sys.modules[{missing!r}] = None\n"
        f"u.find_spec = lambda name, *a: None if name == {missing!r} else real(name, *a)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", hide + program],
        capture_output=True,
        text=True,
        env={"CBFN_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 1
    assert command in run.stderr.splitlines()[-1]


def test_picture_without_matplotlib_comes_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = said(lambda: Trace().plot(tmp_path / "x.png"), ModuleNotFoundError)
    assert text == 'Trace.plot needs matplotlib: pip install "cbfn[plot]"'


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that seems to be on a GPU with 80 GiB, all of them free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return replace(
        adopt(small_model("llama", head_dim=16)), device=torch.device("cuda"), max_model_len=None
    )


def test_gpu_that_is_too_old_is_refused_and_one_that_was_never_tried_is_noted(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.decide(gpu, EngineConfig())[1] == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    (note,) = memory.decide(gpu, EngineConfig())[1]
    assert note.startswith("compute capability 7.5: Triton supports 8.0 and more")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    text = said(lambda: memory.decide(gpu, EngineConfig()))
    assert "the GPU has compute capability 6.1, and Triton needs 7.0 or more" in text
    assert text.endswith('A CPU runs the model too: model.to("cpu", torch.float32)')
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (note,) = memory.decide(gpu, EngineConfig())[1]
    assert note.startswith("an AMD GPU: cbfn was never tried on one")


def test_gpu_without_triton_comes_with_the_command(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda _: None)
    assert "pip install triton" in said(lambda: memory.decide(gpu, EngineConfig()))


# Memory


def test_too_little_memory_names_settings_that_would_do(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided, _ = memory.decide(gpu, EngineConfig(max_memory_percent=0.01, max_batch_tokens=65536))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 4 * GIB))
    text = said(lambda: memory.size(gpu, replace(decided, max_memory_percent=0.6)))
    found = re.search(
        r"\((max_batch_tokens=(\d+) or )?max_memory_percent=([\d.]+) would do\)", text
    )
    assert found, text
    larger = replace(decided, max_memory_percent=float(found[3]))
    assert memory.size(gpu, larger)[0].num_blocks >= 1
    if found[2]:
        fewer = replace(decided, max_memory_percent=0.6, max_batch_tokens=int(found[2]))
        assert memory.size(gpu, fewer)[0].num_blocks >= 1


def test_share_of_a_cpu_that_would_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * GIB))
    config = EngineConfig(
        page_size=16, max_batch_tokens=64, max_requests_per_batch=4, max_memory_percent=1e-6
    )
    text = said(lambda: Engine(small_model("llama"), config=config))
    assert "max_memory_percent (1e-06) (max_memory_percent=0.05 would do). What it takes:" in text
    with Engine(small_model("llama"), config=replace(config, max_memory_percent=0.05)) as engine:
        assert engine.runner.config.num_blocks


def test_host_memory_that_pinning_rounds_up_is_shown(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=48 * GIB))
    decided, _ = memory.decide(gpu, EngineConfig(cpu_offload_space=40))
    assert "got 40.0 (pinned memory for it takes 64); lower it" in said(
        lambda: memory.size(gpu, decided)
    )


# Requests


SPEC = CacheSpec(("full_attention",), 4, 64, 5, vocab_size=100, max_model_len=64)
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "deadline": (
        {"deadline": 3.0},
        {},
        "not served yet, got 3.0; leave it out, and cancel the req",
    ),
    "priority": ({"priority": 2}, {}, "got 2; a policy of your own may: EngineConfig(scheduler="),
    "parameter": (
        {"sampling_params": SamplingParams(n=2)},
        {},
        "SamplingParams.n: not served yet, expected 1, got 2; leave it out",
    ),
    "model's length": (
        {"prompt_token_ids": [1] * 64},
        {},
        "the model takes 64 tokens; shorten the prompt",
    ),
    "cache": (
        {"prompt_token_ids": [1] * 13},
        {},
        "shorten the prompt, or raise EngineConfig.num_blocks or max_memory_percent",
    ),
    "queue": (
        {},
        {"max_queue_size": 1},
        "(max_queue_size=1); take a step first, or raise EngineConfig.max_queue_size",
    ),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_refused_request_says_what_to_change(kind: str) -> None:
    values, settings, expected = REQUESTS[kind]
    state = scheduler.init(SPEC, EngineConfig(**settings))
    if "max_queue_size" in settings:
        state = scheduler.submit(state, Request("first", [1]))
    request = Request("a", **{"prompt_token_ids": [1], **values})
    assert expected in said(lambda: scheduler.submit(state, request), RequestRejected)
