"""A simulator of streams and events that runs operations in any legal order and finds races.

It is a backend of `cbfn.streams`, like CUDA. Every actor (the host, each stream) has a vector
clock. Enqueueing orders the host before an operation, a stream orders its own operations, an event
orders what was before its recording before what comes after a wait for it; nothing else orders
anything. Two accesses of one buffer, one of them a write, that are not ordered are a race, whether
or not they met in this run. (L. Lamport, "Time, clocks, and the ordering of events", CACM 1978;
C. Flanagan and S. Freund, "FastTrack", PLDI 2009, for keeping the last accesses only.)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cbfn.streams import Buffer, Event, Operation
from cbfn.types import InvariantViolation

HOST = "host"
Clock = Counter[str]


@dataclass(slots=True, eq=False)
class SimEvent:
    """An event; `clocks` has the clock of each of its recordings that is done."""

    name: str
    num_recordings: int = 0  # enqueued
    clocks: dict[int, Clock] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Queued:
    """One entry of a stream: an operation, a recording or a wait."""

    site: str
    clock: Clock  # of the host, when it enqueued this
    operation: Operation | None = None
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    records: tuple[SimEvent, int] | None = None
    waits_for: tuple[SimEvent, int] | None = None

    @property
    def ready(self) -> bool:
        """Whether it may run once it is the first of its stream."""
        return self.waits_for is None or self.waits_for[1] in self.waits_for[0].clocks


@dataclass(eq=False)
class SimStream:
    """A stream whose operations run when the simulator picks it."""

    name: str
    simulator: Simulator
    queue: deque[_Queued] = field(default_factory=deque)

    def enqueue(
        self,
        site: str,
        operation: Operation,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Adds an operation."""
        clock = self.simulator.tick_host()
        self.queue.append(_Queued(site, clock, operation, tuple(reads), tuple(writes)))

    def record(self, event: Event) -> None:
        """Adds a recording."""
        assert isinstance(event, SimEvent)
        event.num_recordings += 1
        what = (event, event.num_recordings)
        clock = self.simulator.tick_host()
        self.queue.append(_Queued(f"record {event.name}", clock, records=what))

    def wait(self, event: Event) -> None:
        """Adds a wait for the recording that is the last one now; none where there is none."""
        assert isinstance(event, SimEvent)
        if event.num_recordings:
            what = (event, event.num_recordings)
            clock = self.simulator.tick_host()
            self.queue.append(_Queued(f"wait for {event.name}", clock, waits_for=what))


@dataclass(slots=True)
class _Accesses:
    """The last write of a buffer, and each actor's last read since: (actor, time, site)."""

    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[str, int, str]] = field(default_factory=dict)


class Simulator:
    """A backend of `cbfn.streams` that runs ready operations in the order that `choose` picks.

    Arguments:
        choose: given n > 0, returns which of n ready streams goes on, an integer in [0, n).

    Raises InvariantViolation, with both sites named, where two accesses race; and where the host
    waits for what can never come.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.streams: list[SimStream] = []
        self._clocks: dict[str, Clock] = {HOST: Clock()}
        self._accesses: dict[Buffer, _Accesses] = {}

    def stream(self, name: str) -> SimStream:
        """Returns a new stream."""
        stream = SimStream(name, self)
        self._clocks[name] = Clock()
        self.streams.append(stream)
        return stream

    def event(self, name: str) -> SimEvent:
        """Returns a new event."""
        return SimEvent(name)

    def host_wait(self, event: Event) -> None:
        """Runs operations until the last recording of `event` is done."""
        assert isinstance(event, SimEvent)
        number = event.num_recordings
        while number and number not in event.clocks:
            if not self.run_one():
                raise InvariantViolation(f"deadlock: the host waits for {event.name} for ever")
        if number:
            self._clocks[HOST] |= event.clocks[number]

    def host_access(
        self, site: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Checks accesses of the host's own."""
        self.tick_host()
        self._check(HOST, site, reads, writes)

    def run_one(self) -> bool:
        """Runs the next entry of one ready stream; returns False where no stream is ready."""
        ready = [s for s in self.streams if s.queue and s.queue[0].ready]
        if not ready:
            return False
        stream = ready[self.choose(len(ready))]
        entry = stream.queue.popleft()
        clock = self._clocks[stream.name] = self._clocks[stream.name] | entry.clock
        clock[stream.name] += 1
        if entry.waits_for is not None:
            event, number = entry.waits_for
            self._clocks[stream.name] = clock | event.clocks[number]
        if entry.records is not None:
            event, number = entry.records
            event.clocks[number] = clock.copy()
        if entry.operation is not None:
            self._check(stream.name, entry.site, entry.reads, entry.writes)
            entry.operation()
        return True

    def tick_host(self) -> Clock:
        """Advances the host's clock and returns a copy of it."""
        self._clocks[HOST][HOST] += 1
        return self._clocks[HOST].copy()

    def _check(
        self, actor: str, site: str, reads: Sequence[Buffer], writes: Sequence[Buffer]
    ) -> None:
        clock = self._clocks[actor]
        now = (actor, clock[actor], site)
        for buffer in reads:
            accesses = self._accesses.setdefault(buffer, _Accesses())
            if accesses.write is not None:
                _ordered(clock, accesses.write, "writes", site, "reads", buffer)
            accesses.reads[actor] = now
        for buffer in writes:
            accesses = self._accesses.setdefault(buffer, _Accesses())
            if accesses.write is not None:
                _ordered(clock, accesses.write, "writes", site, "writes", buffer)
            for read in accesses.reads.values():
                _ordered(clock, read, "reads", site, "writes", buffer)
            self._accesses[buffer] = _Accesses(write=now)


def _ordered(
    clock: Clock, before: tuple[str, int, str], verb: str, site: str, own: str, buffer: Buffer
) -> None:
    actor, time, other = before
    if clock[actor] < time:
        raise InvariantViolation(
            f"race: {site!r} {own} {buffer.name}, which {other!r} {verb}; nothing orders the two"
        )
