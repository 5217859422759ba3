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
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fusedmlp.files import write_atomic

log = logging.getLogger(__name__)

FORMAT = 1
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t)
LOCK_TIMEOUT_S = 10.0


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
        if self.path is not None and self.path.exists():
            self._merge(self._read(warn=True))

    def add_algorithm(self, key: str, algorithm: Algorithm) -> None:
        """Remember an algorithm; :meth:`save` writes it."""
        with self._lock:
            self.algorithms[key] = algorithm
            self._unsaved = True

    def add_race(self, key: str, race: Race) -> None:
        """Remember the outcome of a race; :meth:`save` writes it."""
        with self._lock:
            self.races[key] = race
            self._unsaved = True

    def save(self) -> None:
        """Write what is new to the file, together with what other processes have added meanwhile.

        An entry that is already in the file stays: later runs then repeat the earlier ones. A file that cannot be
        written costs a warning, since everything can be measured again.
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
            self.algorithms |= document["algorithms"]
            self.races |= document["races"]

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
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if warn:
                log.warning("the plan store %s is ignored and will be replaced: %s", self.path, error)
            return None


def _algorithm(value: Any) -> Algorithm:
    workspace = value["workspace_bytes"]
    if type(workspace) is not int or workspace < 0:
        raise ValueError(f"workspace_bytes is {workspace!r}")
    try:
        data = base64.b64decode(value["data"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"an algorithm is not base64 ({error})") from error
    if len(data) != ALGORITHM_BYTES:
        raise ValueError(f"an algorithm has {len(data)} bytes instead of {ALGORITHM_BYTES}")
    return Algorithm(data, workspace)


def _race(value: Any) -> Race:
    times = {str(k): float(v) for k, v in value["times_us"].items()}
    return Race(str(value["winner"]), times)
