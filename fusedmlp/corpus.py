"""Documents: the text of every source, as bytes, through Hugging Face ``datasets`` (imported nowhere else).

A source gives its documents as a stream of blocks, so that a single document of many gigabytes needs no more memory
than a small one. What arrives is what is on disk: raw files are streamed through an ``IterableDataset`` of bytes, since
the "text" loader of ``datasets`` translates line ends and drops what is not UTF-8.

``datasets`` is imported on first use: tokens that are already in the cache need neither the library nor the hub.
"""

import glob
import hashlib
import logging
import os
import socket
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from fusedmlp.config import DataConfig
from fusedmlp.schema import ConfigError

BLOCK_BYTES = 1 << 20
MAX_PIECE_BYTES = 1 << 16
ROWS_AT_ONCE = 100  # rows can be whole books
PROBE_SECONDS = 5
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix -> loader of ``datasets`` for files whose documents are rows; any other file is one document of raw bytes."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Documents:
    """The documents of one source."""

    label: str
    """The config key and value they come from, for messages."""
    blocks: Callable[[], Iterator[tuple[int, bytes]]]
    """Starts a pass: (document number, next bytes of that document), documents in order, never an empty block."""
    identity: Callable[[], dict[str, Any]]
    """What decides the text, as JSON-able data; equal identities mean equal documents."""
    total_bytes: int | None = None
    """Size of all documents together, where it is known before reading."""
    have_ends: bool = True
    """Whether documents end; synthetic data is one stream without an end."""
    paths: tuple[str, ...] = ()
    """The files, absolute, for ``data.source=files``."""

    @property
    def piece_bytes(self) -> int:
        """Largest piece in bytes: about 64 pieces a corpus, so that even a small file fills both splits."""
        return MAX_PIECE_BYTES if self.total_bytes is None else min(max(self.total_bytes // 64, 1), MAX_PIECE_BYTES)

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """The documents cut into pieces: (1 to ``piece_bytes`` bytes, whether the document ends behind them)."""
        for _, blocks in groupby(self.blocks(), key=lambda block: block[0]):
            yield from cut((block for _, block in blocks), self.piece_bytes)


def cut(blocks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, bool]]:
    """Cut one document into pieces of at most ``size`` bytes: (piece, is it the last).

    A cut goes behind the last newline that fits, else between two UTF-8 characters, else (in a character longer than
    ``size``, or in bytes that are not UTF-8) wherever the size says. An empty document has no pieces.
    """
    rest, start = b"", 0
    for block in blocks:
        rest, start = rest[start:] + block, 0
        while len(rest) - start > size:
            end = rest.rfind(b"\n", start, start + size) + 1
            if end == 0:
                end = start + size
                # A UTF-8 character has at most three bytes of the form 10xxxxxx behind its first.
                back = next((i for i in range(4) if rest[end - i] & 0xC0 != 0x80), 0)
                end = end - back if end - back > start else end
            yield rest[start:end], False
            start = end
    if rest[start:]:
        yield rest[start:], True


def documents(config: DataConfig) -> Documents:
    """The documents of ``config.source``.

    Raises:
        ConfigError: when ``data.files`` names nothing that can be read. What only reading can show (an unreadable
            file, a missing text column, an unreachable hub) is raised as ConfigError by ``identity`` or ``blocks``.
    """
    if config.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _files(f"data.source=stdlib ({root})", "data.source=stdlib", _stdlib(root), config.text_column)
    if config.source == "files":
        paths = _expand(config.files)
        found = _files(f"data.files={config.files}", "data.files", paths, config.text_column)
        found.paths = tuple(str(path) for path in paths)
        return found
    if config.source == "hub":
        return _hub(config)
    return _synthetic(config.synthetic_tokens)


def _stdlib(root: Path) -> list[Path]:
    """Python's own sources, sorted by relative path so that every machine reads them in the same order.

    Its test suites are left out: many distributions do not ship them.
    """
    foreign = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    inside = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return [root / path for path in sorted(p for p in inside if not foreign & set(p.parts))]


def _expand(patterns: list[str]) -> list[Path]:
    """The files that paths and globs name, in the order given, each once."""
    found: dict[Path, Path] = {}
    problems = []
    for pattern in patterns:
        wide = os.path.expanduser(pattern)
        # An existing file is meant literally, also when its name contains brackets.
        names = [wide] if os.path.exists(wide) else sorted(glob.glob(wide, recursive=True))
        files = [Path(name).absolute() for name in names if os.path.isfile(name)]
        if os.path.isdir(wide):
            problems.append(f"data.files: {pattern!r} is a folder; name its files, for example {pattern}/**/*.txt")
        elif not files:
            problems.append(f"data.files: no file matches {pattern!r} (searched from {os.getcwd()})")
        for file in files:
            found.setdefault(file.resolve(), file)
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _files(label: str, key: str, paths: list[Path], column: str) -> Documents:
    raw = all(_loader(path) is None for path in paths)

    def identity() -> dict[str, Any]:
        files = [[_loader(path) or "raw", *_digest(path, key)] for path in paths]
        return {"files": files} if raw else {"files": files, "text_column": column}

    def blocks() -> Iterator[tuple[int, bytes]]:
        document = 0
        for is_raw, group in groupby(paths, key=lambda path: _loader(path) is None):
            together = list(group)
            parts = _raw_blocks(together, key) if is_raw else _row_blocks(together, key, column)
            last = -1
            for number, block in parts:
                document += number != last
                last = number
                yield document, block

    total = sum(path.stat().st_size for path in paths) if raw else None
    return Documents(label=label, blocks=blocks, identity=identity, total_bytes=total)


def _loader(path: Path) -> str | None:
    return LOADERS.get(path.suffix.lower())


def _digest(path: Path, key: str) -> tuple[int, str]:
    """Size in bytes and sha256 of a file."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _read_raw(paths: tuple[str, ...], key: str) -> Iterator[dict[str, Any]]:
    for number, path in enumerate(paths):
        try:
            with open(path, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield {"document": number, "bytes": block}
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _raw_blocks(paths: list[Path], key: str) -> Iterator[tuple[int, bytes]]:
    from datasets import IterableDataset

    # A tuple, because datasets takes a list for shards and would call the generator once for each file.
    arguments = {"paths": tuple(str(path) for path in paths), "key": key}
    for row in IterableDataset.from_generator(_read_raw, gen_kwargs=arguments):
        yield row["document"], row["bytes"]


def _row_blocks(paths: list[Path], key: str, column: str) -> Iterator[tuple[int, bytes]]:
    from datasets import load_dataset

    number = 0
    for path in paths:
        if path.stat().st_size == 0:  # the loaders stop at an empty file; here it just has no rows
            continue
        try:
            # Streaming, because it reads in place; otherwise datasets first copies the file into its own cache.
            rows = load_dataset(_loader(path), data_files=glob.escape(str(path)), split="train", streaming=True)
            for text in _texts(rows, column, f"{key}: {path}"):
                yield number, text
                number += 1
        except ConfigError:
            raise
        except Exception as error:  # the loaders raise whatever pyarrow, pandas or fsspec raise
            raise ConfigError(f"{key}: {path} cannot be read as {_loader(path)}: {_first_line(error)}") from error


def _texts(rows: Any, column: str, where: str) -> Iterator[bytes]:
    """The non-empty texts of a data set, as UTF-8. An empty text has nothing to learn from, so it is no document.

    Raises:
        ConfigError: when there is no such column, or a row (counted from 0) holds something else than text.
    """
    names = rows.column_names
    if names is not None and column in names:
        rows = rows.select_columns([column])  # other columns, images for example, need not be decoded
    row = 0
    for batch in rows.iter(batch_size=ROWS_AT_ONCE):
        if column not in batch:
            there = ", ".join(names or batch)
            raise ConfigError(f"{where} has no column data.text_column={column!r}; its columns are: {there}")
        for text in batch[column]:
            if not isinstance(text, str):
                kind = "null" if text is None else type(text).__name__
                raise ConfigError(f"{where}, row {row}: column data.text_column={column!r} holds {kind}, not text")
            if text:
                yield text.encode("utf-8")
            row += 1


def _hub(config: DataConfig) -> Documents:
    hub = config.hub
    path = str(hub.path)
    local = Path(path).expanduser()

    def identity() -> dict[str, Any]:
        spec: dict[str, Any] = {
            "hub": [path, hub.name, hub.split, hub.revision, hub.max_documents],
            "text_column": config.text_column,
        }
        if local.is_dir():  # a folder has no revision that would tell one state of it from the next
            files = sorted(p for p in local.rglob("*") if p.is_file())
            spec["local"] = [[str(p.relative_to(local)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
        return spec

    def blocks() -> Iterator[tuple[int, bytes]]:
        rows = _load_hub(config, str(local) if local.is_dir() else path)
        if hub.max_documents is not None:
            rows = rows.take(hub.max_documents)
        try:
            yield from enumerate(_texts(rows, config.text_column, f"data.hub.path={path!r}"))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"data.hub.path={path!r} cannot be read: {_first_line(error)}") from error

    return Documents(label=f"data.hub.path={path}", blocks=blocks, identity=identity)


def _load_hub(config: DataConfig, path: str) -> Any:
    from datasets import load_dataset

    hub = config.hub
    offline = not os.path.isdir(path) and _is_offline()
    try:
        return load_dataset(path, hub.name, split=hub.split, revision=hub.revision, streaming=hub.streaming)
    except Exception as error:  # from a wrong split's ValueError to whatever HTTP library is underneath
        hint = ""
        if offline or isinstance(error, ConnectionError):
            arguments = ", ".join([repr(a) for a in (hub.path, hub.name) if a is not None] + [f"split={hub.split!r}"])
            arguments += f", revision={hub.revision!r}" if hub.revision else ""
            hint = (
                "; download it before, on a machine with a connection and the same HF_HOME: "
                f'python -c "from datasets import load_dataset; load_dataset({arguments})" '
                "(then HF_HUB_OFFLINE=1 reads it from there; data.hub.streaming needs a connection)"
            )
        raise ConfigError(f"data.hub.path={hub.path!r} cannot be loaded: {_first_line(error)}{hint}") from error


def _is_offline() -> bool:
    """Whether the hub is switched off or out of reach; in the latter case it is switched off, and that is said.

    Without a network the hub's client retries every request for about 20 s before it looks into its own cache.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE:
        return True
    url = urlsplit(constants.ENDPOINT)
    if getproxies():  # the way out is not a direct connection, so trying one would prove nothing
        return False
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=PROBE_SECONDS).close()
        return False
    except OSError as error:
        log.warning("%s cannot be reached (%s): only data sets downloaded before can be used", url.netloc, error)
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return True


def _first_line(error: BaseException) -> str:
    # datasets wraps the error that explains something in one that does not.
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _synthetic(count: int) -> Documents:
    """``count`` random bytes, the same in every run: uniform, so that no model gets below ln 256 = 5.545 nats."""

    def blocks() -> Iterator[tuple[int, bytes]]:
        generator = np.random.Generator(np.random.Philox(key=0))
        for start in range(0, count, BLOCK_BYTES):
            yield 0, generator.bytes(min(BLOCK_BYTES, count - start))

    return Documents(
        label=f"data.synthetic_tokens={count}",
        blocks=blocks,
        identity=lambda: {"synthetic": count},
        total_bytes=count,
        have_ends=False,
    )
