"""What a number was measured on: goes into summary.json and beside every recorded result.

Nothing here may end a run, so that whatever cannot be found out is None. The host's name is left out on purpose:
results are published.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 10.0  # for nvidia-smi, which hangs when the driver does, and for git on slow file systems


def describe(device: str | torch.device, cublaslt_version: str | int | None = None) -> dict[str, Any]:
    """The environment of this process, as plain JSON data; never raises.

    Args:
        device: where the computation runs. ``gpu``, ``sm_count`` and ``driver`` are None unless it is a CUDA device.
        cublaslt_version: passed through; only plans.py can ask nvmath for it.

    Returns:
        ``python``, ``platform``, ``cpu``, ``torch``, ``cuda`` (the version that torch was built for), ``gpu``,
        ``sm_count``, ``driver``, ``cublaslt``, ``nvmath``, ``triton``, ``commit`` and ``date`` (UTC, ISO 8601).
    """
    on_gpu = _or_none(lambda: torch.device(device).type == "cuda" and torch.cuda.is_available())
    gpu = _or_none(lambda: torch.cuda.get_device_properties(device)) if on_gpu else None
    return {
        "python": platform.python_version(),
        "platform": _or_none(platform.platform),
        "cpu": _or_none(_cpu),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpu": gpu.name if gpu else None,
        "sm_count": gpu.multi_processor_count if gpu else None,
        "driver": _or_none(_driver) if gpu else None,
        "cublaslt": cublaslt_version,
        "nvmath": _or_none(lambda: importlib.metadata.version("nvmath-python")),
        "triton": _or_none(lambda: importlib.metadata.version("triton")),
        "commit": _or_none(lambda: commit(Path(__file__).resolve().parent)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit(package: Path) -> str | None:
    """The commit of the checkout that holds the directory ``package``; None where no checkout does.

    "+dirty" follows it when the code that runs (the package, conf/ or train.py beside it) differs from the commit, or
    has files that the commit lacks. Texts, tests and freshly recorded results make nothing dirty.

    Raises:
        OSError: when there is no git.
        subprocess.SubprocessError: when git hangs, or fails on a checkout it knows.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py", check=False) is None:
        return None  # no checkout, or somebody else's, with this package installed inside it
    head = _git(package, "rev-parse", "HEAD")
    paths = [str(path) for path in (package, package.parent / "conf", package.parent / "train.py")]
    changes = _git(package, "status", "--porcelain", "--", *paths)
    return f"{head}+dirty" if changes else head


def _git(directory: Path, *arguments: str, check: bool = True) -> str | None:
    result = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=check,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # reads only: `status` must not get in the way of a commit
    )
    return result.stdout.strip() if result.returncode == 0 else None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return result.stdout.split()[0]  # a line for each GPU, all of one driver


def _cpu() -> str | None:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None  # Arm kernels print no model name


def _or_none(find: Callable[[], Any]) -> Any:
    """The answer of ``find``, or None: a missing tool, file or package is an answer here, not a failure."""
    try:
        return find()
    except Exception:
        return None
