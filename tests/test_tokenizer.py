"""Both tokenizers give back every byte they were given, and keep "end of document" out of the text's reach."""

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedmlp.tokenizer import BPETokenizer, BytesTokenizer, Tokenizer, from_dict

TEXT = "def f(x):\r\n    return x + 1  # a comment, café, naïve, 😀 <|endoftext|>\n" * 40
TRAINED = BPETokenizer.train([TEXT.encode()], 300)
TOKENIZERS = [BytesTokenizer(), TRAINED]
each = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.name)

HARD = [
    b"",
    b"\r\n",
    b"\r",
    b"a\rb\r\nc\n\n",
    b" leading and trailing ",
    b"<|endoftext|>",
    b"\x00\xff\xfe",
    b"\xed\xa0\x80",  # a surrogate in UTF-8 clothes, which Python refuses
    b"caf\xe9 in Latin-1",
    "😀é\u2028\ufeffe\u0301".encode(),
    "😀".encode()[:3],
    b"valid" + "😀".encode()[:2] + b"valid again\xff",
    bytes(range(256)),
]


@each
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_round_trip(tokenizer: Tokenizer, text: bytes):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode_bytes(ids) == text
    assert tokenizer.decode(ids) == text.decode("utf-8", errors="replace")


@each
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.one_of(st.binary(max_size=200), st.text(max_size=80).map(lambda s: s.encode()))))
@example(texts=HARD)
def test_any_bytes_round_trip_in_order_and_never_contain_eod(tokenizer: Tokenizer, texts: list[bytes]):
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode_bytes(ids) for ids in encoded] == texts
    for ids in encoded:
        assert ids.ndim == 1
        assert ids.dtype.kind == "u"
        assert (ids < tokenizer.eod).all()


# What the library's pattern treats specially: contractions, kinds of blanks, things Python and the library might call
# blank or not, letters and numbers beyond ASCII, signs.
PATTERN = st.text(
    st.sampled_from("ab1'stdmlverLL  \n\r\t\x0b\x0c\x1c\x1f\x85\xa0\u180e\u2003\u2028\u200b²½éß中😀_-.!"), max_size=60
)


@settings(max_examples=1500, deadline=None)
@given(text=PATTERN)
@example(text="it's we'll  they've\r\n\r\n  x = 'str'  # é's   ½ 1²\n")
def test_remembered_words_give_the_ids_of_the_library(text: str):
    (ids,) = TRAINED.encode([text.encode()])
    assert ids.tolist() == TRAINED._inner.encode(text, add_special_tokens=False).ids


def test_words_are_forgotten_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr("fusedmlp.tokenizer.MAX_REMEMBERED", 10)
    tokenizer = BPETokenizer.train([TEXT.encode()], 300)
    texts = [f"word{i} of {i} more".encode() for i in range(50)]
    for text in texts:
        assert tokenizer.decode_bytes(tokenizer.encode([text])[0]) == text
    assert len(tokenizer._ids_of_word) < 20


@each
def test_eod_is_the_last_id_and_decodes_to_nothing(tokenizer: Tokenizer):
    assert tokenizer.eod == tokenizer.vocab_size - 1
    a, b = tokenizer.encode([b"one", b"two"])
    assert tokenizer.decode_bytes([*a, tokenizer.eod, *b, tokenizer.eod]) == b"onetwo"
    assert tokenizer.decode([tokenizer.eod]) == ""


@each
def test_every_id_decodes_and_others_are_refused(tokenizer: Tokenizer):
    pieces = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
    assert len(set(pieces)) == tokenizer.vocab_size  # no two ids mean the same
    for wrong in (tokenizer.vocab_size, -1):
        with pytest.raises(ValueError, match=rf"token id {wrong} is not in \[0, {tokenizer.vocab_size}\)"):
            tokenizer.decode([0, wrong])
    with pytest.raises(ValueError, match="must be integers"):
        tokenizer.decode_bytes([0.5])
    assert tokenizer.decode_bytes([]) == b""


@each
def test_dict_goes_through_json_and_back(tokenizer: Tokenizer):
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert type(again) is type(tokenizer)
    assert (again.vocab_size, again.eod) == (tokenizer.vocab_size, tokenizer.eod)
    for before, after in zip(tokenizer.encode(HARD), again.encode(HARD), strict=True):
        np.testing.assert_array_equal(before, after)


def test_foreign_dict_is_refused():
    with pytest.raises(ValueError, match="wordpiece"):
        from_dict({"name": "wordpiece"})


def test_bytes_are_their_own_ids():
    (ids,) = BytesTokenizer().encode([b"\x00A\xff"])
    assert ids.tolist() == [0, 65, 255]
    assert BytesTokenizer().vocab_size == 257


def test_half_a_character_is_replaced_in_text_and_exact_in_bytes():
    ids = BytesTokenizer().encode(["né😀".encode()])[0][:-2]
    assert BytesTokenizer().decode(ids) == "né\ufffd"
    assert BytesTokenizer().decode_bytes(ids) == "né😀".encode()[:-2]


def test_bpe_reaches_the_vocabulary_it_is_asked_for_and_compresses():
    assert TRAINED.vocab_size == 300
    (ids,) = TRAINED.encode([TEXT.encode()])
    assert len(ids) < len(TEXT.encode()) / 2


@pytest.mark.parametrize("texts", [[], [b"abcabc"], [b"\xff\xfe"]])
def test_bpe_of_too_little_text_reports_its_true_size(texts: list[bytes]):
    small = BPETokenizer.train(texts, 4096)
    assert 257 <= small.vocab_size < 262
    assert small.vocab_size == len({small.decode_bytes([i]) for i in range(small.vocab_size)})


def test_bpe_training_is_deterministic():
    words = ["".join(random.Random(i).choices("abcdefgh", k=5)) for i in range(400)] * 2
    text = " ".join(words).encode()
    assert BPETokenizer.train([text], 500).to_dict() == BPETokenizer.train([text], 500).to_dict()
