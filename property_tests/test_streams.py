"""Two slots on three streams: no timing lets two accesses of one buffer race."""

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cbfn.streams import Buffer, SlotInUse, TwoSlots, Work
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


class Interrupt(BaseException):
    """As KeyboardInterrupt."""


def interrupted(call, at):
    """Returns a call that an exception ends, before or after it has done its work."""

    def cut(*args, **kwargs):
        moment = at()
        if moment == 0:
            raise Interrupt
        result = call(*args, **kwargs)
        if moment == 1:
            raise Interrupt
        return result

    return cut


class Interrupted(Simulator):
    """A simulator whose streams are interrupted wherever the picks say so."""

    def stream(self, name):
        made = super().stream(name)
        for what in ("enqueue", "record", "wait"):
            setattr(made, what, interrupted(getattr(made, what), lambda: self.choose(6)))
        return made


class Repeated(TwoSlots):
    """Two slots whose owner goes on with a launch until it is through."""

    def launch(self, work, carries=True):
        step = self.num_launched
        try:
            return super().launch(work, carries)
        except Interrupt:
            assert self.num_launched == step + 1
        while True:
            try:
                self.go_on()
            except Interrupt:
                continue
            return step


class TestInterruptedLaunch(machines.StreamsMachine):
    """Launches that are cut short anywhere, again and again, and then go on."""

    def make_backend(self):
        return Interrupted(lambda count: self.picks.pop() % count if self.picks else count - 1)

    def make_slots(self, backend):
        return Repeated(backend)

    cuts = ()

    def _touch(self, chunks, who):
        count = super()._touch(chunks, who)

        def touch():  # the second time of two in a row changes nothing
            if any(self.touches[chunk][-1:] != [who] for chunk in chunks):
                count()

        return touch

    def _work(self, *args):
        self.picks = list(self.cuts)
        return super()._work(*args)

    @rule(cuts=st.lists(st.integers(0, 5), max_size=20))
    def will_be_cut(self, cuts):
        self.cuts = cuts


class Noted:
    """A backend that writes down what it is told."""

    def __init__(self):
        self.notes = []

    def stream(self, name):
        made = SimpleNamespace()
        made.record = lambda event: self.notes.append(f"{name} records {event}")
        made.wait = lambda event: self.notes.append(f"{name} waits for {event}")
        made.enqueue = lambda site, operation, reads=(), writes=(): self.note(
            f"{operation()} of {site}", reads, writes
        )
        return made

    def event(self, name):
        return name

    def host_wait(self, event):
        self.notes.append(f"host waits for {event}")

    def host_access(self, site, reads=(), writes=()):
        self.note(site, reads, writes)

    def note(self, what, reads, writes):
        accesses = ",".join(b.name for b in reads), ",".join(b.name for b in writes)
        self.notes.append(f"{what}: {'>'.join(accesses)}")


def test_step_uses_the_buffers_of_its_slot_and_the_outputs_of_the_other():
    noted = Noted()
    slots, work = TwoSlots(noted), Work(*(lambda name=name: name for name in "FICO"))
    for step in range(4):
        assert slots.launch(work, carries=step != 2) == step
        mine, other = step % 2, 1 - step % 2
        carried = "" if step == 2 else f",outputs[{other}]"
        assert noted.notes == [
            f"fill {step}: >staging[{mine}]",
            f"copy-in waits for computed[{mine}]",
            f"I of copy-in {step}: staging[{mine}]>inputs[{mine}]",
            f"copy-in records copied[{mine}]",
            f"compute waits for copied[{mine}]",
            f"compute waits for moved[{other}]",
            f"C of compute {step}: inputs[{mine}]{carried},kv>outputs[{mine}],kv",
            f"compute records computed[{mine}]",
            f"copy-out waits for computed[{mine}]",
            f"O of copy-out {step}: outputs[{mine}]>results[{mine}]",
            f"copy-out records returned[{mine}]",
        ]
        noted.notes.clear()
        if step:
            with pytest.raises(SlotInUse, match=f"launch: step {step - 1} has slot {other};"):
                slots.launch(work)
            with pytest.raises(SlotInUse, match=f"expected {step - 1}, got {step}$"):
                slots.collect(step)
            assert noted.notes == []
            assert slots.collect(step - 1) is slots.slots[other]
            assert noted.notes == [
                f"host waits for returned[{other}]",
                f"collect {step - 1}: results[{other}]>",
            ]
            noted.notes.clear()


def test_moves_lie_between_the_step_before_and_the_next():
    noted = Noted()
    slots = TwoSlots(noted)
    fill, copy_in, compute, copy_out, early, late = (lambda name=name: name for name in "FICOEL")
    work = Work(fill, copy_in, compute, copy_out, moves_before=early, moves_beside=late)
    slots.launch(work)
    moves = [note for note in noted.notes if "move" in note or "ready" in note]
    assert moves == [
        "compute waits for moved[1]",
        "moves waits for computed[1]",
        "E of moves before 0: >",
        "moves records ready[0]",
        "compute waits for ready[0]",
        "L of moves beside 0: >",
        "moves records moved[0]",
    ]
    assert noted.notes.index("compute waits for ready[0]") < next(
        at for at, note in enumerate(noted.notes) if note.startswith("C of compute")
    )


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
