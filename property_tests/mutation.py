"""Mutation testing of the pure core: `python -m property_tests.mutation --mutants 450`.

Changes the core in one place at a time with cosmic-ray, in copies of the tree, and sees whether the
fast tests notice. The mutants are a seeded sample, in proportion to the modules' sizes. A run that
was stopped goes on where it was; `--again` runs the survivors once more, for tests that are new.
"""

import argparse
import ast
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import gettempdir

from cosmic_ray.commands import init
from cosmic_ray.config import serialize_config
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

from tests.test_layering import STOREYS

ROOT = Path(__file__).parent.parent
MODULES = STOREYS[2].split()
# from what fails soonest to what looks longest; without the tests' conftest, which imports torch
TESTS = """
    tests/test_core_values.py tests/test_pages.py tests/test_prefix.py tests/test_plan.py
    tests/test_scheduler.py property_tests/test_sizing.py property_tests/test_structures.py
    property_tests/test_streams.py::TestStreams property_tests/test_page_machines.py
    property_tests/test_pack.py property_tests/test_scheduler_machines.py
    property_tests/test_workloads.py tests/test_cases_core.py
"""
LONG = ["ten_thousand", "case_18_sliding"]
COMMAND = [
    *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-o", "addopts="),
    *("--noconftest", "-p", "property_tests.conftest", "-p", "no:cacheprovider"),
    # one test takes three seconds at most: a mutant that loops for ever is stopped soon
    *("-o", "faulthandler_timeout=15", "-o", "faulthandler_exit_on_timeout=true"),
    *("--hypothesis-profile=mutants", "-k", "not " + " and not ".join(LONG), *TESTS.split()),
]


def meaning(code: str) -> str:
    """Returns what a module does: its syntax tree without annotations, which nothing evaluates."""
    compile(code, "mutant", "exec", dont_inherit=True)
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, None)
    return ast.dump(tree)


def changes_code(item: WorkItem, code: str) -> bool:
    """Returns whether a mutant compiles, and differs in more than an annotation."""
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        return meaning(mutate_code(code, operator, mutation.occurrence)) != meaning(code)
    except SyntaxError:
        return False


def draw(folder: Path, count: int, seed: int) -> None:
    """Writes a session with at least `count` mutants: of each module its share, and ten or more."""
    with use_db(folder / "all.sqlite") as every, use_db(folder / "sample.sqlite") as sample:
        init([Path("cbfn", f"{name}.py") for name in MODULES], every, {})
        items = every.work_items
        chance, passed_over = random.Random(seed), 0
        for name in MODULES:
            path = Path("cbfn", f"{name}.py")
            mine = [item for item in items if item.mutations[0].module_path == path]
            mine.sort(key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence))
            chance.shuffle(mine)
            share, chosen = max(-(-count * len(mine) // len(items)), 10), []
            for item in mine:
                if len(chosen) == share:
                    break
                if changes_code(item, path.read_text()):
                    chosen.append(item)
                else:
                    passed_over += 1
            sample.add_work_items(chosen)
        (folder / "drawn.json").write_text(
            json.dumps({"seed": seed, "population": len(items), "passed_over": passed_over})
        )


def report(folder: Path, target: Path) -> Counter:
    """Writes what is known so far as JSON, and returns the counts."""
    modules: dict[str, Counter] = {name: Counter() for name in MODULES}
    survivors = []
    with use_db(folder / "sample.sqlite", WorkDB.Mode.open) as sample:
        sampled = sample.num_work_items
        for item, result in sample.completed_work_items:
            (mutation,) = item.mutations
            outcome = result.test_outcome.value if result.test_outcome else "incompetent"
            if outcome == "killed" and not re.search("failed|error", result.output):
                outcome = "timeout"
            modules[mutation.module_path.stem][outcome] += 1
            if outcome == "survived":
                lines = [line for line in result.diff.splitlines() if line[:1] in "+-"]
                place = f"{mutation.module_path.name}:{mutation.start_pos[0]}"
                survivors.append({"at": place, "diff": lines[3:]})
    total = sum(modules.values(), Counter())
    killed = total["killed"] + total["timeout"]
    drawn = json.loads((folder / "drawn.json").read_text())
    tested = {"sampled": sampled, "tested": total.total(), "killed_share": killed / total.total()}
    values = {**drawn, **tested, **total, "modules": modules, "survivors": survivors}
    survivors.sort(key=lambda survivor: survivor["at"])
    rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    rows[-1] = '"survivors": [\n' + ",\n".join(map(json.dumps, survivors)) + "\n]"
    target.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return total


def gather(folder: Path) -> None:
    """Enters the results of all workers."""
    with use_db(folder / "sample.sqlite", WorkDB.Mode.open) as sample:
        for path in folder.glob("tree*/session.sqlite"):
            with use_db(path, WorkDB.Mode.open) as session:
                for job_id, result in session.results:
                    sample.set_result(job_id, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=450)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a mutant")
    parser.add_argument("--again", action="store_true", help="run the survivors once more")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir(), "cbfn-mutants"))
    parser.add_argument("--output", type=Path, default=ROOT / "property_tests" / "mutation.json")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "drawn.json").exists():
        draw(folder, options.mutants, options.seed)
    gather(folder)
    print(f"seed {json.loads((folder / 'drawn.json').read_text())['seed']}, {folder}")
    with use_db(folder / "sample.sqlite", WorkDB.Mode.open) as sample:
        todo = list(sample.pending_work_items)
        if options.again:
            done = sample.completed_work_items
            todo += [i for i, result in done if result.test_outcome is TestOutcome.SURVIVED]
    config = {"timeout": options.timeout, "test-command": " ".join(map(repr, COMMAND))}
    config |= {"module-path": "cbfn", "distributor": {"name": "local"}}
    workers = []
    for old in folder.glob("tree*"):
        shutil.rmtree(old)
    for number in range(options.workers):
        tree = folder / f"tree{number}"
        for name in ("cbfn", "tests", "property_tests"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy2(ROOT / "pyproject.toml", tree)
        (tree / "config.toml").write_text(serialize_config(config))
        with use_db(tree / "session.sqlite") as session:
            session.add_work_items(todo[number :: options.workers])
        begin = time.perf_counter()
        subprocess.run(COMMAND, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        print(f"unchanged, the tests take {time.perf_counter() - begin:.1f} s")
        command = [sys.executable, "-m", "cosmic_ray.cli", "exec", "config.toml", "session.sqlite"]
        workers.append(subprocess.Popen(command, cwd=tree))
    running = True
    while running:
        time.sleep(10)
        running = any(worker.poll() is None for worker in workers)
        gather(folder)
        print(dict(report(folder, options.output)), end="\r", flush=True)
    print()


if __name__ == "__main__":
    main()
