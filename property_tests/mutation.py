"""Mutation testing of the pure core: `python -m property_tests.mutation --mutants 450`.

Changes the core in one place at a time with cosmic-ray, in copies of the tree, and sees whether the
fast tests notice. The mutants are a seeded sample, in proportion to the modules' sizes. A run that
was stopped goes on where it was; `--again` runs the survivors once more, for tests that are new.
"""

import argparse
import ast
import json
import random
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
    property_tests/test_streams.py::test_step_uses_the_buffers_of_its_slot_and_the_outputs_of_the_other
    property_tests/test_streams.py::TestStreams property_tests/test_page_machines.py
    property_tests/test_pack.py property_tests/test_scheduler_machines.py
    property_tests/test_workloads.py tests/test_cases_core.py
"""
LONG = ["ten_thousand", "case_18_sliding", "policies_give"]  # and nothing dies by them alone
COMMAND = [
    *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-o", "addopts="),
    *("--noconftest", "-p", "property_tests.conftest", "-p", "no:cacheprovider"),
    # one test takes three seconds at most: a mutant that loops for ever is stopped soon
    *("-o", "faulthandler_timeout=20", "-o", "faulthandler_exit_on_timeout=true"),
    *("--hypothesis-profile=mutants", "-k", f"not ({' or '.join(LONG)})", *TESTS.split()),
]


def meaning(code: str) -> str:
    """Returns what a module does: its syntax tree without annotations, which nothing evaluates."""
    compile(code, "mutant", "exec", dont_inherit=True)
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & set(node._fields):
            setattr(node, name, None)
    return ast.dump(tree)


def changes_code(item: WorkItem) -> bool:
    """Returns whether a mutant compiles, and differs in more than an annotation."""
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    code = mutation.module_path.read_text()
    try:
        return meaning(mutate_code(code, operator, mutation.occurrence)) != meaning(code)
    except SyntaxError:
        return False


def draw(folder: Path, count: int, seed: int) -> None:
    """Writes a session with at least `count` mutants: of each module its share, and ten or more."""
    paths, passed_over = [Path("cbfn", f"{name}.py") for name in MODULES], 0
    chance = random.Random(seed)
    with use_db(folder / "all.sqlite") as every, use_db(folder / "sample.sqlite") as sample:
        init(paths, every, {})
        items = every.work_items
        for path in paths:
            mine = [item for item in items if item.mutations[0].module_path == path]
            mine.sort(key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence))
            chance.shuffle(mine)
            share, chosen = max(-(-count * len(mine) // len(items)), 10), []
            while mine and len(chosen) < share:
                item = mine.pop(0)
                chosen += [item] if changes_code(item) else []
                passed_over += chosen[-1:] != [item]
            sample.add_work_items(chosen)
    drawn = {"seed": seed, "population": len(items), "passed_over": passed_over}
    (folder / "drawn.json").write_text(json.dumps(drawn))


def report(folder: Path, target: Path) -> Counter:
    """Enters the results of all workers, writes what is known so far, and returns the counts."""
    modules: dict[str, Counter] = {name: Counter() for name in MODULES}
    survivors = []
    with use_db(folder / "sample.sqlite", WorkDB.Mode.open) as sample:
        for path in folder.glob("tree*/session.sqlite"):
            with use_db(path, WorkDB.Mode.open) as session:
                for job_id, result in session.results:
                    sample.set_result(job_id, result)
        sampled = sample.num_work_items
        for item, result in sample.completed_work_items:
            (mutation,) = item.mutations
            outcome = result.test_outcome.value if result.test_outcome else "incompetent"
            # one test too long: the output ends without a summary
            slow = result.output.strip() and not {"FAILED", "ERROR"} & {*result.output.split()}
            outcome = "timeout" if outcome == "killed" and slow else outcome
            modules[mutation.module_path.stem][outcome] += 1
            if outcome == "survived":
                place = f"{mutation.module_path.name}:{mutation.start_pos[0]}"
                lines = result.diff.splitlines()[3:]
                survivors.append([place, *(line for line in lines if line[0] in "+-")])
    total = sum(modules.values(), Counter())
    share = (total["killed"] + total["timeout"]) / max(total.total(), 1)
    tested = {"sampled": sampled, "tested": total.total(), "killed_share": round(share, 4)}
    values = {**json.loads((folder / "drawn.json").read_text()), **tested, **total}
    rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    for name, lines in (
        ("modules", [f'"{name}": {json.dumps(counts)}' for name, counts in modules.items()]),
        ("survivors", [json.dumps(survivor) for survivor in sorted(survivors)]),
    ):
        both = "{}" if name == "modules" else "[]"
        rows.append(f'"{name}": {both[0]}\n  ' + ",\n  ".join(lines) + f"\n{both[1]}")
    target.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return total


def start(tree: Path, items: list[WorkItem]) -> subprocess.Popen:
    """Copies the tree, checks that the tests pass there, and runs cosmic-ray on `items`."""
    for name in ("cbfn", "tests", "property_tests"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy2(ROOT / "pyproject.toml", tree)
    config = {"timeout": 90.0, "test-command": " ".join(map(repr, COMMAND))}
    config |= {"module-path": "cbfn", "distributor": {"name": "local"}}
    (tree / "config.toml").write_text(serialize_config(config))
    with use_db(tree / "session.sqlite") as session:
        session.add_work_items(items)
    begin = time.perf_counter()
    subprocess.run(COMMAND, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    print(f"unchanged, the tests take {time.perf_counter() - begin:.1f} s")
    command = [sys.executable, "-m", "cosmic_ray.cli", "exec", "config.toml", "session.sqlite"]
    return subprocess.Popen(command, cwd=tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=450)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run the survivors once more")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir(), "cbfn-mutants"))
    options = parser.parse_args()
    folder, target = options.folder.absolute(), ROOT / "property_tests" / "mutation.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "drawn.json").exists():
        draw(folder, options.mutants, options.seed)
    print(f"seed {json.loads((folder / 'drawn.json').read_text())['seed']}, {folder}")
    report(folder, target)  # of a run that was stopped
    with use_db(folder / "sample.sqlite", WorkDB.Mode.open) as sample:
        todo = list(sample.pending_work_items)
        if options.again:
            done = sample.completed_work_items
            todo += [item for item, r in done if r.test_outcome is TestOutcome.SURVIVED]
    for old in folder.glob("tree*"):
        shutil.rmtree(old)
    parts = [todo[number :: options.workers] for number in range(options.workers)]
    workers = [start(folder / f"tree{number}", part) for number, part in enumerate(parts)]
    running = True
    while running:
        time.sleep(10)
        running = any(worker.poll() is None for worker in workers)
        print(dict(report(folder, target)), end="\r", flush=True)
    print()


if __name__ == "__main__":
    main()
