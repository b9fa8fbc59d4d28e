"""Launching plans and collecting their results."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from cbfn import kv as kv_cache
from cbfn import memory
from cbfn.compiling import CompiledStep
from cbfn.config import EngineConfig
from cbfn.executors import CpuExecutor, CudaBackend, CudaStream
from cbfn.fusing import fuse
from cbfn.graphs import Graphs, buckets, smallest
from cbfn.inputs import sampling_needs
from cbfn.linear import use_onednn
from cbfn.model import Adopted, adopt, rebind
from cbfn.plan import Bucket
from cbfn.sample import SamplingNeeds
from cbfn.slots import CpuSlot, CudaSlot, check_shape
from cbfn.step import StepFunction, compose
from cbfn.streams import TwoSlots, Work
from cbfn.trace import Trace
from cbfn.types import CacheSpec, Plan, StepResult


@dataclass(slots=True, eq=False)
class Ticket:
    """A launched step that was not collected yet; `step` is None where it could not be launched."""

    plan: Plan
    step: int | None = None
    error: Exception | None = None
    collected: bool = False


class Runner:
    """Runs plans on a model.

    Arguments:
        model: a loaded transformers causal LM; used in place, see `cbfn.model`.
        config: fields that are None are decided here; the result is `runner.config`.
        step: a step function of the caller's; None stands for `cbfn.step.compose()`.
        progress: show a bar on stderr while the step is compiled and captured.
        trace: notes when each step was packed, copied and computed.

    Raises ModelNotSupported, or ValueError for a setting that does not work here.
    """

    @torch.inference_mode(False)  # what later steps write to must be no inference tensor
    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        step: StepFunction | None = None,
        progress: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.trace = trace
        self._source = model
        self.model = adopt(model)
        self.config, self.cache_spec, notes = memory.decide(self.model, config or EngineConfig())
        self.notes: tuple[str, ...] = notes
        _label_layers(self.model, self.cache_spec)
        self._groups = fuse(self.model.module) if self.config.fuse_projections else []
        self._places = _places(self.model)
        self.kv = kv_cache.allocate(
            self.cache_spec,
            self.model.num_kv_heads,
            self.model.head_dim,
            self.model.dtype,
            self.model.device,
        )
        kind = _CudaDevice if self.model.device.type == "cuda" else _CpuDevice
        self._device: _Device = kind(self, step or compose())
        self._previous: Plan | None = None
        self._device.warm_up(progress)

    def launch(self, plan: Plan) -> Ticket:
        """Enqueues one step: the copy of its inputs, the step itself, the copy of its results.

        Its result exists once the ticket is collected. Raises SlotInUse where two steps are
        launched and not collected; anything else that goes wrong is the result's `error`.
        """
        ticket = Ticket(plan)
        work = self._device.work(ticket, self._previous)
        if self.trace is not None:
            work = self.trace.work(work, plan.step, self.model.device)
        try:
            ticket.step = self._device.two_slots.launch(work, carries=bool(plan.pending.any()))
        except ValueError as error:  # from packing: nothing was enqueued
            ticket.error = error
        self._previous = plan
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for a launched step and returns its result; what it raised is the `error`.

        Tickets are collected once, in order. Raises SlotInUse otherwise.
        """
        if ticket.step is None and not ticket.collected:
            ticket.collected = True
            return StepResult(error=ticket.error)
        index = self._device.two_slots.collect(-1 if ticket.step is None else ticket.step).index
        ticket.collected = True
        if ticket.error is not None:
            return StepResult(error=ticket.error)
        return StepResult(self._device.slots[index].results(len(ticket.plan))[:, None])

    def weights_updated(self) -> None:
        """Takes note that weights were changed, in place or by other parameters.

        Raises ValueError where captured steps would go on with the storage of an old one.
        """
        rebind(self._source, self.model)
        for group in self._groups:
            group.gather()
        if self.config.use_cuda_graph:
            places = _places(self.model)
            moved = [name for name, place in self._places.items() if places.get(name) != place]
            if moved:
                raise ValueError(
                    f"weights_updated: expected changes in place, got new storage for {moved[:3]}"
                    f"{f' and {len(moved) - 3} more' if len(moved) > 3 else ''}"
                )

    @property
    def startup(self) -> list[tuple[str, float]]:
        """What was compiled and captured before the first launch, and the seconds it took."""
        return list(self._device.startup)

    def memory(self) -> dict[str, int]:
        """Returns bytes: of the KV cache, of the slots' buffers, of the pool that graphs share.

        `largest_graph_bytes` is what the pool had after the first capture, of the largest bucket.
        """
        return {"kv_bytes": self.kv.numel() * self.kv.element_size(), **self._device.memory()}

    def close(self) -> None:
        """Releases the cache, the graphs and the shell around the model; a second call is idle."""
        if hasattr(self, "_device"):
            self._device.close()
            del self.kv, self.model, self._device, self._groups, self._source


class _Device(Protocol):
    """What a runner needs of the CPU or of a CUDA device."""

    two_slots: TwoSlots
    slots: tuple[Any, Any]
    startup: list[tuple[str, float]]

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        """Returns the operations of one step."""

    def warm_up(self, progress: bool) -> None:
        """Compiles and captures what can be before the first launch."""

    def memory(self) -> dict[str, int]:
        """Returns the bytes of slots and graphs."""

    def close(self) -> None:
        """Releases what the device holds."""


