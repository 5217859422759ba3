"""Checkpoints: atomic, pruned, and readable by a bare torch.

A checkpoint is one file, ``checkpoints/step_00000100.pt``: a dict of tensors and plain values only, so that
``torch.load(path, weights_only=True)`` opens it without this project and without running any code. It is written to a
temporary file, flushed to disk and renamed, so that a file of that name is always whole; what a crash leaves behind
has another name and is removed by the next save. ``checkpoints/best.json`` names the step with the best validation
loss, which outlives the others.
"""

import json
import logging
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from fusedmlp.files import write_atomic
from fusedmlp.schema import ConfigError

FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})\.pt")

log = logging.getLogger(__name__)


def directory_of(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def path_of(directory: Path, step: int) -> Path:
    """The file of one step."""
    return directory / f"step_{step:08d}.pt"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a checkpoint, oldest first."""
    names = (_NAME.fullmatch(p.name) for p in directory.glob("step_*.pt"))
    return sorted(int(m[1]) for m in names if m)


def save(
    directory: Path, step: int, payload: dict[str, Any], keep_last: int, best_val_loss: float | None = None
) -> Path:
    """Write the checkpoint of ``step``, then remove all but the newest ``keep_last`` and the best.

    ``best_val_loss`` is given when this step has the lowest validation loss so far.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("*.tmp"):
        leftover.unlink()
    path = path_of(directory, step)
    content = _on_cpu({"format": FORMAT, **payload})  # so that it opens where there is no GPU
    write_atomic(path, lambda f: torch.save(content, f))
    if best_val_loss is not None:
        write_atomic(directory / "best.json", json.dumps({"step": step, "val_loss": best_val_loss}))
    best = best_step(directory)
    for old in [s for s in steps_in(directory) if s <= step][:-keep_last]:
        if old != best:
            path_of(directory, old).unlink()
    return path


def drop_after(directory: Path, step: int) -> None:
    """Remove the checkpoints of steps after ``step``, from which a run is about to go on another way."""
    for later in (s for s in steps_in(directory) if s > step):
        log.warning("%s is removed: the run goes on from step %d", path_of(directory, later), step)
        path_of(directory, later).unlink()


def best_step(directory: Path) -> int | None:
    """The step that best.json names, where its checkpoint is still there."""
    try:
        step = int(json.loads((directory / "best.json").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if path_of(directory, step).exists() else None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, or None.

    It is a zip archive whose members carry checksums. Its directory does not, so what torch never writes there
    (encryption, attributes) is refused as well: a flipped bit could turn one member's bytes into another's.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            odd = [m.filename for m in archive.infolist() if m.flag_bits & 1 or m.external_attr]
            broken = odd[0] if odd else archive.testzip()
        return f"{broken} inside it is damaged" if broken else None
    except (OSError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError) as error:
        return f"it is not a whole checkpoint ({error})"


def newest_valid(directory: Path) -> Path | None:
    """The newest checkpoint that loads; damaged ones are passed over with a warning each."""
    for step in reversed(steps_in(directory)):
        path = path_of(directory, step)
        try:
            load(path)
            return path
        except ConfigError as error:
            log.warning("%s; passed over", error)
    return None


def find(path: Path, *, best: bool) -> Path:
    """The checkpoint file that ``path``, a file or a run directory, means: its best or its newest.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    directory = directory_of(path) if directory_of(path).is_dir() else path
    step = best_step(directory) if best else None
    found = path_of(directory, step) if step is not None else newest_valid(directory)
    if found is None:
        raise ConfigError(f"{path}: no checkpoint there (expected checkpoints/step_*.pt)")
    return found


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Raises:
        ConfigError: the file is damaged, of another format, or no checkpoint of this project.
    """
    reason = damage(path)
    if reason is not None:
        raise ConfigError(f"checkpoint {path}: {reason}")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"checkpoint {path}: torch cannot read it ({str(error).splitlines()[0]})") from error
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path}: not a checkpoint of format {FORMAT}")
    return payload


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(v) for v in value)
    return value
