"""Where a run's numbers go: metrics.jsonl and summary.json always, Weights & Biases on top.

The local files are the record. They are written in the training thread, a row at a time, so that a crash loses nothing
and a resumed run continues them without a gap or a double. Weights & Biases (:mod:`fusedmlp.wandb_run`) is a copy for
looking at; whatever goes wrong there costs a warning and never a training step.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

from fusedmlp.config import TrackingConfig
from fusedmlp.files import write_atomic
from fusedmlp.wandb_run import WandbRun, check, effective_mode

_logger = logging.getLogger(__name__)

HEALTHY_EXITS = ("finished", "interrupted")


class Tracker:
    """One run's metrics: build it before any costly work and in one process of the run, ``log``, ``finish`` once."""

    def __init__(
        self, run_dir: Path, tracking: TrackingConfig, config: dict[str, Any], *, resume_step: int | None
    ) -> None:
        """Open metrics.jsonl and start W&B.

        Args:
            run_dir: directory of the run, made if absent; receives metrics.jsonl, summary.json and wandb/.
            tracking: the ``tracking`` section. WANDB_MODE=offline or =disabled in the environment can only take away
                from it: the lesser of the two holds.
            config: the resolved config as plain nested data; W&B gets it as it is, to be filtered by dotted key.
            resume_step: None for a new run. Otherwise the step of the checkpoint that training continues from: rows of
                later steps leave metrics.jsonl. A new run in a directory that already has rows would append to them;
                refusing that is the caller's part.

        Raises:
            ConfigError: for ``online`` without credentials, and for a new online run that W&B does not accept.
            OSError: when the run directory cannot be written.
        """
        check(tracking)
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / "metrics.jsonl"
        earlier = [] if resume_step is None else _truncate_metrics(path, resume_step)
        self._last_step = max((row["step"] for row in earlier), default=None)
        self._samples: dict[str, str] = {}
        self._finished = False
        mode = effective_mode(tracking)
        self._wandb = (
            None
            if mode == "disabled"
            else WandbRun(self.run_dir, tracking, mode, plain(config), None if resume_step is None else earlier)
        )
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, row: dict[str, float | int | None]) -> None:
        """Record everything that is known of ``step``, as one row.

        None means unknown and is kept as null. So is a float that is not finite, for which JSON has no word.

        Raises:
            ValueError: unless ``step`` is above the last logged one; two rows of one step would be counted twice.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}; a step is one row, in increasing order")
        self._last_step = step
        record = {"step": step, **{key: plain(value) for key, value in row.items() if key != "step"}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.put(record, self._samples)
            self._samples = {}

    def text(self, step: int, key: str, text: str) -> None:
        """Show ``text`` (a sample, say) in W&B, as HTML in the next logged row: call it before ``log(step, ...)``.

        Several texts under one key are shown together. Text that no row follows ends up in W&B's summary. The local
        files do not hold samples.
        """
        earlier = self._samples.get(key, "")
        self._samples[key] = f"{earlier}--- step {step}\n{text}\n"

    def finish(self, summary: dict[str, Any], exit: str) -> None:
        """Write summary.json (``summary`` plus ``exit``) and close W&B; any further call does nothing.

        An ``exit`` other than "finished" or "interrupted" marks the W&B run failed. W&B gets FINISH_TIMEOUT_S seconds.
        Under the key ``wandb`` summary.json says what became of W&B: mode, run id, dropped rows, error.
        """
        if self._finished:
            return
        self._finished = True
        self._file.close()
        path = self.run_dir / "summary.json"
        record = {**plain(summary), "exit": exit}
        # First without a word on W&B: whatever happens while waiting for it, the summary is there.
        write_atomic(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
        if self._wandb is not None:
            self._wandb.finish({**record, **self._samples}, 0 if exit in HEALTHY_EXITS else 1)
            record["wandb"] = self._wandb.state()
            write_atomic(path, json.dumps(record, indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """``value`` as JSON data: floats that are not finite become None, unknown objects their text."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)  # NumPy and torch scalars


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; no file is no rows. A line that a crash has torn is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):  # only the last line can be torn by a crash of ours
                _logger.warning("%s, line %d is not a row of metrics; left out", path, number)
    return rows


def _truncate_metrics(path: Path, last: int) -> list[dict[str, Any]]:
    """Drop from metrics.jsonl what lies beyond step ``last``; returns what stays."""
    rows = [row for row in read_metrics(path) if row["step"] <= last]
    if path.exists():
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows
