"""Launching plans and collecting their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbfn import kv as kv_cache
from cbfn import memory
from cbfn.attention import gather, split
from cbfn.config import EngineConfig
from cbfn.model import Adopted, adopt
from cbfn.plan import Bucket, PackedBatch, pack
from cbfn.sample import SamplingNeeds
from cbfn.step import AttentionInputs, StepFunction, StepInputs, compose
from cbfn.types import CacheSpec, Plan, StepResult


@dataclass(slots=True, eq=False)
class Ticket:
    """A launched step that was not collected yet."""

    plan: Plan
    run: Callable[[], StepResult] | None


class Runner:
    """Runs plans on a model.

    Arguments:
        model: a loaded transformers causal LM; used in place, see `cbfn.model`.
        config: fields that are None are decided here; the result is `runner.config`.
        step: a step function of the caller's; None stands for `cbfn.step.compose()`.

    Raises ModelNotSupported, or ValueError for a setting that does not work here.
    """

    @torch.inference_mode(False)  # what is written to later must be no inference tensor
    def __init__(
        self, model: Any, config: EngineConfig | None = None, step: StepFunction | None = None
    ) -> None:
        self.model = adopt(model)
        self.config, self.cache_spec = memory.decide(self.model, config or EngineConfig())
        self.notes: tuple[str, ...] = ()
        _label_layers(self.model, self.cache_spec)
        self.kv = kv_cache.allocate(
            self.cache_spec,
            self.model.num_kv_heads,
            self.model.head_dim,
            self.model.dtype,
            self.model.device,
        )
        self._step = step or compose()
        if self.config.compile:
            self._step = torch.compile(
                self._step, fullgraph=True, options={"triton.cudagraphs": False}
            )
        self._previous: Plan | None = None
        self._previous_token_ids = torch.zeros(self.config.row_budget, dtype=torch.int64)

    def launch(self, plan: Plan) -> Ticket:
        """Enqueues one step. Its result exists once the ticket is collected."""
        previous, self._previous = self._previous, plan

        def run() -> StepResult:
            try:
                return StepResult(self._run(plan, previous))
            except Exception as error:
                return StepResult(error=error)

        return Ticket(plan, run)

    def collect(self, ticket: Ticket) -> StepResult:
        """Returns the result of a launched step; an exception of the step is its `error`.

        Raises ValueError for a ticket that was collected before.
        """
        if ticket.run is None:
            raise ValueError(f"collect: the ticket of step {ticket.plan.step} was collected before")
        result = ticket.run()
        ticket.run = None
        return result

    def close(self) -> None:
        """Releases the cache and the shell around the model."""
        del self.kv, self.model, self._step

    def _run(self, plan: Plan, previous: Plan | None) -> np.ndarray:
        bucket = Bucket(int(plan.num_tokens.sum()), len(plan))
        packed = pack(plan, bucket, previous)
        inputs = step_inputs(self.model, self.cache_spec, packed)
        with torch.no_grad():
            outputs = self._step(inputs, self.kv, self._previous_token_ids)
        self._previous_token_ids[: len(plan)] = outputs.token_ids
        return outputs.token_ids.numpy()[:, None]


def step_inputs(model: Adopted, spec: CacheSpec, packed: PackedBatch) -> StepInputs:
    """Returns the tensors of a packed batch, which share its memory."""
    noise = bool((packed.temperature > 0).any())
    filters = noise and bool(((packed.top_k > 0) | (packed.top_p < 1) | (packed.min_p > 0)).any())
    names = (
        "input_ids positions carry_index logits_index temperature top_k top_p min_p seeds "
        "sample_positions"
    )
    return StepInputs(
        model=model,
        page_size=spec.page_size,
        needs=SamplingNeeds(noise, filters),
        **{name: _tensor(getattr(packed, name)) for name in names.split()},
        attention={t: _attention_inputs(spec, packed, t) for t in spec.attention_types},
    )


def _attention_inputs(spec: CacheSpec, packed: PackedBatch, attention_type: str) -> AttentionInputs:
    """Returns the addresses of one attention type."""
    rows = packed.num_rows
    cu_seqlens, seq_lens = packed.cu_seqlens[: rows + 1], packed.seq_lens[:rows]
    table = packed.block_table[attention_type][:rows]
    # the scheduler puts rows of one token first
    border = int(np.argmax(np.append(np.diff(cu_seqlens) > 1, True)))
    place = np.arange(border)
    items = split.items(spec, attention_type, table[:border], seq_lens[:border], place)
    tiles = None
    if border < rows:
        tiles, places = gather.tiles(
            spec, attention_type, table[border:], cu_seqlens[border:], seq_lens[border:]
        )
        place = np.concatenate([place, places + border])
    slots = _tensor(packed.slot_mapping[attention_type])
    lines = kv_cache.first_line(slots, spec, attention_type)
    return AttentionInputs(lines, items, tiles, torch.from_numpy(place))


def _tensor(values: np.ndarray) -> Tensor:
    """Returns a tensor with a copy of read-only values: torch has no read-only tensors."""
    return torch.from_numpy(values.copy())


def _label_layers(model: Adopted, spec: CacheSpec) -> None:
    """Tells each attention module of the shell its type and its place in a block."""
    offsets = kv_cache.layer_pages(spec)
    for module, offset, attention_type in zip(
        model.attention_modules, offsets, spec.layer_types, strict=True
    ):
        module.cbfn_attention_type = attention_type  # type: ignore[assignment]
        module.cbfn_layer_page = torch.tensor(offset, device=model.device)
