"""What was measured once and need not be measured again: algorithms and winners of races, in one JSON file.

The file belongs to one combination of GPU, driver and libraries (its *fingerprint*); an algorithm means nothing to
another. Whatever else it is (foreign, truncated, not JSON, of wrong shape) it is ignored with one warning and replaced.
Many processes may share a file: each reads it, adds what it found, and renames a new one into place, under a lock.
Reading it runs no code; an algorithm from it is checked by cuBLASLt before it is used.
"""

import base64
import binascii
import json
import logging
import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fusedmlp.files import write_atomic

log = logging.getLogger(__name__)

FORMAT = 1
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t)
WORKSPACE_LIMIT = 32 * 2**20  # bytes; NVIDIA's advice for Hopper. Planning and execution must agree on it.
LOCK_TIMEOUT_S = 10.0
SHOWN = 200  # characters of a fault in a warning


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A cuBLASLt algorithm for one problem."""

    data: bytes
    """The 64 opaque bytes of cublasLtMatmulAlgo_t."""
    workspace_bytes: int
    """Workspace that it needs."""


@dataclass(frozen=True, slots=True)
class Race:
    """The outcome of a race between candidates."""

    winner: str
    times_us: dict[str, float]
    """Median time of each candidate, microseconds; empty where a rule decided."""


@dataclass
class PlanStore:
    """Algorithms and races of one fingerprint, in memory and, with a ``path``, on disk."""

    path: Path | None
    fingerprint: dict[str, Any]
    algorithms: dict[str, Algorithm] = field(default_factory=dict)
    races: dict[str, Race] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file, if there is one."""
        self._lock = threading.RLock()
        self._unsaved = False
        # Entries that were found useless, by key: they do not outlive their replacement.
        self._useless: dict[str, dict[str, Any]] = {"algorithms": {}, "races": {}}
        if self.path is not None:
            self._merge(self._read(warn=True))

    def add_algorithm(self, key: str, algorithm: Algorithm, *, instead_of: Algorithm | None = None) -> None:
        """Remember an algorithm; :meth:`save` writes it. ``instead_of`` is the one that was known and of no use."""
        with self._lock:
            self._useless["algorithms"][key] = instead_of
            self.algorithms[key] = algorithm
            self._unsaved = True

    def add_race(self, key: str, race: Race, *, instead_of: Race | None = None) -> None:
        """Remember the outcome of a race; :meth:`save` writes it. ``instead_of`` as for :meth:`add_algorithm`."""
        with self._lock:
            self._useless["races"][key] = instead_of
            self.races[key] = race
            self._unsaved = True

    def save(self) -> None:
        """Write what is new to the file, together with what other processes have added meanwhile.

        An entry that is already in the file stays, unless it is the very one that was found useless: later runs then
        repeat the earlier ones. A file that cannot be written costs a warning, since everything can be measured again.
        """
        with self._lock:
            if self.path is None or not self._unsaved:
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_S):
                    self._merge(self._read(warn=False))
                    write_atomic(self.path, json.dumps(self._document(), indent=1) + "\n")
                self._unsaved = False
            except (OSError, Timeout) as error:
                log.warning("the plan store %s cannot be written (%s); nothing is lost but time", self.path, error)
                self.path = None

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "algorithms": {
                key: {"data": base64.b64encode(a.data).decode(), "workspace_bytes": a.workspace_bytes}
                for key, a in sorted(self.algorithms.items())
            },
            "races": {key: {"winner": r.winner, "times_us": r.times_us} for key, r in sorted(self.races.items())},
        }

    def _merge(self, document: dict[str, Any] | None) -> None:
        if document is not None:
            for name, useless in self._useless.items():
                getattr(self, name).update({k: v for k, v in document[name].items() if v != useless.get(k)})

    def _read(self, *, warn: bool) -> dict[str, Any] | None:
        assert self.path is not None
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']!r}, not {FORMAT}")
            if found["fingerprint"] != self.fingerprint:
                raise ValueError("it was made with another GPU, driver or library version")
            return {
                "algorithms": {str(k): _algorithm(v) for k, v in found["algorithms"].items()},
                "races": {str(k): _race(v) for k, v in found["races"].items()},
            }
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if warn:
                fault = str(error) if not isinstance(error, KeyError) else f"{error} is missing"
                log.warning("the plan store %s is ignored and will be replaced: %s", self.path, fault[:SHOWN])
            return None


def _algorithm(value: Any) -> Algorithm:
    workspace = value["workspace_bytes"]
    if type(workspace) is not int or not 0 <= workspace <= WORKSPACE_LIMIT:
        raise ValueError(f"workspace_bytes is {workspace!r}")
    try:
        data = base64.b64decode(value["data"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"an algorithm is not base64 ({error})") from error
    if len(data) != ALGORITHM_BYTES:
        raise ValueError(f"an algorithm has {len(data)} bytes instead of {ALGORITHM_BYTES}")
    return Algorithm(data, workspace)


def _race(value: Any) -> Race:
    winner, times = value["winner"], value["times_us"]
    if not isinstance(winner, str):
        raise ValueError(f"the winner of a race is {winner!r}")
    for t in times.values():
        if type(t) not in (int, float) or not math.isfinite(t):
            raise ValueError(f"a time of a race is {t!r}")
    return Race(winner, {k: float(t) for k, t in times.items()})
