"""The model is used in place, left as it was, and refused with the reason where it cannot run."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import cbfn
from cbfn import Engine, EngineConfig, SamplingParams
from cbfn.model import ModelNotSupported, adopt, eos_token_ids, load
from cbfn.types import FULL, SLIDING
from tests.conftest import FAMILIES, SMALL, greedy_alone, small_model, word_tokenizer

CONFIG = EngineConfig(page_size=4, num_blocks=64, max_batch_tokens=16)
PROMPT = [5, 17, 99, 3, 42, 42, 8]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    """Returns every tensor that a module tree holds, registered or not."""
    found = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        found += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return found


def portrait(model: Any) -> dict[str, Any]:
    """Returns all that the engine promises to leave as it is, of a model and of the process."""
    parts = list(model.modules())
    return {
        "modes": [part.training for part in parts],
        "classes": [type(part) for part in parts],
        "attributes": [sorted(vars(part)) for part in parts],
        "forward": [part.forward for part in parts],
        "hooks": [
            [list(value.items()) for name, value in sorted(vars(part).items()) if "hooks" in name]
            for part in parts
        ],
        "config": model.config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "attention": [
            part.config._attn_implementation for part in parts if hasattr(part, "config")
        ],
        "parameters": [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()],
        "buffers": [(id(b), b.data_ptr()) for b in model.buffers()],
        "values": [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
        "torch generator": torch.get_rng_state(),
        "numpy generator": np.random.get_state()[1].tolist(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        if name in ("values", "torch generator"):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
        else:
            assert after[name] == value, name


# Used in place


@pytest.mark.parametrize("family", FAMILIES)
def test_shell_holds_the_tensors_of_the_model_and_no_others(family: str) -> None:
    model = small_model(family)
    shell = adopt(model).module
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in shell.named_parameters(remove_duplicate=False):
        assert parameter is theirs.pop(name)
    assert not theirs
    known = {tensor.data_ptr() for tensor in tensors_in(model)}
    added = [tensor for tensor in tensors_in(shell) if tensor.data_ptr() not in known]
    assert sum(tensor.numel() for tensor in added) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_all_tokens_are_those_of_each(family: str) -> None:
    model = adopt(small_model(family))
    ids = torch.arange(1, 6)

    def attend(module: Any, query: Any, key: Any, value: Any, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2)

    with torch.no_grad():
        every = model.logits(attend, ids, ids, None)
        named = model.logits(attend, ids, ids, torch.tensor([4, 0, 2]))
    torch.testing.assert_close(every[[4, 0, 2]], named)


def test_engine_adds_no_copy_of_a_weight(llama: Any) -> None:
    with Engine(llama, config=CONFIG) as engine:
        engine.add_request(PROMPT, greedy(3))
        list(engine.stream())
        known = {tensor.data_ptr() for tensor in tensors_in(llama)}
        added = [t for t in tensors_in(engine.runner.model.module) if t.data_ptr() not in known]
        assert sum(tensor.numel() for tensor in added) <= 2  # a place for each layer


def test_model_and_process_are_as_before_after_building_between_steps_and_at_the_end() -> None:
    model = small_model("gemma3").train()
    model.model.layers[1].eval()
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    calls: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("hook"))
    model.lm_head.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.set_attn_implementation("eager")
    before = portrait(model)
    with Engine(model, config=CONFIG) as engine:
        assert_same(before, portrait(model))
        engine.add_request(PROMPT, greedy(6))
        engine.add_request(PROMPT[:3], SamplingParams(max_tokens=6, seed=1))
        while engine.has_unfinished():
            engine.step()
            assert_same(before, portrait(model))
    assert_same(before, portrait(model))
    assert "backward" not in calls
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generators_of_the_process_are_as_before() -> None:
    """In a process of its own: the type checker of the tests draws from Python's generator."""
    script = """if True:
        import random, numpy, torch
        from cbfn import Engine, SamplingParams
        from tests.conftest import small_model

        def states():
            torch_state = torch.get_rng_state().tolist()
            return random.getstate(), numpy.random.get_state()[1].tolist(), torch_state

        model = small_model("gemma2")
        before = states()
        with Engine(model) as engine:
            engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
            assert len(list(engine.stream())) == 5
        assert states() == before
    """
    subprocess.run([sys.executable, "-c", script], check=True)


def test_model_runs_without_dropout_while_it_is_in_training_mode() -> None:
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    sizes = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = build(transformers.GPT2Config(vocab_size=128, **sizes, **rates)).train()
    with Engine(model, config=CONFIG) as engine:
        engine.add_request(PROMPT, greedy(8))
        tokens = list(engine.stream())[-1].token_ids
    assert model.training
    assert tokens == greedy_alone(model.eval(), PROMPT, 8)


