"""What a runner needs of a CPU or a CUDA device: slots, streams, and the step ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cbfn import kv as kv_cache
from cbfn import progress as bars
from cbfn.compiling import CompiledStep
from cbfn.config import EngineConfig
from cbfn.dependents import pay_off
from cbfn.executors import CpuExecutor, CudaBackend, CudaStream
from cbfn.graphs import Graphs, buckets, smallest
from cbfn.inputs import sampling_needs
from cbfn.model import Adopted
from cbfn.plan import Bucket
from cbfn.sample import ALL_NEEDS, SamplingNeeds
from cbfn.slots import CpuSlot, CudaSlot, check_shape
from cbfn.step import StepFunction
from cbfn.streams import Operation, TwoSlots, Work
from cbfn.types import CacheSpec, Move, Plan, StepResult


@dataclass(slots=True, eq=False)
class Ticket:
    """A plan on its way through the device.

    Arguments:
        step: its number among the launches; None: not launched, for good where `error` is set.
        error: what went wrong so far.
        result: what the launch gave, once it is collected.
    """

    plan: Plan
    step: int | None = None
    error: Exception | None = None
    result: StepResult | None = None

    @property
    def collected(self) -> bool:
        """True once the result is here."""
        return self.result is not None


class Device(Protocol):
    """What a runner needs of the CPU or of a CUDA device."""

    two_slots: TwoSlots
    slots: tuple[Any, Any]
    startup: list[tuple[str, float]]

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        """Returns the operations of one step."""

    def warm_up(self, progress: bool) -> None:
        """Compiles and captures what can be before the first launch."""

    def failure(self) -> Exception | None:
        """Returns what the device answers everything with, None while it works."""

    def memory(self) -> dict[str, int]:
        """Returns the bytes of slots and graphs."""

    def close(self) -> None:
        """Releases what the device holds."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV cache and its chunks in host memory."""

    spec: CacheSpec
    kv: Tensor
    host: Tensor

    def mover(self, moves: Sequence[Move]) -> Operation | None:
        """Returns the operation that enqueues the copies of chunks; None where there are none."""
        return partial(kv_cache.move, self.spec, self.kv, self.host, moves) if moves else None


class CpuDevice:
    """Runs steps on the CPU, one after the other, when their results are needed."""

    def __init__(
        self, model: Adopted, config: EngineConfig, cache: KVCache, step: StepFunction
    ) -> None:
        self.cache, spec = cache, cache.spec
        self.step = CompiledStep(step, model) if config.compile else step
        self.two_slots = TwoSlots(CpuExecutor())
        self.least = least_size(config)
        self.startup: list[tuple[str, float]] = []
        rows, padded = max(config.row_budget, self.least), bool(config.compile)
        self.slots = (CpuSlot(model, spec, rows, padded), CpuSlot(model, spec, rows, padded))

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        plan, slot, other = ticket.plan, *_pair(self)
        tokens = max(int(plan.num_tokens.sum()), self.least)
        bucket = Bucket(tokens, max(len(plan), self.least))

        move_beside = self.cache.mover(plan.moves_beside)

        def compute() -> None:
            with torch.no_grad():
                slot.run(self.step, self.cache.kv, other.outputs)
            if move_beside is not None:  # nothing runs beside a step on a CPU
                move_beside()

        move_before = self.cache.mover(plan.moves_before)
        return _work(ticket, slot, bucket, previous, compute, move_before)

    def warm_up(self, progress: bool) -> None:
        """Does nothing: a CPU compiles when it first runs a step."""

    def failure(self) -> Exception | None:
        return None

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        _drop(self)


