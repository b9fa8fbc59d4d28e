"""Two backends of `cbfn.streams`: the CPU, which defers everything, and CUDA."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from cbfn.streams import Buffer, Event, Operation


class CpuEvent:
    """Counts its recordings: those enqueued, and those done."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.done = 0
        self.stream: CpuStream | None = None

    def advance_to(self, recording: int) -> None:
        """Runs the recording stream until that many recordings are done."""
        while self.done < recording:
            assert self.stream is not None
            self.stream.run_next()


class CpuStream:
    """Operations that wait until somebody needs them."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()

    def enqueue(
        self,
        site: str,
        operation: Operation,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        self._queue.append(operation)

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event.enqueued += 1
        event.stream = self
        number = event.enqueued

        def done() -> None:
            event.done = number

        self._queue.append(done)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        number = event.enqueued
        self._queue.append(lambda: event.advance_to(number))

    def run_next(self) -> None:
        """Runs the first operation; one that is interrupted stays, to be run again."""
        self._queue[0]()
        self._queue.popleft()


class CpuExecutor:
    """A backend without a device: an operation runs when a host wait needs it, and not before.

    So a result that is read too early is not there, as on a device.
    """

    def stream(self, name: str) -> CpuStream:
        return CpuStream()

    def event(self, name: str) -> CpuEvent:
        return CpuEvent()

    def host_wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event.advance_to(event.enqueued)

    def host_access(
        self, site: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Does nothing: the host's accesses need no help."""


class CudaStream:
    """A CUDA stream; operations are enqueued on it by running them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def enqueue(
        self,
        site: str,
        operation: Operation,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)


class CudaBackend:
    """The streams and events of one CUDA device."""

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        self.device = device
        self.timing = timing

    def stream(self, name: str) -> CudaStream:
        return CudaStream(self.device)

    def event(self, name: str) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=self.timing)

    def host_wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def host_access(
        self, site: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Does nothing: `TwoSlots` orders the host by `host_wait`."""
