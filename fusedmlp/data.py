"""Batches: windows of the token files, in an order that is a pure function of seed and position.

The tokens of a split are cut into non-overlapping windows of ``block_size`` inputs (each target is the next token, so
neighbouring windows share one token). Every epoch visits the windows in its own random order. A batch is computed from
(seed, step, micro-step, rank) alone: there is no loader state to save, resuming is exact, and both arms of a comparison
see the same batches. Shapes: B sequences in a batch, T = block_size.
"""

from typing import Any

import numpy as np
import torch

from fusedmlp.config import DataConfig
from fusedmlp.prepare import SPLITS, prepare
from fusedmlp.schema import ConfigError

# The key of the validation order. Seeds are below 2**63, so it is no seed's order of any training epoch.
VAL_SEED = 2**63


class TokenData:
    """The token files of one corpus, and the batches drawn from them."""

    def __init__(self, tokens: dict[str, np.ndarray], tokenizer: Any, meta: dict[str, Any], block_size: int, seed: int):
        """``tokens[split]`` is 1-D (memory-mapped), with at least ``block_size + 1`` ids; use :func:`load_data`."""
        self.tokens, self.tokenizer, self.meta = tokens, tokenizer, meta
        self.block_size, self.seed = block_size, seed
        self.windows = {split: (len(ids) - 1) // block_size for split, ids in tokens.items()}
        """Number of windows in each split: the samples of one epoch."""
        self._orders: dict[tuple[str, int, int], np.ndarray] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, end of document included."""
        return self.tokenizer.vocab_size

    @property
    def summary(self) -> dict[str, Any]:
        """What a run records about its data: source, sha256 of all document bytes, counts, tokenizer."""
        keys = ("source", "sha256", "documents", "bytes", "train_bytes", "val_bytes", "train_tokens", "val_tokens")
        return {key: self.meta[key] for key in (*keys, "tokenizer", "vocab_size")}

    def bytes_per_token(self, split: str) -> float:
        """Text bytes behind a token of ``split``: a loss in nats per token divided by it is in nats per byte."""
        return self.meta[f"{split}_bytes"] / self.meta[f"{split}_tokens"]

    def batch(
        self, split: str, step: int, micro: int, *, batch_size: int, grad_accum: int, rank: int = 0, world: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 on the CPU, each (batch_size, block_size) = (B, T).

        The samples of a step are consecutive in the epoch's order, whichever way they are divided among micro-steps
        and ranks: 8 x 1 and 2 x 4 (batch_size x grad_accum) train on the same ones. Every window comes once an epoch;
        a step that reaches the end of an epoch goes on with the next.
        """
        samples = np.arange(batch_size) + batch_size * (rank + world * (micro + grad_accum * step))
        epochs, places = np.divmod(samples, self.windows[split])
        chosen = [self._order(split, self.seed, int(e))[p] for e, p in zip(epochs, places, strict=True)]
        return self._gather(split, np.array(chosen))

    def val_batch(self, i: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``i``-th validation batch, shaped like :meth:`batch`: the same in every run, wrapping around."""
        places = (np.arange(batch_size) + batch_size * i) % self.windows["val"]
        return self._gather("val", self._order("val", VAL_SEED, 0)[places])

    def _order(self, split: str, seed: int, epoch: int) -> np.ndarray:
        """The order of the windows in an epoch. Kept for few epochs: a large corpus has millions of windows."""
        key = (split, seed, epoch)
        if key not in self._orders:
            while len(self._orders) >= 3:  # training at the turn of an epoch needs two, validation one
                self._orders.pop(next(iter(self._orders)))
            generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
            self._orders[key] = generator.permutation(self.windows[split])
        return self._orders[key]

    def _gather(self, split: str, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        starts = windows * self.block_size
        rows = [self.tokens[split][s : s + self.block_size + 1] for s in starts]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def load_data(config: DataConfig, block_size: int, seed: int) -> TokenData:
    """Prepare the corpus of ``config``, or take it from the cache, and open it for training.

    Raises:
        ConfigError: when the source cannot be read, holds no text, or gives a split fewer than ``block_size + 1``
            tokens.
    """
    folder, meta, tokenizer = prepare(config)
    needed = block_size + 1
    problems = []
    for split in SPLITS:
        count = meta[f"{split}_tokens"]
        if count >= needed and not meta["blank"]:
            continue
        empty = "there is no text, only 0 bytes or blanks; " if meta["blank"] else ""
        share = "lower" if split == "train" else "raise"
        problems.append(
            f"{meta['source']}: {empty}the {split} split has {count} tokens, but at least {needed} "
            f"(model.block_size + 1) are needed: give more text, {share} data.val_fraction={config.val_fraction}, "
            f"or lower model.block_size={block_size}"
        )
    if problems:
        raise ConfigError(problems)
    # The entry is immutable, and pages that are not in use cost no memory.
    tokens: dict[str, np.ndarray] = {
        split: np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r") for split in SPLITS
    }
    return TokenData(tokens, tokenizer, meta, block_size, seed)
