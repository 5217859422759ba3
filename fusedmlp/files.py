"""Writing files so that a crash leaves the old content or the new one, whole, and never something between."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` by ``content``: a text, or a function that writes to the open file.

    The new content goes to ``<name>.<process id>.tmp`` beside it, is flushed to disk, and then renamed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            if isinstance(content, str):
                f.write(content.encode())
            else:
                content(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk should not be filled by what could not be finished
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


def cache_directory() -> Path:
    """Where things are kept between runs: ``$FUSEDMLP_CACHE``, else ``~/.cache/fusedmlp``."""
    return Path(os.environ.get("FUSEDMLP_CACHE") or "~/.cache/fusedmlp").expanduser().absolute()
