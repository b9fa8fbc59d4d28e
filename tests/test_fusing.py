"""Projections that compute together give the same tokens, and the parameters stay the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cbfn
from cbfn import Engine, EngineConfig, SamplingParams
from cbfn.fusing import fuse
from tests.conftest import FAMILIES, greedy_alone, small_model

PROMPTS = [[1, 2, 3], [7] * 30, [5, 9] * 10]
GREEDY = SamplingParams(max_tokens=10, temperature=0)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(page_size=16, num_blocks=32, fuse_projections=True, **changes)


def tokens(model: Any, settings: EngineConfig) -> list[list[int]]:
    outputs = cbfn.generate(model, PROMPTS, GREEDY, config=settings)
    assert not [output.error for output in outputs if output.error]
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_projections_give_the_tokens_of_generate(family: str):
    model = small_model(family)
    alone = [greedy_alone(model, prompt, 10) for prompt in PROMPTS]
    assert tokens(model, config()) == alone
    assert [greedy_alone(model, prompt, 10) for prompt in PROMPTS] == alone


@pytest.mark.compiled
def test_fused_projections_compile():
    model = small_model("llama")
    alone = [greedy_alone(model, prompt, 10) for prompt in PROMPTS]
    assert tokens(model, config(compile=True)) == alone


def test_parameters_keep_identity_and_values_and_take_no_second_copy():
    model = small_model("llama")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with Engine(model, config=config()):
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])
        layer = model.model.layers[0].self_attn
        storages = {
            part.weight.untyped_storage().data_ptr()
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        }
        assert len(storages) == 1


def test_model_can_be_saved_afterwards(tmp_path: Path):
    model = small_model("llama")
    expected = tokens(model, config())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert tokens(loaded, config()) == expected


@pytest.mark.parametrize("exchanged", [False, True], ids=["in place", "new storage"])
def test_changed_weights_are_seen(exchanged: bool):
    model, other = small_model("llama"), small_model("llama", seed=1)
    with Engine(model, config=config()) as engine, engine.pause():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            if exchanged:
                mine.data = theirs.detach().clone()
            else:
                with torch.no_grad():
                    mine.copy_(theirs)
        engine.weights_updated()
        names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        ended = {o.request_id: list(o.token_ids) for o in engine.stream() if o.status.ended}
    assert [ended[n] for n in names] == [greedy_alone(other, prompt, 10) for prompt in PROMPTS]


def test_engines_beside_each_other_share_the_common_tensors():
    model = small_model("llama")
    with Engine(model, config=config()) as first, Engine(model, config=config()) as second:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.arange(parameter.numel()).sin().view_as(parameter)
        alone = greedy_alone(model, PROMPTS[1], 10)
        for engine in (first, second):
            engine.add_request(PROMPTS[1], GREEDY)
            (*_, output) = engine.stream()
            assert list(output.token_ids) == alone


def test_layers_that_differ_in_more_than_width_stay_alone():
    class Block(nn.Module):
        def __init__(self, gate: nn.Module, up: nn.Module) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = gate, up

    plain = nn.Linear(4, 6, bias=False)
    assert len(fuse(Block(plain, nn.Linear(4, 3, bias=False)))) == 1
    for other in (nn.Linear(4, 6), nn.Linear(5, 6, bias=False), nn.Identity()):
        assert fuse(Block(nn.Linear(4, 6, bias=False), other)) == []
    shared = nn.Linear(4, 6, bias=False)
    assert fuse(Block(shared, shared)) == []


def test_layer_with_another_input_computes_on_its_own():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 3)

    torch.manual_seed(0)
    block = Block()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    gate, up = block.gate_proj(x), block.up_proj(y)
    fuse(block)
    torch.testing.assert_close(block.gate_proj(x), gate)  # a sum near 0 may differ by its rounding
    torch.testing.assert_close(block.up_proj(y), up)
