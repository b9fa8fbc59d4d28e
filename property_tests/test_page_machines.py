"""The pool of chunks under any sequence of operations."""

from cbfn.testing import machines


class TestPagePool(machines.PagePoolMachine):
    """Any sequence of operations keeps the partition into free, cached and owned."""


class TestPrefixCache(machines.PrefixCacheMachine):
    """Hits are exact, and eviction is least recently used first."""