def test_forward_and_training_step_between_two_steps() -> None:
    model = small_model("llama").train()
    twin = copy.deepcopy(model)
    ids = torch.tensor([PROMPT])
    config = EngineConfig(page_size=4, num_blocks=64, allow_block_sharing=False)
    with Engine(model, config=config) as engine:
        engine.add_request(PROMPT, greedy(20))
        engine.step()
        engine.step()
        losses = []
        for trained in (model, twin):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
            loss = trained(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours.grad, theirs.grad)
        list(engine.stream())
        engine.weights_updated()
        engine.add_request(PROMPT, greedy(12))
        after = list(engine.stream())[-1].token_ids
    assert after == greedy_alone(twin.eval(), PROMPT, 12)
    assert after != greedy_alone(small_model("llama"), PROMPT, 12)


def test_generate_of_transformers_works_between_two_steps(llama: Any) -> None:
    alone = greedy_alone(llama, PROMPT, 10)
    with Engine(llama, config=CONFIG) as engine:
        engine.add_request(PROMPT, greedy(10))
        engine.step()
        assert greedy_alone(llama, PROMPT, 10) == alone
        assert list(engine.stream())[-1].token_ids == alone


@pytest.mark.parametrize("build", [False, True])
@pytest.mark.parametrize("step", [False, True])
def test_inference_mode_makes_no_difference(llama: Any, build: bool, step: bool) -> None:
    with torch.inference_mode(build):
        engine = Engine(llama, config=CONFIG)
    engine.add_request(PROMPT, greedy(4))
    with torch.inference_mode(step):
        engine.step()
    assert list(engine.stream())[-1].token_ids == greedy_alone(llama, PROMPT, 4)
    engine.close()


def test_two_engines_share_a_model(llama: Any) -> None:
    alone = greedy_alone(llama, PROMPT, 10)
    other = EngineConfig(page_size=16, num_blocks=8)
    with Engine(llama, config=CONFIG) as one, Engine(llama, config=other) as two:
        for engine in (one, two):
            engine.add_request(PROMPT, greedy(10))
        for first, second in zip(one.stream(), two.stream(), strict=True):
            assert first.token_ids == second.token_ids
        assert second.token_ids == alone
        one.close()
        two.add_request(PROMPT, greedy(10))
        assert list(two.stream())[-1].token_ids == alone


def check_hooked(compile: bool) -> None:
    """Checks that hooks on a layer, inside one, and on what is beside them have their effect."""
    model = small_model("llama")
    inner = model.model
    for part in (inner.layers[0], inner.layers[1].mlp, inner.norm):
        part.register_forward_hook(lambda _, __, hidden: hidden * 0.5 + 0.1)
    with Engine(model, config=replace(CONFIG, compile=compile)) as engine:
        engine.add_request(PROMPT, greedy(10))
        tokens = list(engine.stream())[-1].token_ids
    assert tokens == greedy_alone(model, PROMPT, 10)
    assert tokens != greedy_alone(small_model("llama"), PROMPT, 10)


def test_hooks_of_the_model_have_their_effect() -> None:
    check_hooked(compile=False)


@pytest.mark.compiled
def test_hooks_of_the_model_have_their_effect_where_it_is_compiled() -> None:
    check_hooked(compile=True)


def scaled_forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 0.7 * type(module).forward(module, *args, **kwargs)


def check_replaced(compile: bool) -> None:
    model = small_model("llama")
    for part in (model.model.layers[0].mlp.up_proj, model.model.layers[1]):
        part.forward = partial(scaled_forward, part)
    with Engine(model, config=replace(CONFIG, compile=compile)) as engine:
        engine.add_request(PROMPT, greedy(10))
        tokens = list(engine.stream())[-1].token_ids
    assert tokens == greedy_alone(model, PROMPT, 10)
    assert tokens != greedy_alone(small_model("llama"), PROMPT, 10)


def test_forward_that_was_replaced_has_its_effect() -> None:
    check_replaced(compile=False)


@pytest.mark.compiled
def test_forward_that_was_replaced_has_its_effect_where_it_is_compiled() -> None:
    check_replaced(compile=True)


