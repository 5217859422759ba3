"""From the command line to a validated config: the only place where Hydra composes and runs.

Exit status: 0 finished; 1 failed; 2 bad configuration, said in a line for each problem; 130 and 143 after SIGINT and
SIGTERM.
"""

import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusedmlp.config import register
from fusedmlp.schema import ConfigError, load, unknown_key

CONF = Path(__file__).resolve().parent.parent / "conf"
BAD_CONFIG = 2

log = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """A run that ended badly in a way that its message explains: no traceback, exit status 1."""


@cache
def _new_run_dir() -> str:
    # The random suffix keeps runs apart that start within the same second.
    return f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


OmegaConf.register_new_resolver("fusedmlp.run_dir", lambda given: given or _new_run_dir(), replace=True)


def main(config_name: str, schema: type, task: Callable[[Any], Any]) -> None:
    """Compose ``conf/<config_name>.yaml`` with the command line's overrides, validate, and run ``task(config)``.

    Does not return when anything goes wrong: it prints what, and exits with the status documented above.
    """
    if not (CONF / f"{config_name}.yaml").is_file():
        _refuse([f"{CONF} holds no {config_name}.yaml: install with `pip install -e .` from a checkout of the project"])
    if any(a.replace("_", "-").startswith("--local-rank") for a in sys.argv[1:]):
        _refuse(["--local-rank comes from torch.distributed.launch, which is deprecated: use torchrun"])
    register()

    composed = False

    def job(cfg: DictConfig) -> Any:
        nonlocal composed
        composed = True
        runtime = HydraConfig.get().runtime
        # Relative paths mean the folder where the command was started, whatever hydra.job.chdir says.
        os.chdir(runtime.cwd)
        try:
            try:
                config = load(cfg, schema)
            except ConfigError as error:
                if HydraConfig.get().mode is RunMode.MULTIRUN:
                    raise  # Hydra goes on with the other jobs and reports this one at the end
                _refuse(error.problems)
            # The jobs of a sweep get a folder each, below the run_dir that was asked for.
            if hasattr(config, "run_dir") and (config.run_dir is None or HydraConfig.get().mode is RunMode.MULTIRUN):
                config.run_dir = runtime.output_dir
            return task(config)
        finally:
            with suppress(OSError):  # Hydra made a folder; a refused or dry run leaves it empty
                os.rmdir(runtime.output_dir)

    # Hydra would otherwise print errors itself and exit with status 1, whatever they are.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
    except ConfigError as error:
        _refuse(error.problems)
    except (CompactHydraException, HydraException, OmegaConfBaseException) as error:
        _refuse(_explain(error, schema))
    except OSError as error:
        if composed:
            raise
        _refuse([f"run_dir: cannot make {error.filename}: {error.strerror}"])
    except ValueError as error:
        if composed:
            raise
        _refuse(_explain(error, schema))  # Hydra's defaults list, given a number or null for a config group
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _explain(error: Exception, schema: type) -> list[str]:
    """One line for an error of Hydra or OmegaConf: the override that caused it, what is wrong, the nearest key."""
    cause: BaseException = error
    while isinstance(cause.__cause__, HydraException | OmegaConfBaseException):
        cause = cause.__cause__
    key = getattr(cause, "full_key", None)
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    words = str(error) + str(cause)
    if "Available options" in words or "parsing override" in words:
        return [" ".join(str(error).partition("Config search path")[0].split())]
    if "is not a ListConfig" in words:
        return [f"{key} is a list: write {key}=[A,B]"]
    if key and ("not in struct" in words or "not in '" in words):
        return [unknown_key(key, schema)]
    return [f"{key}: {first}" if key and key not in first else first]


def _refuse(problems: list[str]) -> NoReturn:
    for problem in problems:
        print(f"config error: {problem}", file=sys.stderr)
    sys.exit(BAD_CONFIG)
