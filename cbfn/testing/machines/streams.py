"""The order of two slots: any timing of the host and of the device's streams."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cbfn.streams import Slot, SlotInUse, TwoSlots, Work
from cbfn.testing.machines.base import Machine
from cbfn.testing.streams import Simulator
from cbfn.types import InvariantViolation

_GARBAGE = -1


class StreamsMachine(Machine):
    """Steps pass through two slots in order, and every pair of accesses is ordered.

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

    @rule(number=st.integers(0, 9), carries=st.booleans())
    def launches(self, number: int, carries: bool) -> None:
        if len(self.launched) == 2:
            self._is_refused(number)
            return
        slot = self.slots.next_slot
        before = self.slots.slots[1 - slot.index]
        carries = carries and bool(self.expected)
        work = self._work(slot, before, number, carries)
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
        """Everything launched can be collected."""
        while self.launched:
            self.collects(picks=[])

    def _work(self, slot: Slot, before: Slot, number: int, carries: bool) -> Work:
        contents = self.contents

        def fill() -> None:
            contents[slot.staging] = number

        def copy_in() -> None:
            contents[slot.inputs] = contents[slot.staging]

        def compute() -> None:
            carried = contents.get(before.outputs, _GARBAGE) if carries else 0
            contents[slot.outputs] = contents.get(slot.inputs, _GARBAGE) + carried

        def copy_out() -> None:
            contents[slot.results] = contents.get(slot.outputs, _GARBAGE)

        return Work(fill, copy_in, compute, copy_out)

    def _is_refused(self, number: int) -> None:
        slot = self.slots.next_slot
        try:
            self.slots.launch(self._work(slot, slot, number, False), False)
        except SlotInUse:
            return
        raise InvariantViolation(
            f"slots: a third step was launched into slot {slot.index}, which is in use"
        )
