"""Two slots on three streams: no timing lets two accesses of one buffer race."""

import pytest

from cbfn.streams import Buffer, TwoSlots
from cbfn.testing import machines
from cbfn.testing.streams import Simulator
from cbfn.types import InvariantViolation
from property_tests.verdict import verdict


class TestStreams(machines.StreamsMachine):
    """The order of `TwoSlots`, under the simulator."""


class TestCpuExecutor(machines.StreamsMachine):
    """The same steps on the executor that defers everything until the host waits."""

    def make_backend(self):
        from cbfn.executors import CpuExecutor  # imports torch, which the others need not wait for

        return CpuExecutor()

    def run_device(self):
        pass


def deaf_to(stream, event):
    """Returns a machine in which one stream does not wait for one event."""

    class Deaf(Simulator):
        def stream(self, name):
            made = super().stream(name)
            if name == stream:
                hear = made.wait
                made.wait = lambda e: None if e.name.startswith(event) else hear(e)
            return made

    class Mine(machines.StreamsMachine):
        def make_backend(self):
            return Deaf(super().make_backend().choose)

    return Mine


@pytest.mark.parametrize(
    ("stream", "event", "race"),
    [
        ("compute", "copied", "inputs"),
        ("copy-out", "computed", "outputs"),
    ],
)
def test_missing_wait_is_found_with_both_sites(stream, event, race):
    found = verdict(deaf_to(stream, event))
    assert found.startswith("race: ")
    assert f"{race}[" in found
    assert found.count("'") == 4


def test_host_that_does_not_wait_is_found():
    class Mine(machines.StreamsMachine):
        def make_backend(self):
            backend = super().make_backend()
            backend.host_wait = lambda event: None
            return backend

    assert verdict(Mine).startswith(("race: ", "results: "))


def test_outputs_that_both_slots_share_are_found():
    class Mine(machines.StreamsMachine):
        def make_slots(self, backend):
            slots = TwoSlots(backend)
            slots.slots[1].outputs = slots.slots[0].outputs
            return slots

    assert verdict(Mine).startswith("race: ")


def test_launch_into_a_slot_in_use_is_found():
    class Careless(TwoSlots):
        @property
        def next_slot(self):
            slot = super().next_slot
            slot.step = None
            return slot

    class Mine(machines.StreamsMachine):
        def make_slots(self, backend):
            return Careless(backend)

    assert verdict(Mine).startswith(("slots: ", "race: "))


def test_wait_for_an_event_that_never_comes_is_a_deadlock():
    simulator = Simulator(lambda count: 0)
    stream, other = simulator.stream("a"), simulator.stream("b")
    first, second = simulator.event("first"), simulator.event("second")
    first.num_recordings = 1  # its stream was lost
    stream.wait(first)
    stream.record(second)
    other.enqueue("busy", lambda: None, writes=(Buffer("x"),))
    with pytest.raises(InvariantViolation, match="deadlock: the host waits for second"):
        simulator.host_wait(second)
