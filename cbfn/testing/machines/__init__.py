"""State machines that find the shortest history in which a scheduler breaks a rule.

Subclass one and run pytest; what is to be tested is overridden, for instance

    class TestMine(machines.SchedulerMachine):
        def make_policy(self, config):
            return my_policy
"""

try:
    import hypothesis as _  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        'cbfn.testing needs Hypothesis: pip install "cbfn[testing]"'
    ) from missing

from cbfn.testing.machines.base import Machine
from cbfn.testing.machines.carry import CarryOverMachine
from cbfn.testing.machines.loops import LoopMachine, PipelineMachine, SchedulerMachine
from cbfn.testing.machines.pages import PagePoolMachine
from cbfn.testing.machines.prefix import PrefixCacheMachine
from cbfn.testing.machines.streams import StreamsMachine

__all__ = [
    "CarryOverMachine",
    "LoopMachine",
    "Machine",
    "PagePoolMachine",
    "PipelineMachine",
    "PrefixCacheMachine",
    "SchedulerMachine",
    "StreamsMachine",
]
