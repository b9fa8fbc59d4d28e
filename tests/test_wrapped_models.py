"""Models within wrappers: compiled and data-parallel ones run in place, others say what to pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import cbfn
from cbfn import Engine, EngineConfig, ModelNotSupported, Runner, SamplingParams
from cbfn.model import adopt, eos_token_ids, load, rebind
from tests.conftest import greedy_alone, small_model, word_tokenizer

CONFIG = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=32)
PROMPT = [4, 5, 6, 7, 8]
FOUR = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process, which DistributedDataParallel asks for."""
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def with_compiled_layers(model: Any) -> Any:
    for index, layer in enumerate(list(model.model.layers)):
        model.model.layers[index] = compiled(layer)
    return model


def with_compiled_parts(model: Any) -> Any:
    with_compiled_layers(model)
    model.model = compiled(model.model)
    model.lm_head = compiled(model.lm_head)
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def with_compiled_forward(model: Any) -> Any:
    model.forward = compiled(model.forward)
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "torch.compile": compiled,
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of a compiled module": lambda model: DistributedDataParallel(compiled(model)),
    "model.compile()": compiled_in_place,
    "compiled layers": with_compiled_layers,
    "compiled layers, trunk and head": with_compiled_parts,
    "compiled forward": with_compiled_forward,
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT])).logits.clone()


def tokens_of(engine: Engine) -> list[int]:
    engine.add_request(PROMPT, FOUR)
    (output,) = [o for o in engine.stream() if o.status.ended]
    assert output.error is None
    return output.token_ids[:]


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("fused", [False, True])
def test_wrapped_model_runs_in_place_and_works_before_and_after(kind: str, fused: bool) -> None:
    inner = small_model("llama")
    parameters = {id(parameter) for parameter in inner.parameters()}
    expected = greedy_alone(inner, PROMPT, 4)
    wrapped = WRAPPED[kind](inner)
    before = logits_of(wrapped)
    config = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=32, fuse_projections=fused)
    with Engine(wrapped, config=config) as engine:
        assert tokens_of(engine) == expected
        assert torch.equal(logits_of(wrapped), before)  # between two steps
        assert {id(parameter) for parameter in engine.runner.model.module.parameters()} == (
            parameters
        )
    assert torch.equal(logits_of(wrapped), before)
    assert {id(parameter) for parameter in wrapped.parameters()} == parameters
    (output,) = cbfn.generate(wrapped, [PROMPT], FOUR, config=CONFIG)
    assert output.token_ids[:] == expected


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_change_through_a_wrapper_are_seen(kind: str, assign: bool) -> None:
    other = small_model("llama", seed=1)
    wrapped = WRAPPED[kind](small_model("llama"))
    # the names of a wrapper have what it wraps by the wrapper's names
    values = zip(wrapped.state_dict(), other.state_dict().values(), strict=True)
    with Engine(wrapped, config=CONFIG) as engine:
        assert tokens_of(engine) == greedy_alone(small_model("llama"), PROMPT, 4)
        with engine.pause():
            weights = {name: value.clone() for name, value in values}
            wrapped.load_state_dict(weights, assign=assign)
            engine.weights_updated()
        assert tokens_of(engine) == greedy_alone(other, PROMPT, 4)


def test_training_through_a_compiled_wrapper_goes_on_beside_an_engine() -> None:
    inner = small_model("llama")
    wrapped = compiled(inner).train()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    ids = torch.tensor([PROMPT])
    with Engine(wrapped, config=CONFIG) as engine:
        tokens_of(engine)
        wrapped(input_ids=ids, labels=ids).loss.backward()
        with engine.pause():
            optimizer.step()
            engine.weights_updated()
        assert wrapped.training
        found = tokens_of(engine)
    assert found == greedy_alone(inner.eval(), PROMPT, 4)


def test_end_of_sequence_ids_and_runners_see_through_a_wrapper() -> None:
    inner = small_model("llama")
    inner.generation_config.eos_token_id = 7
    for kind in ("torch.compile", "DistributedDataParallel", "compiled DDP"):
        wrapped = WRAPPED[kind](inner)
        assert eos_token_ids(wrapped) == (7,)
        assert load(wrapped)[0] is inner
        runner = Runner(wrapped, CONFIG)
        runner.weights_updated()
        runner.close()
        rebind(wrapped, adopt(wrapped))


def test_compiled_layers_are_no_layers_of_the_shell() -> None:
    adopted = adopt(with_compiled_parts(small_model("llama")))
    kinds = {type(module).__name__ for module in adopted.module.modules()}
    assert "OptimizedModule" not in kinds
    assert not any("_orig_mod" in name for name, _ in adopted.module.named_parameters())


# What cannot run says what to pass


def of_module(name: str, module: str, *bases: type, **members: Any) -> type:
    """Returns a class that says it was defined in `module`."""
    return type(name, bases or (object,), {"__module__": module, **members})


