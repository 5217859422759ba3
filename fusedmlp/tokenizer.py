"""Bytes to token ids and back, without losing a byte.

Two tokenizers share one small interface:

- :class:`BytesTokenizer`: the id of a byte is its value.
- :class:`BPETokenizer`: byte-level byte pair encoding, learned from the training text with the tokenizers library.

Both put "end of document" (``eod``) on their last id, outside the text: it is a number without a string. A text that
happens to contain ``<|endoftext|>`` is therefore ordinary text, and no text can forge the end of a document.

Both take bytes, not strings. Real files hold Latin-1 comments, lone carriage returns and truncated characters, and a
corpus that is silently "repaired" on its way in is not the corpus whose sha256 the run reports.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

# In a string decoded with "surrogateescape", these stand for the bytes that are not UTF-8. Text that is valid UTF-8
# cannot contain them, so splitting on them separates the two without ambiguity.
_RUNS = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")

# BPE merges inside words only, and the library's byte-level pattern says what a word is: letters, digits or signs with
# one space before, or blanks. Where a word can be cut off without the library, its ids can be remembered. For ASCII
# text that pattern is simple enough to be repeated here. Other text is first cut into stretches, before a blank that
# follows a non-blank: no word extends over that place, since blanks stand only at the start of a word.
_ASCII_WORDS = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
_BLANK = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_STRETCHES = re.compile(rf"[\x00-\x7f]*[!-~](?=[\t-\r ])|[{_BLANK}]*[^{_BLANK}]+|[{_BLANK}]+")
MAX_REMEMBERED = 200_000
"""Words whose ids are remembered: some 40 MB, and all that is frequent in most corpora."""


class Tokenizer(ABC):
    """What the rest of the project knows of a tokenizer; subclasses fill it in."""

    name: str
    """``bytes`` or ``bpe``."""
    vocab_size: int
    """Number of ids, end of document included."""

    @property
    def eod(self) -> int:
        """Id of "end of document": the last one."""
        return self.vocab_size - 1

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each text: one 1-D unsigned integer array a text, without end of document.

        Any byte string is accepted, and ``decode_bytes`` gives it back exactly. Arrays may be read-only views.
        """

    @abstractmethod
    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes behind ``ids`` (1-D integers, also a CPU tensor). End of document contributes nothing.

        Raises:
            ValueError: for ids that are not integers or not in ``[0, vocab_size)``.
        """

    def decode(self, ids: ArrayLike) -> str:
        """Like :meth:`decode_bytes`, as text; what is not UTF-8, like half a character at the end, becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything needed to rebuild the tokenizer, as plain JSON-able data (it travels inside checkpoints)."""

    def _check(self, ids: ArrayLike) -> np.ndarray:
        array = np.asarray(ids).reshape(-1)
        if array.size == 0:
            return array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, not {array.dtype}")
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"token id {wrong[0]} is not in [0, {self.vocab_size}), the range of this tokenizer")
        return array


class BytesTokenizer(Tokenizer):
    """256 byte values, then end of document. Nothing to learn, and a loss in nats per token is nats per byte."""

    name = "bytes"
    vocab_size = 257

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """See :meth:`Tokenizer.encode`; the arrays are uint8 views of the texts."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """See :meth:`Tokenizer.decode_bytes`."""
        array = self._check(ids)
        return array[array != self.eod].astype(np.uint8).tobytes()

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Tokenizer.to_dict`."""
        return {"name": self.name}


