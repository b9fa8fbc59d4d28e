"""The order of two slots: any timing of the host and of the device's streams."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cbfn.streams import Buffer, Slot, SlotInUse, TwoSlots, Work
from cbfn.testing.machines.base import Machine
from cbfn.testing.streams import Simulator
from cbfn.types import InvariantViolation

_GARBAGE = -1


class _Moves(NamedTuple):
    """Which chunks are moved before a step, touched by it, and moved beside it."""

    before: set[int]
    touched: set[int]
    beside: set[int]


class StreamsMachine(Machine):
    """Steps pass through two slots in order, and every pair of accesses is ordered.

    Steps read and write some of a few chunks. Moves before a step touch any, moves beside it those
    that it does not: every chunk counts who touched it, in the order of the steps.

    The host launches and collects when it likes; in between, the simulator runs whichever
    operation is ready. Each step brings a number of its own and adds the result of the step before;
    what the host collects is compared with what the steps in order give. Override `make_backend`
    or `make_slots` to test others.
    """

    __test__ = False

    def make_backend(self) -> Any:
        """Returns the streams and events under test."""
        return Simulator(lambda count: self.picks.pop() % count if self.picks else 0)

    def make_slots(self, backend: Any) -> TwoSlots:
        """Returns the order of enqueue, record and wait under test."""
        return TwoSlots(backend)

    def run_device(self) -> None:
        """Lets the device get on with its work, if it does so by itself."""
        while self.picks and self.backend.run_one():
            pass

    @initialize()
    def start(self) -> None:
        self.picks: list[int] = []
        self.backend = self.make_backend()
        self.slots = self.make_slots(self.backend)
        self.contents: dict[Any, int] = {}
        self.expected: list[int] = []
        self.launched: list[int] = []
        self.chunks = [Buffer(f"chunk {number}") for number in range(4)]
        self.touches: list[list[str]] = [[] for _ in self.chunks]
        self.wanted: list[list[str]] = [[] for _ in self.chunks]

    @rule(
        number=st.integers(0, 9),
        carries=st.booleans(),
        before=st.sets(st.integers(0, 3), max_size=2),
        touched=st.sets(st.integers(0, 3)),
        beside=st.sets(st.integers(0, 3), max_size=2),
    )
    def launches(
        self, number: int, carries: bool, before: set[int], touched: set[int], beside: set[int]
    ) -> None:
        if len(self.launched) == 2:
            self._is_refused(number)
            return
        moves = _Moves(before, touched, beside - touched)
        slot = self.slots.next_slot
        last = self.slots.slots[1 - slot.index]
        carries = carries and bool(self.expected)
        work = self._work(slot, last, number, carries, moves)
        try:
            self.launched.append(self.slots.launch(work, carries))
        except SlotInUse as error:
            raise InvariantViolation(f"slots: one is free, and yet: {error}") from error
        self.expected.append(number + (self.expected[-1] if carries else 0))

    @rule(picks=st.lists(st.integers(0, 5), min_size=1, max_size=12))
    def device_runs(self, picks: list[int]) -> None:
        self.picks = list(picks)
        self.run_device()

    @precondition(lambda self: self.launched)
    @rule(picks=st.lists(st.integers(0, 5), max_size=12))
    def collects(self, picks: list[int]) -> None:
        self.picks = list(picks)
        step = self.launched.pop(0)
        try:
            got = self.contents.get(self.slots.collect(step).results, _GARBAGE)
        except SlotInUse as error:
            raise InvariantViolation(f"slots: it is its turn, and yet: {error}") from error
        if got != self.expected[step]:
            raise InvariantViolation(
                f"results: step {step} gave {got}, expected {self.expected[step]}"
            )

    @precondition(lambda self: len(self.launched) != 1)
    @rule()
    def collects_out_of_order(self) -> None:
        step = self.launched[1] if self.launched else len(self.expected) - 1
        if step < 0:
            return
        try:
            self.slots.collect(step)
        except SlotInUse:
            return
        raise InvariantViolation(f"order: step {step} was collected twice, or before another")

    def rest(self) -> None:
        """Everything launched can be collected; every chunk was touched in the order of steps."""
        while self.launched:
            self.collects(picks=[])
        for got, wanted in zip(self.touches, self.wanted, strict=True):
            if got != wanted[: len(got)]:  # moves behind the last step may be left
                raise InvariantViolation(f"moves: a chunk was touched by {got}, not by {wanted}")

    def _touch(self, chunks: set[int], who: str) -> Any:
        """Returns the operation that touches chunks, and expects it to come next."""
        for chunk in chunks:
            self.wanted[chunk].append(who)

        def touch() -> None:
            for chunk in chunks:
                self.touches[chunk].append(who)

        return touch

    def _work(self, slot: Slot, before: Slot, number: int, carries: bool, moves: _Moves) -> Work:
        contents, step = self.contents, self.slots.num_launched
        move_before = self._touch(moves.before, f"moves before {step}")
        move_beside = self._touch(moves.beside, f"moves beside {step}")
        touch = self._touch(moves.touched, f"step {step}")

        def fill() -> None:
            contents[slot.staging] = number

        def copy_in() -> None:
            contents[slot.inputs] = contents[slot.staging]

        def compute() -> None:
            carried = contents.get(before.outputs, _GARBAGE) if carries else 0
            contents[slot.outputs] = contents.get(slot.inputs, _GARBAGE) + carried
            touch()

        def copy_out() -> None:
            contents[slot.results] = contents.get(slot.outputs, _GARBAGE)

        return Work(
            fill,
            copy_in,
            compute,
            copy_out,
            moves_before=move_before if moves.before else None,
            moves_beside=move_beside if moves.beside else None,
            before=[self.chunks[chunk] for chunk in moves.before],
            beside=[self.chunks[chunk] for chunk in moves.beside],
            touched=[self.chunks[chunk] for chunk in moves.touched],
        )

    def _is_refused(self, number: int) -> None:
        slot = self.slots.next_slot
        try:
            work = self._work(slot, slot, number, False, _Moves(set(), set(), set()))
            self.slots.launch(work, False)
        except SlotInUse:
            return
        raise InvariantViolation(
            f"slots: a third step was launched into slot {slot.index}, which is in use"
        )