def test_model_can_be_saved_while_the_engine_is_open(tmp_path: Path) -> None:
    model = small_model("gemma2")
    with Engine(model, config=CONFIG) as engine:
        engine.add_request(PROMPT, greedy(8))
        engine.step()
        model.save_pretrained(tmp_path)
        tokens = list(engine.stream())[-1].token_ids
    assert "cbfn" not in (tmp_path / "config.json").read_text()
    again, _ = load(tmp_path, word_tokenizer())
    for (name, ours), (_, theirs) in zip(
        sorted(model.named_parameters()), sorted(again.named_parameters()), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert again.config._attn_implementation == model.config._attn_implementation
    assert greedy_alone(again, PROMPT, 8) == tokens


# What is read off a model


def test_hybrid_model_is_described() -> None:
    adopted = adopt(small_model("gemma3"))
    assert adopted.layer_types == (SLIDING,) * 5 + (FULL,)
    assert adopted.sliding_window == 16
    assert (adopted.num_heads, adopted.num_kv_heads, adopted.head_dim) == (4, 2, 8)
    assert (adopted.vocab_size, adopted.num_logits, adopted.max_model_len) == (128, 128, 256)
    assert (adopted.dtype, adopted.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (7, 9, (7,)),
        ([7, 8], 9, (7, 8)),
        (None, 9, (9,)),
        (None, [9, 10], (9, 10)),
        (None, None, ()),
        (-1, 9, ()),
        (0, 9, (0,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    model = small_model("llama")
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    assert eos_token_ids(model) == expected


@pytest.mark.parametrize("place", ["/no/such/model", "./no", "~/no", "a/b/c", Path("no")])
def test_paths_that_lead_nowhere_are_named(place: str | Path) -> None:
    expected = f"expected a folder or an id, got {str(place)!r}: it does not exist"
    with pytest.raises(ValueError, match=re.escape(f"model: {expected}")):
        load(place)
    with pytest.raises(ValueError, match=re.escape(f"tokenizer: {expected}")):
        load("org/model", place)


def test_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no tokenizer, so no text"):
        model, tokenizer = load(tmp_path)
    assert tokenizer is None
    assert model.dtype == torch.float32
    word_tokenizer().save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        assert load(path)[1]("w9 w8").input_ids == [9, 8]
    own = word_tokenizer()
    assert load(tmp_path, own)[1] is own
    assert load(model, tmp_path)[1]("w9").input_ids == [9]
    assert load(model) == (model, None)


# Models that run


def variant(name: str) -> Any:
    rope = {"rope_type": name, "rope_theta": 10_000.0, "factor": 2.0}
    if name == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    return transformers.LlamaConfig(**SMALL, num_hidden_layers=2, rope_parameters=rope)


LEARNED = {"vocab_size": 128, "max_position_embeddings": 256}
OTHERS: dict[str, Callable[[], Any]] = {
    "linear rope": lambda: variant("linear"),
    "llama3 rope": lambda: variant("llama3"),
    "yarn rope": lambda: variant("yarn"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=128, n_positions=256, n_embd=32, n_layer=2, n_head=4
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **LEARNED, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "opt": lambda: transformers.OPTConfig(
        **LEARNED, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL, num_hidden_layers=4, sliding_window=16),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL, num_hidden_layers=2, attention_multiplier=0.2
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, num_hidden_layers=2),
    "phi3": lambda: transformers.Phi3Config(**SMALL, num_hidden_layers=2, sliding_window=16),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL, num_hidden_layers=4),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **SMALL, num_hidden_layers=2, sliding_window=16
    ),
    "values as wide as keys": lambda: latent_attention(12),
}


def latent_attention(value_dim: int) -> Any:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "head_dim": 4},
        **sizes,
        **experts,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        v_head_dim=value_dim,
    )


