"""What Hypothesis calls when it is imported: how `from_type` and `builds` make our types."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cbfn.config import EngineConfig, SamplingParams
from cbfn.testing.workloads import Workload
from cbfn.types import CacheSpec, Plan, Request


def register() -> None:
    """Registers a strategy for each of our types."""
    st.register_type_strategy(SamplingParams, lambda _: _ours().sampling_params(served=False))
    st.register_type_strategy(Request, lambda _: _ours().requests())
    st.register_type_strategy(CacheSpec, lambda _: _ours().cache_specs())
    st.register_type_strategy(EngineConfig, lambda _: _ours().engine_configs())
    st.register_type_strategy(Workload, lambda _: _ours().workloads())
    st.register_type_strategy(Plan, lambda _: _ours().plans(max_steps=4).map(_last))


def _ours() -> Any:
    # late: whoever imports our strategies first has Hypothesis, and so this, imported by them
    from cbfn.testing import strategies

    return strategies


def _last(plans: Any) -> Plan:
    plan: Plan = plans[-1]
    return plan