class BPETokenizer(Tokenizer):
    """Byte-level BPE: all 256 single bytes, then merges of frequent neighbours, then end of document.

    The library works on strings in which every byte is spelled as one printable character. Text that is valid UTF-8
    goes through it; the stray bytes between are looked up one by one in the same alphabet, so that they too have
    ordinary ids and come back exactly.
    """

    name = "bpe"

    def __init__(self, inner: HFTokenizer) -> None:
        """Wrap a byte-level ``tokenizers.Tokenizer`` without special tokens, whose ids run from 0 without gaps."""
        self._inner = inner
        vocab: dict[str, int] = inner.get_vocab()
        self.vocab_size = len(vocab) + 1
        spelled = _byte_of_character()
        self._bytes_of_id = [b""] * self.vocab_size  # end of document stays empty
        for token, i in vocab.items():
            self._bytes_of_id[i] = bytes(spelled[c] for c in token)
        self._ids_of_word: dict[str, bytes] = {}
        self._id_of_byte = np.zeros(256, dtype=np.uint32)
        for character, value in spelled.items():
            self._id_of_byte[value] = vocab[character]

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> "BPETokenizer":
        """Learn merges from ``texts`` until there are ``vocab_size`` ids, end of document included.

        A text too small for that gives a smaller vocabulary: a pair seen only once is not merged, because a merge
        that compresses one place of the corpus teaches a model nothing. ``vocab_size`` of the result is the true one.
        """
        inner = HFTokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator((run for text in texts for run in _runs(text) if isinstance(run, str)), trainer)
        return cls(inner)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """See :meth:`Tokenizer.encode`; the arrays are uint32.

        Most words of a text occurred before. Remembering their ids is several times as fast as the library alone, which
        computes them anew each time, and gives the same ids.
        """
        parts = [[_words(run) if isinstance(run, str) else run for run in _runs(text)] for text in texts]
        self._remember({word for runs in parts for run in runs if isinstance(run, list) for word in run})
        result = []
        for runs in parts:
            ids = [
                b"".join(map(self._ids_of_word.__getitem__, run))
                if isinstance(run, list)
                else self._id_of_byte[np.frombuffer(run, dtype=np.uint8)].tobytes()
                for run in runs
            ]
            result.append(np.frombuffer(b"".join(ids), dtype=np.uint32))
        return result

    def _remember(self, words: set[str]) -> None:
        """Have the ids of all ``words`` in ``_ids_of_word``, as the bytes of a uint32 array."""
        if len(self._ids_of_word) > MAX_REMEMBERED:
            self._ids_of_word.clear()
        new = list(words.difference(self._ids_of_word))
        encoded = self._inner.encode_batch_fast(new, add_special_tokens=False)
        self._ids_of_word.update((w, np.array(e.ids, np.uint32).tobytes()) for w, e in zip(new, encoded, strict=True))

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """See :meth:`Tokenizer.decode_bytes`."""
        return b"".join(map(self._bytes_of_id.__getitem__, self._check(ids).tolist()))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Tokenizer.to_dict`."""
        return {"name": self.name, "tokenizer": json.loads(self._inner.to_str())}


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """The inverse of ``to_dict``.

    Raises:
        ValueError: for a dict that no tokenizer of this project wrote.
    """
    if values.get("name") == "bytes":
        return BytesTokenizer()
    if values.get("name") == "bpe" and "tokenizer" in values:
        return BPETokenizer(HFTokenizer.from_str(json.dumps(values["tokenizer"])))
    raise ValueError(f"not a tokenizer of this project: name={values.get('name')!r}")


def _runs(text: bytes) -> Iterator[str | bytes]:
    """``text`` in order, as maximal runs of valid UTF-8 (str) and of other bytes (bytes)."""
    try:
        if text:
            yield text.decode("utf-8")
    except UnicodeDecodeError:
        for run in _RUNS.findall(text.decode("utf-8", errors="surrogateescape")):
            stray = "\udc80" <= run[0] <= "\udcff"
            yield run.encode("utf-8", errors="surrogateescape") if stray else run


def _words(text: str) -> list[str]:
    """``text`` in order, cut only where the library, too, begins a new word."""
    if text.isascii():
        return _ASCII_WORDS.findall(text)
    stretches = _STRETCHES.findall(text)
    return [word for part in stretches for word in (_ASCII_WORDS.findall(part) if part.isascii() else [part])]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet, backwards: the printable character that spells a byte -> the byte.

    Printable Latin-1 characters spell themselves; the other bytes, in order, are spelled by U+0100 and upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
