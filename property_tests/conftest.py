"""Hypothesis profiles: `pytest property_tests --hypothesis-profile=ci` (or dev, fuzz).

dev    random, quick: for every day; a failure is kept and tried first the next time.
ci     the same examples every time, the whole folder in under three minutes on two cores.
fuzz   random, many long histories; for an hour of spare time, or under HypoFuzz.

mutants is for `mutation.py`: the same few examples every time, and none is made smaller.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.typecheck import unchecked

_COMMON = {
    "deadline": None,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
    # the explain phase takes as long as shrinking does
    "phases": [phase for phase in Phase if phase is not Phase.explain],
}

settings.register_profile("dev", max_examples=50, stateful_step_count=40, **_COMMON)
settings.register_profile(
    "ci",
    max_examples=120,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    print_blob=True,
    **_COMMON,
)
settings.register_profile("fuzz", max_examples=20_000, stateful_step_count=100, **_COMMON)
settings.register_profile(
    "mutants",
    max_examples=10,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    **{**_COMMON, "phases": [Phase.explicit, Phase.generate]},
)
settings.load_profile(os.environ.get("CBFN_HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True, scope="module")
def without_annotation_checks() -> Iterator[None]:
    """The annotations of arrays are checked in `tests`; here the time is worth more examples.

    CBFN_CHECK_ANNOTATIONS=1 checks them here too, which is six times slower.
    """
    with nullcontext() if os.environ.get("CBFN_CHECK_ANNOTATIONS") else unchecked():
        yield
