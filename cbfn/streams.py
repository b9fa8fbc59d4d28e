"""Streams, events and buffers as protocols, and the order in which two slots use them.

A slot is one of two sets of input and output buffers. Step N uses slot N mod 2, so that the host
fills one slot while the device works on the other. Per step, on four streams:

    host     fills the slot's staging buffer
    copy-in  waits for the slot's last compute; staging -> inputs; records `copied`
    compute  waits for `copied`; the step; records `computed`
    moves    waits for the compute before; copies that go before the step, and beside it; records
             `ready` between the two and `moved` behind them. Compute waits for `ready`, and for
             the `moved` of the step before
    copy-out waits for `computed`; outputs -> results; records `returned`
    host     waits for `returned` of the step before, and reads its results

CUDA, the CPU executor and the simulator of `cbfn.testing` are backends of the same protocols: the
order below is the one that runs and the one that is proven.

An exception may arrive at any line: Ctrl-C, a signal handler, no memory. So a launch is a list of
parts; each is taken off the list once it is done, and what is left runs before anything else. A
part may therefore run twice, but never after a later one has begun. Twice in a row is harmless:
every operation writes the same values again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

Operation = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory that operations read and write, known by its identity."""

    name: str


class Event(Protocol):
    """A point in a stream; each recording replaces the one before."""


