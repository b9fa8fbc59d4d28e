"""Launching plans and collecting their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import wraps
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from cbfn import kv as kv_cache
from cbfn import memory
from cbfn.config import EngineConfig, checked_config
from cbfn.devices import CpuDevice, CudaDevice, Device, KVCache, Ticket
from cbfn.fusing import fuse
from cbfn.linear import use_own_kernels
from cbfn.loading import check_versions, unwrap
from cbfn.model import Adopted, adopt, rebind
from cbfn.sample import INVALID_TOKEN
from cbfn.step import StepFunction, compose
from cbfn.streams import SlotInUse
from cbfn.trace import Trace
from cbfn.types import CacheSpec, Plan, StepResult

__all__ = ["Runner", "Ticket"]


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that computes in the model's dtype; autocast would cache KV in another.

    An exception leaves autocast, gradients and the current stream as the caller had them: Ctrl-C
    may come within the exit of a context, which then restores nothing.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        grad = torch.is_grad_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        try:
            with ExitStack() as stack:
                for kind in enabled:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return method(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(grad)
            for kind in enabled:
                torch.set_autocast_enabled(kind, True)
            if stream is not None:
                torch.cuda.set_stream(stream)
            raise

    return call


class Runner:
    """Runs plans on a model.

    Arguments:
        model: a loaded transformers causal LM, perhaps within `torch.compile` or
            DistributedDataParallel; used in place, see `cbfn.model`.
        config: fields that are None are decided here; the result is `runner.config`.
        step: a step function of the caller's; None stands for `cbfn.step.compose()`.
        progress: show a bar on stderr while the step is compiled and captured.
        trace: notes when each step was packed, copied and computed.

    `startup` says what was done before the first launch, and how many seconds it took, `breakdown`
    what memory the runner takes at most. `lost` is what a device that is lost answers everything
    with; the results of all launches have it as their error from then on.

    Raises ModelNotSupported, or ValueError for an argument or a setting that does not work here, or
    where memory is too small; the message then says what takes it, and what to lower.
    """

    @_without_autocast
    @torch.inference_mode(False)  # what later steps write to must be no inference tensor
    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        step: StepFunction | None = None,
        progress: bool = False,
        trace: Trace | None = None,
    ) -> None:
        check_versions()
        config = checked_config(config)
        if step is not None and not callable(step):
            raise ValueError(
                f"step: expected a step function or None, got {step!r:.80}; see cbfn.step.compose"
            )
        self.trace = trace
        self.lost: Exception | None = None
        model = self._source = unwrap(model)
        laps = _Laps()
        self.model = adopt(model)
        laps.end("adopt the model")
        decided, notes = memory.decide(self.model, config)
        self.notes: tuple[str, ...] = notes
        # before sizing: fused weights lie in memory as they will stay
        self._groups = fuse(self.model.module) if decided.fuse_projections else []
        if use_own_kernels(self.model.module) and self.model.device.type == "cpu":
            self.notes += ("linear layers run through oneDNN",)
        self.config, self.cache_spec, self.breakdown = memory.size(self.model, decided)
        if self.config.cpu_offload_space and not self.cache_spec.num_host_chunks:
            self.notes += ("no offloading: cpu_offload_space holds no chunk of the cache",)
        _label_layers(self.model, self.cache_spec)
        self._places = _places(self.model)
        self._shapes = _shapes(model)
        self.kv = kv_cache.allocate(
            self.cache_spec,
            self.model.num_kv_heads,
            self.model.head_dim,
            self.model.dtype,
            self.model.device,
        )
        self.host_kv = kv_cache.allocate_host(self.cache_spec, self.kv)
        laps.end("allocate the cache")
        cache = KVCache(self.cache_spec, self.kv, self.host_kv)
        parts = (self.model, self.config, cache, step or compose())
        if self.model.device.type == "cuda":
            self._device: Device = CudaDevice(*parts)
        else:
            self._device = CpuDevice(*parts)
        self._previous: Plan | None = None
        laps.end("make slots and streams")
        self._device.warm_up(progress)
        self.startup: list[tuple[str, float]] = [*laps.taken, *self._device.startup]
        self._memory = {  # nothing grows any more
            "kv_bytes": self.kv.numel() * self.kv.element_size(),
            "host_kv_bytes": self.host_kv.numel() * self.host_kv.element_size(),
            **self._device.memory(),
        }

    def launch(self, plan: Plan) -> Ticket:
        """Enqueues one step: the copy of its inputs, the step itself, the copy of its results.

        Its result exists once the ticket is collected. Raises SlotInUse where two steps are
        launched and not collected; anything else that goes wrong is the result's `error`.
        """
        ticket = Ticket(plan)
        self.resume(ticket)
        return ticket

    @_without_autocast
    def resume(self, ticket: Ticket) -> None:
        """Launches a ticket's plan, or what is left of a launch that an exception cut short.

        A loop that keeps `Ticket(plan)` before this call can repeat the call after Ctrl-C, until it
        returns; once launched, a ticket is left as it is. Raises as `launch` does.
        """
        self._check_open()
        two_slots, plan = self._device.two_slots, ticket.plan
        if ticket.step is None:
            if ticket.error is not None:
                return
            if self.lost is not None:
                ticket.error = self.lost
                return
            ticket.step = two_slots.num_launched  # its number, if it begins
        try:
            if ticket.step < two_slots.num_launched:
                two_slots.go_on()
            else:
                work = self._device.work(ticket, self._previous)
                if self.trace is not None:
                    work = self.trace.work(work, plan.step, self.model.device)
                two_slots.launch(work, carries=bool(plan.pending.any()))
        except SlotInUse:
            ticket.step = None
            raise
        except ValueError as error:
            if ticket.step < two_slots.num_launched:
                raise
            # from packing: nothing was enqueued
            ticket.step, ticket.error, self._previous = None, error, plan
        except Exception:
            if not self._is_lost():
                raise
            ticket.error = self.lost
        self._previous = plan

    @_without_autocast
    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for a launched step and returns its result; what it raised is the `error`.

        Tickets are collected once, in order; `ticket.result` is set from then on. Raises SlotInUse
        otherwise. After an exception it can be called again, unless `ticket.collected` is True.
        """
        self._check_open()
        failed = self.lost is not None or (ticket.step is None and ticket.error is not None)
        if failed and not ticket.collected:
            return self._failed(ticket, ticket.error or self.lost)
        if ticket.step is None:
            raise SlotInUse("collect: expected a ticket that was launched and not collected yet")
        step, two_slots = ticket.step, self._device.two_slots
        # False where an exception came between the end of this and the result's
        if ticket.collected or step >= two_slots.num_collected:
            try:
                two_slots.collect(step)
            except Exception:
                if not self._is_lost():
                    raise
                return self.collect(ticket)
        elif two_slots.slots[step % 2].step is not None:
            raise SlotInUse(f"collect: the results of step {step} were overwritten by a later one")
        if ticket.error is not None:
            self._is_lost()
            return self._failed(ticket, ticket.error)
        token_ids = self._device.slots[step % 2].results(len(ticket.plan))
        ticket.result = _result(token_ids)
        return ticket.result

    def _failed(self, ticket: Ticket, error: BaseException | None) -> StepResult:
        """Returns the result of a step that failed.

        Callers may keep its error, whose traceback then holds no tensors of the step. What it was
        raised from may be the caller's, and is left alone.
        """
        if error is not None:
            clear_frames(error.__traceback__)
        ticket.result = StepResult(error=error)
        return ticket.result

    def _is_lost(self) -> bool:
        """Returns whether the device is lost; asked where something has gone wrong."""
        self.lost = self.lost or self._device.failure()
        return self.lost is not None

    def weights_updated(self) -> None:
        """Takes note that weights were changed, in place or by other parameters.

        Raises ValueError for a weight of another shape or dtype, and where captured steps would go
        on with the storage of an old one.
        """
        self._check_open()
        shapes = _shapes(self._source)
        for name, expected in self._shapes.items():
            if (found := shapes.get(name)) != expected:
                raise ValueError(
                    f"weights_updated: {name}: expected {expected}, got {found}; a model "
                    "of another shape or dtype needs a new engine"
                )
        rebind(self._source, self.model)
        for group in self._groups:
            group.gather()
        if self.config.use_cuda_graph:
            places = _places(self.model)
            moved = [name for name, place in self._places.items() if places.get(name) != place]
            if moved:
                raise ValueError(
                    f"weights_updated: expected changes in place, got new storage for {moved[:3]}"
                    f"{f' and {len(moved) - 3} more' if len(moved) > 3 else ''}; write into the "
                    "parameters, p.data.copy_(new), or set EngineConfig(use_cuda_graph=False)"
                )

    def memory(self) -> dict[str, int]:
        """Returns bytes: of the KV cache, of the slots' buffers, of the pool that graphs share.

        `breakdown` has what was expected of them. `io_bytes` counts both sides of the copies.
        `num_graphs` is a count; `largest_graph_bytes` is what the pool had after the first capture,
        of the largest bucket.
        """
        return dict(self._memory)

    def close(self) -> None:
        """Releases the cache, the graphs and the shell around the model; a second call is idle."""
        if not self._is_closed:
            with suppress(Exception) if self.lost else nullcontext():
                self._release()
            for name in ("kv", "host_kv", "model", "_groups", "_source", "_device"):
                vars(self).pop(name, None)

    @property
    def _is_closed(self) -> bool:
        return not hasattr(self, "_device")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the runner is closed; make a new one")

    def _release(self) -> None:
        self._device.close()
        # guards of compiled functions may keep the tensor, but not its memory
        self.kv.data = self.kv.new_empty(0)  # the second time it changes nothing
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # captures of another engine could not do that