class _CpuDevice:
    def __init__(self, runner: Runner, step: StepFunction) -> None:
        config, model = runner.config, runner.model
        self.kv = runner.kv
        if use_onednn(model.module):
            runner.notes += ("linear layers run through oneDNN",)
        self.step = CompiledStep(step, model) if config.compile else step
        self.two_slots = TwoSlots(CpuExecutor())
        self.least = least_size(config)
        self.startup: list[tuple[str, float]] = []
        rows, padded = max(config.row_budget, self.least), bool(config.compile)
        spec = runner.cache_spec
        self.slots = (CpuSlot(model, spec, rows, padded), CpuSlot(model, spec, rows, padded))

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        plan, slot, other = ticket.plan, *_pair(self)
        tokens = max(int(plan.num_tokens.sum()), self.least)
        bucket = Bucket(tokens, max(len(plan), self.least))

        def compute() -> None:
            try:
                with torch.no_grad():
                    slot.run(self.step, self.kv, other.outputs)
            except Exception as error:
                ticket.error = error

        return Work(
            fill=lambda: slot.fill(plan, bucket, previous),
            copy_in=slot.copy_in,
            compute=compute,
            copy_out=slot.copy_out,
        )

    def warm_up(self, progress: bool) -> None:
        """Does nothing: a CPU compiles when it first runs a step."""

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        del self.kv, self.step, self.slots


class _CudaDevice:
    def __init__(self, runner: Runner, step: StepFunction) -> None:
        self.config, self.model, self.kv = runner.config, runner.model, runner.kv
        self.step = CompiledStep(step, self.model) if self.config.compile else step
        self.two_slots = TwoSlots(CudaBackend(self.model.device))
        least = least_size(self.config)
        self.max_rows = max(self.config.row_budget, least)
        self.buckets = buckets(self.config.token_budget, self.max_rows, least)
        self.slots = (self._slot(runner.cache_spec), self._slot(runner.cache_spec))
        compute = self.two_slots.compute
        assert isinstance(compute, CudaStream)
        self.graphs = Graphs(compute.stream) if self.config.use_cuda_graph else None
        self.startup: list[tuple[str, float]] = []
        # all buffers were filled on the default stream, which no other stream waits for
        torch.cuda.synchronize(self.model.device)

    def _slot(self, spec: CacheSpec) -> CudaSlot:
        return CudaSlot(self.model, spec, self.max_rows, self.buckets)

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        plan, slot, _ = ticket.plan, *_pair(self)
        index = self.two_slots.next_slot.index
        bucket = smallest(self.buckets, len(plan), int(plan.num_tokens.sum()))
        s, seats = plan.inputs.sequences, plan.inputs.seats
        needs = sampling_needs(s.temperature[seats], s.top_k[seats], s.top_p[seats], s.min_p[seats])

        def compute() -> None:
            try:
                self._compute(bucket, index, needs)
            except Exception as error:
                ticket.error = error

        return Work(
            fill=lambda: slot.fill(plan, bucket, previous),
            copy_in=slot.copy_in,
            compute=compute,
            copy_out=slot.copy_out,
        )

    def _compute(self, bucket: Bucket, index: int, needs: SamplingNeeds) -> None:
        if self.graphs is None:
            self._launcher(bucket, index, needs)()
            return
        key = (bucket, index, needs)
        if key not in self.graphs:
            self.graphs.capture(key, self._launcher(*key))
        self.graphs.replay(key)

    def _launcher(self, bucket: Bucket, index: int, needs: SamplingNeeds) -> Any:
        slot, other = self.slots[index], self.slots[1 - index]
        inputs = slot.inputs(bucket, needs=needs)

        def launch() -> None:
            with torch.no_grad():
                token_ids = self.step(inputs, self.kv, other.outputs).token_ids
            check_shape(token_ids, inputs)
            slot.outputs[: bucket.rows].copy_(token_ids)

        return launch

    def warm_up(self, progress: bool) -> None:
        if self.graphs is None:
            return
        todo = [(bucket, index) for bucket in self.buckets for index in (0, 1)]
        for bucket, index in tqdm(todo, "capturing", disable=not progress, file=sys.stderr):
            start = time.perf_counter()
            key = (bucket, index, SamplingNeeds())
            self.graphs.capture(key, self._launcher(*key))
            name = f"{bucket.tokens} tokens, {bucket.rows} rows, slot {index}"
            self.startup.append((name, time.perf_counter() - start))
        if isinstance(self.step, CompiledStep):
            self.step.freeze()

    def memory(self) -> dict[str, int]:
        sizes = {"io_bytes": sum(slot.num_bytes for slot in self.slots)}
        if self.graphs is not None:
            sizes["graph_bytes"] = self.graphs.num_bytes
            sizes["largest_graph_bytes"] = self.graphs.first_bytes
        return sizes

    def close(self) -> None:
        torch.cuda.synchronize()
        if self.graphs is not None:
            self.graphs.close()
        del self.kv, self.model, self.step, self.slots


def _places(model: Adopted) -> dict[str, int]:
    """Returns the address of each parameter."""
    return {name: p.data_ptr() for name, p in model.module.named_parameters()}


def least_size(config: EngineConfig) -> int:
    """Returns how many tokens and rows a step has at least: 0 and 1 are no symbolic sizes."""
    return 2 if config.compile else 1


def _pair(device: Any) -> tuple[Any, Any]:
    """Returns the slot of the next launch and the other one."""
    index = device.two_slots.next_slot.index
    return device.slots[index], device.slots[1 - index]


def _label_layers(model: Adopted, spec: CacheSpec) -> None:
    """Tells each attention module of the shell its type and its place in a block."""
    offsets = kv_cache.layer_pages(spec)
    for module, offset, attention_type in zip(
        model.attention_modules, offsets, spec.layer_types, strict=True
    ):
        module.cbfn_attention_type = attention_type  # type: ignore[assignment]
        page = torch.tensor(offset, device=model.device)
        module.register_buffer("cbfn_layer_page", page, persistent=False)