class Stream(Protocol):
    """Operations that run in the order in which they were enqueued."""

    def enqueue(
        self,
        site: str,
        operation: Operation,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Adds an operation; `site` names it in reports, `reads` and `writes` are its accesses."""

    def record(self, event: Event) -> None:
        """Adds a recording of `event`, done when all operations before it are."""

    def wait(self, event: Event) -> None:
        """Lets what is enqueued later run after the last recording of `event`, if there is one."""


class Backend(Protocol):
    """Makes streams and events, and knows what the host itself does."""

    def stream(self, name: str) -> Stream:
        """Returns a new stream."""

    def event(self, name: str) -> Event:
        """Returns a new event, not recorded yet."""

    def host_wait(self, event: Event) -> None:
        """Blocks the host until the last recording of `event` is done."""

    def host_access(
        self, site: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Notes that the host reads or writes buffers now."""


class SlotInUse(RuntimeError):
    """A launch into a slot whose last step was not collected, or a collect out of order."""


@dataclass(slots=True, eq=False)
class Slot:
    """One of the two sets of buffers, and the events of its last step."""

    index: int
    staging: Buffer
    inputs: Buffer
    outputs: Buffer
    results: Buffer
    copied: Event
    computed: Event
    returned: Event
    ready: Event
    moved: Event
    step: int | None = None  # launched and not collected


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one step on the buffers of its slot, and moves of other memory.

    Arguments:
        moves_before: runs before the step computes, and behind the step before.
        moves_beside: runs behind that, and before the next step computes.
        before, beside, touched: what they and the step read and write beyond the slot and `state`.
    """

    fill: Operation
    copy_in: Operation
    compute: Operation
    copy_out: Operation
    moves_before: Operation | None = None
    moves_beside: Operation | None = None
    before: Sequence[Buffer] = ()
    beside: Sequence[Buffer] = ()
    touched: Sequence[Buffer] = ()


@dataclass(slots=True, eq=False)
class TwoSlots:
    """The order of enqueue, record and wait for steps that alternate two slots.

    Arguments:
        backend: what the streams are.
        state: buffers that every step reads and writes, in order: the KV cache.
    """

    backend: Backend
    state: Sequence[Buffer] = field(default_factory=lambda: (Buffer("kv"),))
    copy_in: Stream = field(init=False)
    compute: Stream = field(init=False)
    copy_out: Stream = field(init=False)
    moves: Stream = field(init=False)
    slots: tuple[Slot, Slot] = field(init=False)
    num_launched: int = 0
    num_collected: int = 0
    _todo: deque[Operation] = field(init=False, default_factory=deque)  # of the newest launch

    def __post_init__(self) -> None:
        backend = self.backend
        self.copy_in, self.compute, self.copy_out, self.moves = map(
            backend.stream, ("copy-in", "compute", "copy-out", "moves")
        )
        self.slots = (self._slot(0), self._slot(1))

    def _slot(self, index: int) -> Slot:
        names = ("staging", "inputs", "outputs", "results")
        staging, inputs, outputs, results = (Buffer(f"{name}[{index}]") for name in names)
        events = ("copied", "computed", "returned", "ready", "moved")
        copied, computed, returned, ready, moved = (
            self.backend.event(f"{name}[{index}]") for name in events
        )
        return Slot(
            index, staging, inputs, outputs, results, copied, computed, returned, ready, moved
        )

    @property
    def next_slot(self) -> Slot:
        """The slot that the next launch uses."""
        return self.slots[self.num_launched % 2]

    def launch(self, work: Work, carries: bool = True) -> int:
        """Enqueues one step and returns its number.

        `carries` says that the step reads the outputs of the step before. After an exception,
        `num_launched` says whether the step has begun; if so, `go_on` enqueues the rest. Raises
        SlotInUse where the slot's last step was not collected; nothing is enqueued then.
        """
        self.go_on()
        step, slot = self.num_launched, self.next_slot
        if slot.step is not None:
            raise SlotInUse(f"launch: step {slot.step} has slot {slot.index}; collect it first")
        self.backend.host_access(f"fill {step}", writes=(slot.staging,))
        work.fill()
        parts = deque(self._parts(work, step, slot, carries))
        # one statement: an exception comes before the step has begun, or after
        slot.step, self.num_launched, self._todo = step, step + 1, parts
        self.go_on()
        return step

    def go_on(self) -> None:
        """Enqueues what is left of a launch that an exception cut short, if anything is."""
        todo = self._todo
        while todo:
            todo[0]()
            todo.popleft()

    def _parts(self, work: Work, step: int, slot: Slot, carries: bool) -> Iterator[Operation]:
        """Yields what a launch does once its slot is filled, in order."""
        before = self.slots[(step + 1) % 2]

        def add(stream: Stream, site: str, operation: Operation, *accesses: Any) -> Operation:
            return partial(stream.enqueue, f"{site} {step}", operation, *accesses)

        yield partial(self.copy_in.wait, slot.computed)
        yield add(self.copy_in, "copy-in", work.copy_in, (slot.staging,), (slot.inputs,))
        yield partial(self.copy_in.record, slot.copied)
        yield partial(self.compute.wait, slot.copied)
        yield partial(self.compute.wait, before.moved)
        if work.moves_before is not None or work.moves_beside is not None:
            yield partial(self.moves.wait, before.computed)
        if work.moves_before is not None:
            moved = work.before
            yield add(self.moves, "moves before", work.moves_before, moved, moved)
            yield partial(self.moves.record, slot.ready)
            yield partial(self.compute.wait, slot.ready)
        if work.moves_beside is not None:
            moved = work.beside
            yield add(self.moves, "moves beside", work.moves_beside, moved, moved)
            yield partial(self.moves.record, slot.moved)
        carried = (before.outputs,) if carries else ()
        reads = (slot.inputs, *carried, *self.state, *work.touched)
        writes = (slot.outputs, *self.state, *work.touched)
        yield add(self.compute, "compute", work.compute, reads, writes)
        yield partial(self.compute.record, slot.computed)
        yield partial(self.copy_out.wait, slot.computed)
        yield add(self.copy_out, "copy-out", work.copy_out, (slot.outputs,), (slot.results,))
        yield partial(self.copy_out.record, slot.returned)

    def collect(self, step: int) -> Slot:
        """Waits for a step's results and returns its slot, whose results the host may now read.

        They may be read until the slot's next launch. Raises SlotInUse out of order.
        """
        slot = self.slots[step % 2]
        if step != self.num_collected or slot.step != step:
            raise SlotInUse(
                f"collect: steps are collected once, in order; expected {self.num_collected}, "
                f"got {step}"
            )
        self.go_on()
        self.backend.host_wait(slot.returned)
        self.backend.host_access(f"collect {step}", reads=(slot.results,))
        # one statement: an exception comes before the step is collected, or after
        slot.step, self.num_collected = None, step + 1
        return slot
