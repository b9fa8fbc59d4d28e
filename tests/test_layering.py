"""Imports point downwards or sideways, the core needs no torch, and modules stay short."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cbfn

ROOT = Path(cbfn.__file__).parent

STOREYS = {
    1: "types cachespec breakdown config checks prompts tokens requestoutput version",
    2: "pages prefix ordered sequence state offload admitting scheduling committing ending "
    "outputs scheduler invariants policies plan sizing footprint streams",
    3: "kv attention model loading operators dependents linear linear_kernel fusing sample "
    "step inputs progress",
    4: "engine generating aio runner memory devices slots executors graphs compiling trace cli "
    "answering jobs demo turns text __main__",
}
STOREY_OF = {name: storey for storey, names in STOREYS.items() for name in names.split()}
BESIDE = {"testing", "sim", "examples"}  # may import storeys 1 and 2; oracles and examples more
PURE = {"numpy", "jaxtyping", "immutables"}
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")
)


def path_of(module):
    return ROOT.parent / Path(*module.split(".")).with_suffix(".py")


def room_of(module):
    """Returns the part of a name below cbfn: `pages` for `cbfn.pages`, "" for cbfn itself."""
    parts = [part for part in module.split(".")[1:] if part != "__init__"]
    return parts[0] if parts else ""


def imports_of(module):
    """Returns the full names that a module imports, those under TYPE_CHECKING left out."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = node.orelse
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found.update(resolve(node.module, alias.name) for alias in node.names)
        for child in children:
            visit(child)

    visit(ast.parse(path_of(module).read_text()))
    return found


def resolve(package, name):
    """Returns `package.name` where that is a module of ours, else `package`."""
    full = f"{package}.{name}"
    return full if full in MODULES or f"{full}.__init__" in MODULES else package


def ours(module):
    """Returns what a module imports of cbfn, as module names."""
    found = {name for name in imports_of(module) if name == "cbfn" or name.startswith("cbfn.")}
    return {name if name in MODULES else f"{name}.__init__" for name in found}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_storey(module):
    room = room_of(module)
    assert room == "" or room in STOREY_OF or room in BESIDE


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) in STOREY_OF])
def test_imports_point_downwards_or_sideways(module):
    storey = STOREY_OF[room_of(module)]
    for name in ours(module):
        assert STOREY_OF.get(room_of(name), 5) <= storey, f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) in ("testing", "sim")])
def test_tools_import_the_core_alone(module):
    allowed = BESIDE if room_of(module) != "testing" else {"testing"}
    for name in ours(module):
        room = room_of(name)
        assert room in allowed or STOREY_OF.get(room, 5) <= 2, f"{module} imports {name}"


def test_imports_have_no_cycles():
    try:
        TopologicalSorter({module: ours(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", [m for m in MODULES if STOREY_OF.get(room_of(m), 5) <= 2])
def test_core_imports_nothing_but_numpy_and_small_packages(module):
    for name in imports_of(module):
        top = name.partition(".")[0]
        assert top in sys.stdlib_module_names or top in PURE | {"cbfn"}, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_longer_than_400_lines(module):
    if room_of(module) != "testing" and "triton" not in module:
        assert len(path_of(module).read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "names",
    [
        ["cbfn"],
        ["cbfn.scheduler"],
        ["cbfn", "cbfn.scheduler", "cbfn.plan", "cbfn.policies", "cbfn.testing"],
        ["cbfn.testing.oracles"],
        ["cbfn.testing.strategies", "cbfn.testing.machines"],
    ],
)
def test_core_is_imported_without_torch(names):
    program = (
        f"import {', '.join(names)}, sys; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("set()", "")


def test_public_names_are_found_where_they_live():
    assert set(cbfn.__all__) <= set(dir(cbfn))
    for name in ("EngineConfig", "SamplingParams", "Request", "CacheSpec", "Plan"):
        assert getattr(cbfn, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        cbfn.no_such_name  # noqa: B018
