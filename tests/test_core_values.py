"""The values of the core: frozen, small, compared as they are meant to be, and annotated."""

import inspect
from dataclasses import is_dataclass
from importlib import import_module
from typing import get_type_hints

import pytest

from cbfn.state import BatchState
from tests.test_layering import STOREYS

MODULES = [import_module(f"cbfn.{name}") for name in STOREYS[2].split()]
DATACLASSES = {
    value.__name__: value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and is_dataclass(value) and value.__module__ == module.__name__
}
CHANGING = {"Admission", "_Draft", "Slot", "TwoSlots"}
COMPARED = {  # no arrays
    "Admission",
    "_Draft",
    "Bucket",
    "Layout",
    "OrderedInts",
    "StepShape",
    "Work",
}


@pytest.mark.parametrize("name", DATACLASSES)
def test_values_have_slots_and_are_frozen_and_those_of_arrays_are_known_by_identity(name):
    kind = DATACLASSES[name]
    assert "__slots__" in vars(kind)
    assert kind.__dataclass_params__.frozen == (name not in CHANGING)
    assert (kind.__eq__ is object.__eq__) == (name not in COMPARED)


def functions_of(module):
    """Yields the functions and classes that a module defines, methods and properties included."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield value
            for member in vars(value).values():
                member = getattr(member, "fget", getattr(member, "func", member))
                if inspect.isfunction(member):
                    yield member
        elif inspect.isfunction(value):
            yield value


@pytest.mark.parametrize("module", MODULES, ids=STOREYS[2].split())
def test_annotations_can_be_evaluated(module):
    # one name is imported for type checkers alone, and Python 3.11 has no array[int]
    names = {"BatchState": BatchState, "array": list}
    for function in functions_of(module):
        assert isinstance(get_type_hints(function, localns=names), dict)
