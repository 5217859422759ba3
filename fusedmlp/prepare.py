"""From documents to token files on disk: split, tokenise once, keep.

``<cache>/<fingerprint>/`` holds ``train.bin`` and ``val.bin`` (raw little-endian token ids), ``tokenizer.json`` and
``meta.json``. The fingerprint covers everything that decides their content, so an entry is never updated, only built.
It is built in a folder beside its place and renamed into it in one step: an entry that is there is complete, whatever
killed the build. A file lock lets one process build while the others that need the same entry wait for it.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from fusedmlp.config import DataConfig
from fusedmlp.corpus import Documents, documents
from fusedmlp.files import cache_directory
from fusedmlp.schema import ConfigError
from fusedmlp.tokenizer import BPETokenizer, BytesTokenizer, Tokenizer, from_dict

FORMAT = 1
"""Raised whenever the same config would give other token files than before."""
BPE_TRAINING_BYTES = 64 << 20
"""BPE learns from at most this much of the training split; more text hardly changes which pairs are frequent."""
ENCODE_BYTES = 4 << 20
"""Text tokenised at once: enough to occupy all cores, little enough to stay in memory."""
SPLITS = ("train", "val")

log = logging.getLogger(__name__)


def cache_root(config: DataConfig) -> Path:
    """``data.cache_dir``, else ``$FUSEDMLP_CACHE``, else ``~/.cache/fusedmlp``."""
    return Path(config.cache_dir).expanduser().absolute() if config.cache_dir else cache_directory()


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of the token files: uint16 while every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def split_pieces(source: Documents, val_fraction: float) -> Iterator[tuple[bytes, bool, str]]:
    """Deal the pieces of a corpus out to the splits: (piece, does its document end here, ``train`` or ``val``).

    A piece goes to validation whenever that leaves its share of the bytes so far closest to ``val_fraction``. There is
    nothing random in it, so validation text is spread evenly over the corpus, and every run has the same.
    """
    total = val = 0
    for piece, ends in source.pieces():
        total += len(piece)
        chosen = val + len(piece) / 2 <= val_fraction * total
        val += len(piece) if chosen else 0
        yield piece, ends and source.have_ends, "val" if chosen else "train"


def prepare(config: DataConfig) -> tuple[Path, dict[str, Any], Tokenizer]:
    """The token files for ``config``: their folder, ``meta.json`` as a dict, and the tokenizer. Built when missing.

    Raises:
        ConfigError: when the source cannot be read (see :mod:`fusedmlp.corpus`) or the cache cannot be written.
    """
    source = documents(config)
    for path in source.paths[:20]:
        log.info("reading %s", path)
    settings = {"format": FORMAT, "val_fraction": config.val_fraction, "tokenizer": config.tokenizer}
    if config.tokenizer == "bpe":
        settings |= {"vocab_size": config.vocab_size, "training_bytes": BPE_TRAINING_BYTES}
    identity = json.dumps({**settings, "documents": source.identity()}, sort_keys=True)
    root = cache_root(config)
    folder = root / hashlib.sha256(identity.encode()).hexdigest()[:32]

    entry = _load(folder)  # without the lock first: a warm cache may be read-only
    if entry is None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f"{folder.name}.lock"):
                entry = _load(folder) or _build(config, source, folder)
        except OSError as error:
            raise ConfigError(f"data.cache_dir: cannot write below {root}: {error}") from error
    meta, tokenizer = entry
    # The same text may lie elsewhere today than when it was tokenised.
    return folder, meta | {"source": source.label}, tokenizer


def _load(folder: Path) -> tuple[dict[str, Any], Tokenizer] | None:
    """An entry of the cache, or None when it is missing or its files disagree with what was recorded about them."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokenizer = from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        width = np.dtype(meta["dtype"]).itemsize
        sizes = [(folder / f"{split}.bin").stat().st_size for split in SPLITS]
        good = sizes == [meta[f"{split}_tokens"] * width for split in SPLITS]
        return (meta, tokenizer) if good and meta["vocab_size"] == tokenizer.vocab_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(config: DataConfig, source: Documents, folder: Path) -> tuple[dict[str, Any], Tokenizer]:
    """Build an entry; the caller holds its lock, so whatever lies in its place is damaged or abandoned."""
    if folder.exists():
        log.warning("the token files in %s are incomplete or damaged: building them anew", folder)
        shutil.rmtree(folder)
    for abandoned in folder.parent.glob(f"{folder.name}.building-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    began = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        tokenizer = _tokenizer(config, source)
        meta = {"source": source.label, **_write(source, config.val_fraction, tokenizer, scratch)}
        if source.total_bytes not in (None, meta["bytes"]):
            raise ConfigError(
                f"{source.label}: changed while it was read ({source.total_bytes} to {meta['bytes']} bytes)"
            )
        meta |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        meta["seconds"] = round(time.perf_counter() - began, 3)
        for name, values in (("tokenizer.json", tokenizer.to_dict()), ("meta.json", meta)):
            with open(scratch / name, "w", encoding="utf-8") as file:
                json.dump(values, file, indent=1)
                _to_disk(file)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return meta, tokenizer


def _tokenizer(config: DataConfig, source: Documents) -> Tokenizer:
    if config.tokenizer == "bytes":
        return BytesTokenizer()

    def training_text() -> Iterator[bytes]:
        used = 0
        for piece, _, split in split_pieces(source, config.val_fraction):
            if split == "train":
                used += len(piece)
                yield piece
            if used >= BPE_TRAINING_BYTES:
                return

    log.info("learning a BPE vocabulary of %d tokens", config.vocab_size)
    return BPETokenizer.train(training_text(), config.vocab_size)


def _write(source: Documents, val_fraction: float, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Tokenise every piece into ``<split>.bin``, each document followed by ``tokenizer.eod``; returns the counts."""
    dtype = token_dtype(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod], dtype=dtype)
    digest = hashlib.sha256()
    count = {f"{split}_{unit}": 0 for split in SPLITS for unit in ("tokens", "bytes")}
    ended, blank = 0, True
    waiting: list[tuple[bytes, bool, str]] = []
    waiting_bytes = 0

    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}

        def flush() -> None:
            for (piece, ends, split), ids in zip(waiting, tokenizer.encode([w[0] for w in waiting]), strict=True):
                files[split].write(ids.astype(dtype).data)
                if ends:
                    files[split].write(eod.data)
                count[f"{split}_tokens"] += len(ids) + ends
                count[f"{split}_bytes"] += len(piece)
            waiting.clear()

        with tqdm(total=source.total_bytes, desc="tokenising", unit="B", unit_scale=True, disable=None) as bar:
            for piece, ends, split in split_pieces(source, val_fraction):
                digest.update(piece)
                blank = blank and not piece.strip()
                ended += ends
                waiting.append((piece, ends, split))
                waiting_bytes += len(piece)
                if waiting_bytes >= ENCODE_BYTES:
                    flush()
                    bar.update(waiting_bytes)
                    waiting_bytes = 0
            flush()
            bar.update(waiting_bytes)
        for file in files.values():
            _to_disk(file)

    return {
        "sha256": digest.hexdigest(),
        "documents": ended,
        "bytes": count["train_bytes"] + count["val_bytes"],
        "blank": blank,
        "dtype": dtype.str,
        **count,
    }


def _to_disk(file: Any) -> None:
    """Let the bytes precede the rename: after a power cut, a file may otherwise have its size but not its data."""
    file.flush()
    os.fsync(file.fileno())