class _Laps:
    """What was done since the beginning, and the seconds that each took."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, float]] = []
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Takes the time since the last one."""
        now = time.perf_counter()
        self.taken.append((name, now - self._last))
        self._last = now


def _places(model: Adopted) -> dict[str, int]:
    """Returns the address of each parameter."""
    return {name: p.data_ptr() for name, p in model.module.named_parameters()}


def _shapes(model: Any) -> dict[str, tuple[Any, ...]]:
    """Returns dtype and sizes of each parameter, by all of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (parameter.dtype, *parameter.shape) for name, parameter in named}


def _result(token_ids: Int64[np.ndarray, "B"]) -> StepResult:
    """Returns the result of a step that sampled these tokens."""
    invalid = token_ids == INVALID_TOKEN
    return StepResult(token_ids[:, None], invalid=invalid if invalid.any() else None)


def _label_layers(model: Adopted, spec: CacheSpec) -> None:
    """Tells each attention module of the shell its type and its place in a block."""
    offsets = kv_cache.layer_pages(spec)
    for module, offset, attention_type in zip(
        model.attention_modules, offsets, spec.layer_types, strict=True
    ):
        module.cbfn_attention_type = attention_type  # type: ignore[assignment]
        page = torch.tensor(offset, device=model.device)
        module.register_buffer("cbfn_layer_page", page, persistent=False)