class CudaDevice:
    """Runs steps on a CUDA device: replays of captured graphs, or eager launches without them."""

    def __init__(
        self, model: Adopted, config: EngineConfig, cache: KVCache, step: StepFunction
    ) -> None:
        self.cache, spec = cache, cache.spec
        self.step = CompiledStep(step, model) if config.compile else step
        self.device = model.device
        self.two_slots = TwoSlots(CudaBackend(model.device))
        self.buckets = buckets_of(config)
        rows = self.buckets[0].rows
        self.slots = (
            CudaSlot(model, spec, rows, self.buckets),
            CudaSlot(model, spec, rows, self.buckets),
        )
        compute = self.two_slots.compute
        assert isinstance(compute, CudaStream)
        self.graphs = Graphs(compute.stream)
        self.captures = bool(config.use_cuda_graph)
        self.startup: list[tuple[str, float]] = []
        # all buffers were filled on the default stream, which no other stream waits for
        torch.cuda.synchronize(model.device)

    def work(self, ticket: Ticket, previous: Plan | None) -> Work:
        plan, slot, _ = ticket.plan, *_pair(self)
        index = self.two_slots.next_slot.index
        bucket = smallest(self.buckets, len(plan), int(plan.num_tokens.sum()))
        s, seats = plan.inputs.sequences, plan.inputs.seats
        needs = sampling_needs(s.temperature[seats], s.top_k[seats], s.top_p[seats], s.min_p[seats])

        def compute() -> None:
            if self.captures:
                self.graphs.replay((bucket, index, needs))
            else:
                self._launcher(bucket, index, needs)()

        moves = map(self.cache.mover, (plan.moves_before, plan.moves_beside))
        return _work(ticket, slot, bucket, previous, compute, *moves)

    def _launcher(self, bucket: Bucket, index: int, needs: SamplingNeeds) -> Callable[[], None]:
        slot, other = self.slots[index], self.slots[1 - index]
        inputs = slot.inputs(bucket, needs=needs)

        def launch() -> None:
            with torch.no_grad():
                token_ids = self.step(inputs, self.cache.kv, other.outputs).token_ids
            check_shape(token_ids, inputs)
            slot.outputs[: bucket.rows].copy_(token_ids)

        return launch

    def warm_up(self, progress: bool) -> None:
        """Compiles all kinds of steps, and then captures each bucket, slot and kind of sampling.

        The largest bucket comes first, with the sampling that takes most memory, so that all
        others fit into the memory of the first graph. What the rehearsals took is given back
        before there are graphs: a device need not hold both.
        """
        rehearsed: set[tuple[bool, bool, SamplingNeeds]] = set()
        for bucket in self._progress("warming up", progress):
            decodes = bucket.rows == bucket.tokens
            kind = (decodes, pay_off(self.device, bucket.tokens, decodes))
            start = time.perf_counter()
            for number, needs in enumerate(ALL_NEEDS):
                # each size once, for the libraries' sake, and what is compiled for each sampling
                if number == 0 or (*kind, needs) not in rehearsed:
                    self.graphs.rehearse(self._launcher(bucket, 0, needs))
                    rehearsed.add((*kind, needs))
            self._note("compile and run", bucket, start)
        if self.captures:
            torch.cuda.empty_cache()
            self._capture(progress)
        if isinstance(self.step, CompiledStep):
            self.step.freeze()

    def _capture(self, progress: bool) -> None:
        for bucket in self._progress("capturing", progress):
            start = time.perf_counter()
            for needs in ALL_NEEDS:
                for index in (0, 1):
                    key = (bucket, index, needs)
                    self.graphs.capture(key, self._launcher(*key))
            self._note("capture", bucket, start)

    def _progress(self, name: str, shown: bool) -> Iterable[Bucket]:
        return bars.bar(len(self.buckets), name, shown, unit="batch shapes", over=self.buckets)

    def _note(self, name: str, bucket: Bucket, start: float) -> None:
        label = f"{name} {bucket.tokens} tokens, {bucket.rows} rows"
        self.startup.append((label, time.perf_counter() - start))

    def failure(self) -> Exception | None:
        try:
            torch.cuda.synchronize(self.device)
        except Exception as error:
            return error
        return None

    def memory(self) -> dict[str, int]:
        sizes = {"io_bytes": sum(slot.num_bytes for slot in self.slots)}
        if self.captures:
            sizes["num_graphs"] = len(self.graphs)
            sizes["graph_bytes"] = self.graphs.num_bytes
            sizes["largest_graph_bytes"] = self.graphs.first_bytes
        return sizes

    def close(self) -> None:
        torch.cuda.synchronize()
        self.graphs.close()
        _drop(self)


def buckets_of(config: EngineConfig) -> list[Bucket]:
    """Returns the batch shapes of a configuration, largest first: no other has more of anything."""
    return buckets(config.token_budget, config.row_budget, least_size(config))


def least_size(config: EngineConfig) -> int:
    """Returns how many tokens and rows a step has at least: 0 and 1 are no symbolic sizes."""
    return 2 if config.compile else 1


def _work(
    ticket: Ticket,
    slot: Any,
    bucket: Bucket,
    previous: Plan | None,
    compute: Operation,
    move_before: Operation | None = None,
    move_beside: Operation | None = None,
) -> Work:
    """Returns the operations of a step; what goes wrong on the device is the ticket's error."""

    def guarded(operation: Operation) -> Operation:
        def run() -> None:
            grad = torch.is_grad_enabled()
            try:
                operation()
            except Exception as error:
                torch.set_grad_enabled(grad)  # it may have come within the exit of `no_grad`
                ticket.error = error

        return run

    return Work(
        fill=lambda: slot.fill(ticket.plan, bucket, previous),
        copy_in=slot.copy_in,
        compute=guarded(compute),
        copy_out=slot.copy_out,
        moves_before=guarded(move_before) if move_before else None,
        moves_beside=guarded(move_beside) if move_beside else None,
    )


def _drop(device: Device) -> None:
    """Lets go of what takes memory; also behind a call of this that an exception cut short."""
    for name in ("cache", "step", "slots"):
        vars(device).pop(name, None)


def _pair(device: Any) -> tuple[Any, Any]:
    """Returns the slot of the next launch and the other one."""
    index = device.two_slots.next_slot.index
    return device.slots[index], device.slots[1 - index]
