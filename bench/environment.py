"""Where a figure was measured."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_environment() -> dict[str, object]:
    """Returns device, versions, commit and date, for the JSON line of a result."""
    return {
        "gpu": _gpu(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # a benchmark without a model must not load it
    if torch is None or not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_name()
    return name


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Returns the commit of this code, marked where the working tree differs from it."""
    here = Path(__file__).parent
    marker = here.parent / "COMMIT"  # for copies that travel without their history
    if marker.exists():
        return marker.read_text().strip()
    try:
        git = ["git", "-C", str(here)]
        commit = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "..", ":!results"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