def build(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.mark.parametrize("name", OTHERS)
def test_further_models_equal_generate(name: str) -> None:
    model = build(OTHERS[name]())
    prompts = [PROMPT, PROMPT[:1], list(range(20, 55))]
    with Engine(model, config=CONFIG) as engine:
        ids = [engine.add_request(p, SamplingParams(8, temperature=0)) for p in prompts]
        ended = {o.request_id: o for o in engine.stream() if o.status.ended}
    assert [ended[i].error for i in ids] == [None] * 3
    assert [ended[i].token_ids[:] for i in ids] == [greedy_alone(model, p, 8) for p in prompts]


# Models that do not


class AddsTokenBefore(nn.Module):
    """A layer that mixes each token with the one before it, as convolutions and recurrences do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden + before)


def changed_layer(change: Callable[[Any], None]) -> Any:
    model = small_model("llama")
    change(model.model.layers[1])
    return model


def fewer_kv_heads(layer: Any) -> None:
    layer.self_attn.k_proj = nn.Linear(32, 8)
    layer.self_attn.v_proj = nn.Linear(32, 8)


def half_precision_keys(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(lambda _, __, out: out.double())
    layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: out.double())
    layer.self_attn.q_proj.register_forward_hook(lambda _, __, out: out.double())
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))


def mix_tokens(layer: Any) -> None:
    layer.mlp = AddsTokenBefore(layer.mlp)


def fail(layer: Any) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such weights")

    layer.mlp.forward = forward


def hold_a_lock(layer: Any) -> None:
    layer.lock = threading.Lock()


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=1))


def window_in_the_configuration_alone() -> Any:
    model = small_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
        layer.self_attn.config.sliding_window = None
    return model


def long_rope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    rope["original_max_position_embeddings"] = 128
    return transformers.LlamaConfig(**SMALL, num_hidden_layers=1, rope_parameters=rope)


class Plain(nn.Linear):
    config = transformers.LlamaConfig()


TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1)
        ),
        "T5ForConditionalGeneration cannot run here: it is an encoder-decoder",
    ),
    "decoder of an encoder-decoder": (
        lambda: transformers.BartForCausalLM(
            transformers.BartConfig(vocab_size=64, d_model=16, decoder_layers=1, decoder_ffn_dim=16)
        ),
        "its forward does not take position_ids",
    ),
    "attention without keyword arguments": (
        lambda: transformers.StableLmForCausalLM(
            transformers.StableLmConfig(**TINY, intermediate_size=32, num_key_value_heads=2)
        ),
        "its layers hand no keyword arguments on to their attention",
    ),
    "no attention interface": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
        ),
        "BloomForCausalLM cannot run here: ",
    ),
    "attention outside the interface": (
        lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=64,
                hidden_size=16,
                num_layers=2,
                num_heads=2,
                attention_types=[[["global"], 2]],
            )
        ),
        "0 of 2 layers attend once, in order, through transformers' attention interface",
    ),
    "state space": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
        ),
        r"layers of type \['linear_attention'\], expected full_attention or sliding_attention",
    ),
    "chunked attention": (
        lambda: transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(
                **SMALL, num_hidden_layers=1, num_local_experts=2, intermediate_size_mlp=64
            )
        ),
        r"layers of type \['chunked_attention'\]",
    ),
    "not causal": (
        lambda: transformers.BertLMHeadModel(transformers.BertConfig(**TINY)),
        "its attention is not causal",
    ),
    "mask of its own": (
        lambda: transformers.DogeForCausalLM(
            transformers.DogeConfig(**SMALL, num_hidden_layers=1, keep_window_size=8)
        ),
        "it makes an attention mask of its own",
    ),
    "dynamic rope": (lambda: build(variant("dynamic")), "rope type 'dynamic' changes with"),
    "longrope": (lambda: build(long_rope()), "rope type 'longrope' changes with"),
    "values narrower than keys": (
        lambda: build(latent_attention(8)),
        "keys have dimension 12, values 8",
    ),
    "different heads": (lambda: changed_layer(fewer_kv_heads), "layers differ in heads"),
    "different dtypes": (lambda: changed_layer(half_precision_keys), "layers differ in heads"),
    "tokens mixed outside attention": (
        lambda: changed_layer(mix_tokens),
        "what it computes of a token depends on the tokens before it",
    ),
    "failing forward": (lambda: changed_layer(fail), r"failed: RuntimeError\('no such weights'\)"),
    "modules that cannot be copied": (
        lambda: changed_layer(hold_a_lock),
        r"its modules cannot be copied: TypeError\(.*lock",
    ),
    "window that attention is not told": (
        window_in_the_configuration_alone,
        "layer 0 has sliding_attention by the configuration, and asks for full_attention",
    ),
    "no weights": (on_meta, r"its parameters are on \['meta'\], expected one device"),
    "no head": (lambda: small_model("llama").model, "it has no language-model head"),
    "plain module": (lambda: nn.Linear(2, 2), "expected a transformers causal LM.*got Linear"),
    "plain module with a config": (lambda: Plain(2, 2), "causal LM.*got Plain"),
    "nothing": (lambda: None, "expected a transformers causal LM.*got NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    with pytest.raises(ModelNotSupported, match=reason):
        Engine(model)
    with pytest.raises(ValueError, match=reason):
        cbfn.generate(model, [PROMPT])


def test_refused_model_is_left_as_it_was() -> None:
    model = changed_layer(mix_tokens).train()
    before = portrait(model)
    with pytest.raises(ModelNotSupported):
        adopt(model)
    assert_same(before, portrait(model))
