"""The buffers of one slot: what the host fills, what the device reads, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from cbfn.inputs import gathered_inputs, paged_inputs
from cbfn.model import Adopted
from cbfn.plan import Bucket, PackedBatch, layout, pack
from cbfn.sample import SamplingNeeds
from cbfn.step import StepInputs, StepOutputs
from cbfn.types import CacheSpec, Plan

Step = Callable[[StepInputs, Tensor, Tensor], StepOutputs]


def check_shape(token_ids: Any, inputs: StepInputs) -> None:
    """Raises ValueError unless a step gave one token, an integer, for each row."""
    expected = inputs.logits_index.shape
    if not isinstance(token_ids, Tensor):
        raise ValueError(f"StepOutputs.token_ids: expected a tensor, got {token_ids!r:.80}")
    if token_ids.shape != expected:
        raise ValueError(
            f"StepOutputs.token_ids: expected shape {tuple(expected)}, got {tuple(token_ids.shape)}"
        )
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"StepOutputs.token_ids: expected torch.int64 or torch.int32, got {token_ids.dtype}"
        )


class CpuSlot:
    """A slot without a device: a buffer is a place in this object, a copy is an assignment."""

    def __init__(self, model: Adopted, spec: CacheSpec, max_rows: int, padded: bool) -> None:
        self._model = model
        self._spec = spec
        self._padded = padded
        self._staging: PackedBatch | None = None
        self._inputs: StepInputs | None = None
        self._results = np.zeros(0, np.int64)
        self.outputs = torch.zeros(max_rows, dtype=torch.int64, device="cpu")

    def fill(self, plan: Plan, bucket: Bucket, previous: Plan | None) -> None:
        """Packs a plan."""
        self._staging = pack(plan, bucket, previous)

    def copy_in(self) -> None:
        """Brings the packed plan to where the step reads it."""
        assert self._staging is not None
        self._inputs = gathered_inputs(self._model, self._spec, self._staging, self._padded)

    def run(self, step: Step, kv: Tensor, previous_token_ids: Tensor) -> None:
        """Computes the step."""
        assert self._inputs is not None
        token_ids = step(self._inputs, kv, previous_token_ids).token_ids
        check_shape(token_ids, self._inputs)
        self.outputs[: len(token_ids)] = token_ids

    def copy_out(self) -> None:
        """Brings the sampled tokens to where the host reads them."""
        self._results = self.outputs.numpy().copy()

    def results(self, num_rows: int) -> Int64[np.ndarray, "B"]:
        """Returns the sampled tokens."""
        return self._results[:num_rows]


class CudaSlot:
    """A slot of one pinned and one device buffer for inputs, and one of each for outputs.

    The device buffers are allocated here, once, outside any graph's memory pool.
    """

    def __init__(
        self, model: Adopted, spec: CacheSpec, max_rows: int, buckets: list[Bucket]
    ) -> None:
        self._model = model
        self._spec = spec
        words = max(layout(bucket, spec).num_words for bucket in buckets)
        pinned = partial(torch.zeros, device="cpu", pin_memory=True)
        self._staging = pinned(words, dtype=torch.int32)
        self._staging_array = self._staging.numpy()
        self._inputs = torch.zeros(words, dtype=torch.int32, device=model.device)
        self._results = pinned(max_rows, dtype=torch.int64)
        self._num_used = 0
        self._num_rows = 0
        self.outputs = torch.zeros(max_rows, dtype=torch.int64, device=model.device)

    def fill(self, plan: Plan, bucket: Bucket, previous: Plan | None) -> None:
        """Packs a plan into the pinned buffer."""
        packed = pack(plan, bucket, previous, out=self._staging_array)
        self._num_used, self._num_rows = packed.num_used, packed.num_rows

    def copy_in(self) -> None:
        """Enqueues one copy to the device, of what the batch uses."""
        used = self._num_used
        self._inputs[:used].copy_(self._staging[:used], non_blocking=True)

    def inputs(self, bucket: Bucket, needs: SamplingNeeds) -> StepInputs:
        """Returns the step inputs of a bucket, which are views of the device buffer."""
        return paged_inputs(self._model, self._spec, bucket, self._inputs, needs)

    def copy_out(self) -> None:
        """Enqueues the copy of the sampled tokens back."""
        rows = self._num_rows
        self._results[:rows].copy_(self.outputs[:rows], non_blocking=True)

    def results(self, num_rows: int) -> Int64[np.ndarray, "B"]:
        """Returns the sampled tokens."""
        return self._results[:num_rows].numpy().copy()

    @property
    def num_bytes(self) -> int:
        """Bytes of this slot's buffers, host and device."""
        tensors = (self._staging, self._inputs, self._results, self.outputs)
        return sum(t.numel() * t.element_size() for t in tensors)