def peft_model() -> Any:
    """Returns a stand-in for what `peft.get_peft_model` returns."""
    kind = of_module("PeftModelForCausalLM", "peft.peft_model", nn.Module)
    model: Any = kind()
    model.base_model = small_model("llama")
    return model


def with_a_lora_layer() -> Any:
    model = small_model("llama")
    kind = of_module("Linear", "peft.tuners.lora.layer", nn.Linear)
    model.model.layers[1].mlp.up_proj = kind(32, 64, bias=False)
    return model


def with_loaded_adapter() -> Any:
    model = small_model("llama")
    model.peft_config, model._hf_peft_config_loaded = {"default": None}, True
    return model


def fully_sharded() -> Any:
    kind = of_module(
        "FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        nn.Module,
    )
    model: Any = kind()
    model.module = small_model("llama")
    return model


def sharded_by_fully_shard() -> Any:
    model = small_model("llama")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    return model


def with_a_distributed_tensor() -> Any:
    from torch.distributed.tensor import distribute_tensor

    model = small_model("llama")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    weight = distribute_tensor(model.lm_head.weight.detach(), mesh)
    model.lm_head.weight = nn.Parameter(weight)
    return model


def partitioned_by_zero() -> Any:
    model = small_model("llama")
    model.lm_head.weight.ds_id = 3
    return model


def pipeline() -> Any:
    return transformers.pipeline(
        "text-generation", model=small_model("llama"), tokenizer=word_tokenizer()
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "PEFT": (peft_model, "PeftModelForCausalLM has adapters (PEFT), which cbfn does not run yet: "),
    "compiled PEFT": (lambda: compiled(peft_model()), "model = peft_model.merge_and_unload()"),
    "LoRA layers": (with_a_lora_layer, "LlamaForCausalLM has adapters (PEFT)"),
    "loaded adapter": (with_loaded_adapter, "LlamaForCausalLM has adapters (PEFT)"),
    "FSDP": (fully_sharded, "the parameters of FullyShardedDataParallel are sharded"),
    "fully_shard": (sharded_by_fully_shard, "are sharded (FSDP, DTensor or ZeRO 3), expected a wh"),
    "DTensor": (with_a_distributed_tensor, "the parameters of LlamaForCausalLM are sharded"),
    "ZeRO 3": (partitioned_by_zero, "gather them in a full state dict"),
    "pipeline": (
        pipeline,
        "got TextGenerationPipeline: pass the model that it holds, ",
    ),
    "average": (
        lambda: torch.optim.swa_utils.AveragedModel(small_model("llama")),
        "got AveragedModel: pass the model that it holds, its attribute .module",
    ),
    "tokenizer": (word_tokenizer, "a tokenizer: the model comes first, then the tokenizer"),
    "class": (
        lambda: transformers.LlamaForCausalLM,
        "got the class LlamaForCausalLM: pass LlamaForCausalLM.from_pretrained(...)",
    ),
    "config": (transformers.LlamaConfig, "pass AutoModelForCausalLM.from_config(config)"),
    "module": (lambda: nn.Linear(2, 2), "got Linear: load one with AutoModelForCausalLM.from_pre"),
    "compiled module": (lambda: compiled(nn.Linear(2, 2)), "got Linear: "),
    "compiled forward": (
        lambda: compiled(small_model("llama").forward),
        "got a compiled function: pass the module that it belongs to",
    ),
    "number": (lambda: 3, "expected a transformers causal LM that is loaded, got int"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_says_what_to_pass(kind: str) -> None:
    make, expected = REFUSED[kind]
    model = make()
    with pytest.raises(ModelNotSupported, match=re.escape(expected)) as info:
        Engine(model, config=CONFIG)
    assert str(info.value).startswith("model: ")
    with pytest.raises(ModelNotSupported):
        Runner(model, CONFIG)


def test_runner_is_told_that_engines_load_paths(tmp_path: Path) -> None:
    for place in ("org/model", tmp_path):
        with pytest.raises(ModelNotSupported, match=r"Engine and generate load paths"):
            Runner(place, CONFIG)


def test_merged_adapters_leave_a_model_that_runs() -> None:
    model = small_model("llama")
    model.peft_config = {"default": None}  # what merging leaves behind is no adapter
    (output,) = cbfn.generate(model, [PROMPT], FOUR, config=CONFIG)
    assert output.token_ids[:] == greedy_alone(small_model("llama"), PROMPT, 4)


@pytest.mark.compiled
def test_compiled_layers_run_in_a_compiled_step() -> None:
    config = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=16, compile=True)
    expected = greedy_alone(small_model("llama"), PROMPT, 4)
    for wrap in (compiled, with_compiled_parts):
        (output,) = cbfn.generate(wrap(small_model("llama")), [PROMPT], FOUR, config=config)
        assert output.error is None
        assert output.token_ids[:] == expected
