"""Sources arrive byte for byte, are cached once, and give batches that depend on nothing but their position."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp import corpus, prepare
from fusedmlp.config import DataConfig, HubConfig
from fusedmlp.corpus import cut, documents
from fusedmlp.data import TokenData, load_data
from fusedmlp.prepare import split_pieces, token_dtype
from fusedmlp.schema import ConfigError

ROOT = Path(__file__).resolve().parent.parent
ODD = [b"caf\xe9\r\n", b"lone\rreturn\x00\xff\n", "😀 <|endoftext|>\n".encode() * 30, b"no newline at the end"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(*paths: object, **others) -> DataConfig:
    return DataConfig(source="files", files=[str(p) for p in paths], **others)


def texts(config: DataConfig) -> list[bytes]:
    """The documents, whole."""
    return [b"".join(b for _, b in group) for _, group in groupby(documents(config).blocks(), key=lambda b: b[0])]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path, count: int = 400) -> Path:
    path.write_bytes(b"".join(b"line %d of a text, neither long nor short\r\n" % i for i in range(count)))
    return path


def parquet(path: Path, **columns: list) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def assert_tokens_are_the_text(config: DataConfig, data: TokenData):
    """What lies in the token files, document ends included, is what the split deals out."""
    eod = data.tokenizer.eod
    expected: dict[str, list[list[bytes]]] = {"train": [[]], "val": [[]]}
    for piece, ends, split in split_pieces(documents(config), config.val_fraction):
        expected[split][-1].append(piece)
        if ends:
            expected[split].append([])
    for split, parts in expected.items():
        ids = data.tokens[split]
        found = [data.tokenizer.decode_bytes(part) for part in np.split(ids, np.flatnonzero(ids == eod) + 1)]
        assert found == [b"".join(part) for part in parts]


# ---------------------------------------------------------------------------------------------------------- cutting


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from(ODD)), max_size=6),
    size=st.integers(1, 50),
)
def test_cutting_loses_nothing_and_keeps_the_limit(blocks, size):
    pieces = list(cut(blocks, size))
    assert b"".join(p for p, _ in pieces) == b"".join(blocks)
    assert all(1 <= len(p) <= size for p, _ in pieces)
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=300), size=st.integers(4, 40), block=st.integers(1, 64))
def test_cuts_go_between_characters_and_behind_newlines(text, size, block):
    whole = text.encode()
    pieces = [p for p, _ in cut((whole[i : i + block] for i in range(0, len(whole), block)), size)]
    for piece in pieces:
        piece.decode("utf-8")  # raises when a character was cut
    for piece in pieces[:-1]:
        assert b"\n" not in piece or piece.endswith(b"\n")


def test_where_a_long_document_is_cut_does_not_depend_on_the_blocks():
    text = (b"x" * 99 + b"\n") * 100 + "é".encode() * 5000
    assert list(cut([text], 1024)) == list(cut((text[i : i + 7] for i in range(0, len(text), 7)), 1024))


# ---------------------------------------------------------------------------------------------------------- sources


def test_stdlib_round_trips_through_the_token_files():
    root = Path(sysconfig.get_path("stdlib"))
    config = DataConfig()
    data = load_data(config, block_size=128, seed=0)
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    contents = [p.read_bytes() for p in sorted(paths)]
    whole = [c for c in contents if c]
    assert data.summary["sha256"] == sha256(b"".join(contents)).hexdigest()
    assert data.summary["documents"] == len(whole) == sum(int((t == 256).sum()) for t in data.tokens.values())
    assert data.summary["bytes"] == sum(map(len, whole))
    assert data.summary["val_bytes"] == pytest.approx(0.1 * data.summary["bytes"], abs=65536)
    assert_tokens_are_the_text(config, data)
    # Independently of the split rule: every document that is one piece lies in one of the splits between two ends.
    found: Counter[bytes] = Counter()
    for ids in data.tokens.values():
        found.update(data.tokenizer.decode_bytes(p) for p in np.split(ids, np.flatnonzero(ids == 256) + 1))
    cut_documents = sum(len(c) > 65536 for c in whole)
    missing = Counter(c for c in whole if len(c) <= 65536) - found
    assert missing.total() <= 2 * cut_documents  # directly behind a cut, the text has no mark at its start
    assert len(whole) > 10 * cut_documents


def test_a_sample_of_the_stdlib_round_trips_through_bpe(tmp_path):
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts and p.stat().st_size]
    odd = [p for p in paths if not _is_utf8(p.read_bytes()) or b"\r" in p.read_bytes()]
    sample = [*paths[:: max(len(paths) // 150, 1)], *odd[:50]]
    (tmp_path / "latin1.py").write_bytes(b"# caf\xe9\r\n" * 50)  # where the tests of the interpreter are not installed
    config = files(*sample, tmp_path / "latin1.py", tokenizer="bpe", vocab_size=512)
    data = load_data(config, block_size=128, seed=0)
    assert data.vocab_size == 512
    assert data.summary["documents"] == len({p.resolve() for p in sample}) + 1
    assert data.bytes_per_token("val") > 1.5
    assert_tokens_are_the_text(config, data)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_odd_raw_files_round_trip(tmp_path, tokenizer):
    for i, text in enumerate([*ODD, b""]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    config = files(tmp_path / "*.txt", tokenizer=tokenizer, vocab_size=280)
    data = load_data(config, block_size=8, seed=0)
    assert texts(config) == ODD  # an empty file is no document
    assert data.summary["sha256"] == sha256(b"".join(ODD)).hexdigest()
    assert_tokens_are_the_text(config, data)


def test_globs_home_order_and_repetition(tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    for name, text in [("z.txt", b"z"), ("a/y.txt", b"y"), ("a/b/x.txt", b"x"), ("a[1].txt", b"brackets")]:
        (tmp_path / name).write_bytes(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert texts(files("~/z.txt", "**/*.txt")) == [b"z", b"x", b"y", b"brackets"]
    assert texts(files("a[1].txt")) == [b"brackets"]


def test_jsonl_parquet_and_raw_files_together(tmp_path):
    strange = "a\r\nb\rc\u2028 é 😀"
    config = files(
        jsonl(tmp_path / "a.jsonl", {"body": strange, "n": 1}, {"body": "", "n": 2}, {"body": " x ", "n": 3}),
        parquet(tmp_path / "b.parquet", body=["from parquet\r\n", strange]),
        lines(tmp_path / "c.txt"),
        jsonl(tmp_path / "d[1]*.json", {"body": "last"}),
        text_column="body",
    )
    raw = (tmp_path / "c.txt").read_bytes()
    assert texts(config) == [strange.encode(), b" x ", b"from parquet\r\n", strange.encode(), raw, b"last"]


def test_synthetic_is_the_same_in_every_run_and_has_no_ends(tmp_path):
    config = DataConfig(source="synthetic", synthetic_tokens=200_000)
    data = load_data(config, block_size=64, seed=0)
    again = load_data(DataConfig(source="synthetic", synthetic_tokens=200_000, cache_dir=str(tmp_path / "o")), 64, 1)
    counts = np.zeros(257, dtype=int)
    for split, ids in data.tokens.items():
        np.testing.assert_array_equal(ids, again.tokens[split])
        counts += np.bincount(ids, minlength=257)
    assert counts.sum() == 200_000
    assert counts[256] == 0
    assert counts[:256].min() > 600  # 781 expected of each value, with a standard deviation of 28


def test_hub_reads_a_folder_streaming_or_not(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [f"document {i}\r\n" * 5 for i in range(300)]
    parquet(folder / "train.parquet", text=rows, label=list(range(300)))
    hub = HubConfig(path=str(folder), max_documents=250)
    data = load_data(DataConfig(source="hub", hub=hub), block_size=16, seed=0)
    assert data.summary["documents"] == 250
    assert data.summary["sha256"] == sha256("".join(rows[:250]).encode()).hexdigest()
    streamed = HubConfig(path=str(folder), streaming=True)
    assert texts(DataConfig(source="hub", hub=streamed)) == [r.encode() for r in rows]
    with pytest.raises(ConfigError, match=r"data\.hub\.path=.* no column data\.text_column='body'.*: text, label"):
        texts(DataConfig(source="hub", hub=hub, text_column="body"))
    with pytest.raises(ConfigError, match=r"data\.hub\.path=.* cannot be loaded: .*test"):
        texts(DataConfig(source="hub", hub=HubConfig(path=str(folder), split="test")))


PREPARE = """
import sys
from fusedmlp.config import DataConfig, HubConfig
from fusedmlp.data import load_data
kind, where, cache = sys.argv[1:]
if kind == "hub":
    config = DataConfig(source="hub", hub=HubConfig(path=where), cache_dir=cache)
else:
    config = DataConfig(source="files", files=[where], tokenizer="bpe", vocab_size=2000, cache_dir=cache)
data = load_data(config, block_size=16, seed=0)
inputs, _ = data.batch("train", 0, 0, batch_size=4, grad_accum=1)
print(data.summary["sha256"], inputs.sum().item(), data.meta["seconds"])
print("imported" if "datasets" in sys.modules else "not imported")
"""


def start(*arguments: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_warm_hub_cache_needs_neither_hub_nor_datasets(cache, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"text {i}\n" * 50 for i in range(50)]})
    monkeypatch.setattr(corpus, "_load_hub", lambda *_: rows)  # the hub, while there was a connection
    hub = DataConfig(source="hub", hub=HubConfig(path="owner/set"), cache_dir=str(cache))
    cold = load_data(hub, block_size=16, seed=0)
    process = start("hub", "owner/set", cache, HF_HUB_OFFLINE="1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.split()[0] == cold.summary["sha256"]
    assert out.splitlines()[-1] == "not imported"


def test_hub_that_is_offline_and_cold_fails_fast_and_says_how_to_download(tmp_path, cache):
    process = start("hub", "nobody/nothing", cache, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ConfigError: data.hub.path='nobody/nothing'" in err
    assert "load_dataset('nobody/nothing', split='train')" in err
    assert "HF_HUB_OFFLINE" in err


def test_unreachable_hub_is_noticed_without_waiting_for_retries(monkeypatch, caplog):
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(corpus, "getproxies", dict)
    with pytest.raises(ConfigError, match="download it before"):
        texts(DataConfig(source="hub", hub=HubConfig(path="nobody/nothing", name="cfg", revision="abc")))
    assert "127.0.0.1:9 cannot be reached" in caplog.text


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x", "n": 1}], r"has no column data\.text_column='text'; its columns are: body, n"),
        ([{"text": "x"}, {"text": None}], r"row 1: column data\.text_column='text' holds null, not text"),
        ([{"text": "x"}, {"other": 1}], r"row 1: column data\.text_column='text' holds null, not text"),
        ([{"text": 3}], r"row 0: column data\.text_column='text' holds int, not text"),
        ([{"text": "2020-01-01"}], r"row 0: column data\.text_column='text' holds datetime, not text"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=r"^data\.files: \S*bad\.jsonl.*" + message):
        load_data(files(jsonl(tmp_path / "bad.jsonl", *rows)), 8, 0)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_data(files(tmp_path / "none*", tmp_path), 8, 0)
    assert [re.sub(r"'.*?'", "X", p).split(" (")[0].split(";")[0] for p in caught.value.problems] == [
        "data.files: no file matches X",
        "data.files: X is a folder",
    ]
    for name, loader in ("junk.parquet", "parquet"), ("junk.jsonl", "json"):
        (tmp_path / name).write_bytes(b'{"text": "x"}\n{"text": ')
        with pytest.raises(ConfigError, match=rf"^data\.files: \S*{re.escape(name)} cannot be read as {loader}: ."):
            load_data(files(tmp_path / name), 8, 0)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that exists but cannot be read")
def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.files: /proc/self/mem cannot be read: "):
        load_data(files("/proc/self/mem"), 8, 0)


@pytest.mark.parametrize("text", [b"", b"\n" * 5000, b" \r\n\t" * 2000])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_empty_and_blank_files_are_refused(tmp_path, text, tokenizer):
    (tmp_path / "blank.txt").write_bytes(text)
    for _ in "cold", "warm":
        with pytest.raises(ConfigError, match=r"blank\.txt.*no text.*train split has \d+ tokens.*at least 9 \(model"):
            load_data(files(tmp_path / "blank.txt", tokenizer=tokenizer), 8, 0)


def test_a_split_needs_block_size_plus_one_tokens(tmp_path):
    config = files(lines(tmp_path / "a.txt", 60))
    meta = load_data(config, 1, 0).meta
    count = meta["val_tokens"]
    assert 100 < count < meta["train_tokens"]
    exact = load_data(config, count - 1, 0)  # block_size + 1 tokens: one window
    inputs, targets = exact.val_batch(0, 2)
    assert inputs.shape == targets.shape == (2, count - 1)
    assert torch.equal(inputs[0], inputs[1])
    assert exact.windows["val"] == 1
    for block_size in (count, count + 1):  # block_size and block_size - 1 tokens
        with pytest.raises(ConfigError) as caught:
            load_data(config, block_size, 0)
        (problem,) = caught.value.problems
        assert f"the val split has {count} tokens, but at least {block_size + 1} (model.block_size + 1)" in problem
        assert "raise data.val_fraction=0.1" in problem


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"^data\.cache_dir: cannot write below "):
        load_data(files(lines(tmp_path / "a.txt"), cache_dir=str(tmp_path / "file")), 8, 0)


# ------------------------------------------------------------------------------------------------------------ cache


@pytest.mark.parametrize(("size", "name"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (151936, "<u4")])
def test_token_dtype_follows_the_vocabulary(size, name):
    assert token_dtype(size) == np.dtype(name)
    assert np.iinfo(token_dtype(size)).max >= size - 1


@pytest.mark.parametrize(("vocab_size", "name"), [(65536, "<u2"), (65537, "<u4")])
def test_large_vocabularies_do_not_wrap(tmp_path, vocab_size, name):
    # Every three-letter word is frequent enough to become a token, so the vocabulary fills up to its limit.
    letters = [chr(c) for c in range(0x4E00, 0x4E00 + 42)]
    words = [a + b + c for a in letters for b in letters for c in letters]
    (tmp_path / "words.txt").write_text(" ".join(words * 3), encoding="utf-8")
    config = files(tmp_path / "words.txt", tokenizer="bpe", vocab_size=vocab_size, val_fraction=0.01)
    data = load_data(config, block_size=32, seed=0)
    assert data.vocab_size == vocab_size
    assert data.meta["dtype"] == name
    assert int(data.tokens["train"][-1]) == vocab_size - 1  # end of document, the largest id
    assert_tokens_are_the_text(config, data)


def test_warm_cache_is_used_and_follows_content_not_path(tmp_path, monkeypatch):
    first = load_data(files(lines(tmp_path / "a.txt")), 16, 0)
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    monkeypatch.setattr(prepare, "_build", lambda *_: pytest.fail("built although it is in the cache"))
    moved = load_data(files(tmp_path / "b.txt"), 16, 0)
    assert moved.meta["seconds"] == first.meta["seconds"]
    assert "b.txt" in moved.summary["source"]


@pytest.mark.parametrize("others", [{"val_fraction": 0.2}, {"tokenizer": "bpe", "vocab_size": 260}])
def test_settings_that_change_tokens_get_their_own_entry(tmp_path, cache, others):
    lines(tmp_path / "a.txt")
    load_data(files(tmp_path / "a.txt"), 16, 0)
    load_data(files(tmp_path / "a.txt", **others), 16, 0)
    (tmp_path / "a.txt").write_bytes((tmp_path / "a.txt").read_bytes().replace(b"line 7 ", b"LINE 7 "))
    load_data(files(tmp_path / "a.txt"), 16, 0)
    assert len(list(cache.glob("*/meta.json"))) == 3


def _truncate_bin(entry: Path):
    with open(entry / "val.bin", "r+b") as file:
        file.truncate(10)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate_bin,
        lambda entry: (entry / "train.bin").unlink(),
        lambda entry: (entry / "meta.json").write_text('{"dtype": "<u2", '),
        lambda entry: (entry / "tokenizer.json").write_text("{}"),
    ],
)
def test_damaged_entry_is_rebuilt_with_one_warning(tmp_path, cache, caplog, damage):
    config = files(lines(tmp_path / "a.txt"))
    before = {k: np.array(v) for k, v in load_data(config, 16, 0).tokens.items()}
    (entry,) = (p.parent for p in cache.glob("*/meta.json"))
    damage(entry)
    with caplog.at_level(logging.WARNING):
        after = load_data(config, 16, 0)
        load_data(config, 16, 0)
    assert len(caplog.records) == 1
    assert str(entry) in caplog.text
    for split, ids in before.items():
        np.testing.assert_array_equal(after.tokens[split], ids)


def test_failed_build_leaves_nothing_and_abandoned_ones_are_removed(tmp_path, cache, monkeypatch):
    config = files(lines(tmp_path / "a.txt"))
    with monkeypatch.context() as patch:
        patch.setattr(prepare.BytesTokenizer, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_data(config, 16, 0)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    (lock,) = cache.glob("*.lock")
    killed = cache / f"{lock.stem}.building-killed"
    killed.mkdir()
    (killed / "train.bin").write_bytes(b"half")
    load_data(config, 16, 0)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [lock.stem]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = lines(tmp_path / "log.txt")
    learn = prepare._tokenizer

    def meanwhile(*arguments):
        with open(path, "ab") as file:
            file.write(b"one more line\n")
        return learn(*arguments)

    monkeypatch.setattr(prepare, "_tokenizer", meanwhile)
    with pytest.raises(ConfigError, match="changed while it was read"):
        load_data(files(path), 16, 0)


def test_two_processes_with_a_cold_cache_build_once(tmp_path, cache):
    path = lines(tmp_path / "a.txt", 20_000)
    processes = [start("files", path, cache) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (out.splitlines()[0] for out, _ in outputs)
    assert first == second  # the recorded build time included: one built, the other took it
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.fixture
def data(tmp_path) -> TokenData:
    # Hexadecimal noise, so that every window is unique and can be recognised.
    (tmp_path / "a.txt").write_bytes(b"".join(b"%s\n" % sha256(b"%d" % i).hexdigest().encode() for i in range(150)))
    return load_data(files(tmp_path / "a.txt"), block_size=32, seed=1)


def starts(data: TokenData, split: str, batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Which window each row of a batch is; fails when a row is no window of the split."""
    where = {data.tokens[split][i * 32 : i * 32 + 33].tobytes(): i for i in range(data.windows[split])}
    rows = torch.cat([batch[0], batch[1][:, -1:]], dim=1).numpy().astype(data.meta["dtype"])
    return [where[row.tobytes()] for row in rows]


def test_batches_are_windows_with_targets_one_ahead(data):
    inputs, targets = data.batch("train", 3, 0, batch_size=8, grad_accum=1)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (8, 32)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(set(starts(data, "train", (inputs, targets)))) == 8


def test_each_window_comes_once_an_epoch_in_a_new_order(data):
    n = data.windows["train"]
    assert n == (len(data.tokens["train"]) - 1) // 32 > 100
    seen = [
        w for s in range(2 * n) for w in starts(data, "train", data.batch("train", s, 0, batch_size=1, grad_accum=1))
    ]
    assert sorted(seen[:n]) == sorted(seen[n:]) == list(range(n))
    assert seen[:n] != seen[n:] != list(range(n))


def test_a_step_crosses_the_end_of_an_epoch_without_gap(data):
    n = data.windows["train"]
    whole = starts(data, "train", data.batch("train", 0, 0, batch_size=2 * n + 5, grad_accum=1))
    assert sorted(whole[:n]) == sorted(whole[n : 2 * n]) == list(range(n))
    singles = [starts(data, "train", data.batch("train", s, 0, batch_size=1, grad_accum=1)) for s in range(2 * n + 5)]
    assert [w for single in singles for w in single] == whole


@pytest.mark.parametrize("step", [0, 7, 1000])
def test_the_samples_of_a_step_do_not_depend_on_how_they_are_divided(data, step):
    whole = starts(data, "train", data.batch("train", step, 0, batch_size=8, grad_accum=1))
    micro = [data.batch("train", step, m, batch_size=2, grad_accum=4) for m in range(4)]
    assert [w for b in micro for w in starts(data, "train", b)] == whole
    ranks = [
        starts(data, "train", data.batch("train", step, m, batch_size=2, grad_accum=2, rank=r, world=2))
        for m in range(2)
        for r in range(2)
    ]
    assert [w for part in ranks for w in part] == whole


def test_batches_depend_on_position_and_seed_only(data, tmp_path):
    far = data.batch("train", 123, 0, batch_size=4, grad_accum=1)
    for step in range(5):  # other requests in between leave no trace
        data.batch("train", step, 0, batch_size=64, grad_accum=1)
    again = load_data(files(tmp_path / "a.txt"), block_size=32, seed=1)
    other = load_data(files(tmp_path / "a.txt"), block_size=32, seed=2)
    for same in (data, again):
        assert torch.equal(same.batch("train", 123, 0, batch_size=4, grad_accum=1)[0], far[0])
    assert not torch.equal(other.batch("train", 123, 0, batch_size=4, grad_accum=1)[0], far[0])
    assert torch.equal(other.val_batch(2, 4)[0], data.val_batch(2, 4)[0])


def test_validation_covers_its_windows_and_wraps_around(data):
    n = data.windows["val"]
    seen = [w for i in range(n) for w in starts(data, "val", data.val_batch(i, 3))]
    assert sorted(seen) == sorted(list(range(n)) * 3)
    assert seen[:n] == seen[n : 2 * n]


def test_writing_into_a_batch_leaves_the_tokens_alone(data):
    inputs, targets = data.batch("train", 0, 0, batch_size=4, grad_accum=1)
    before = targets.clone()
    inputs.zero_()
    assert torch.equal(targets, before)
    assert torch.equal(data.batch("train", 0, 0, batch_size=4, grad_accum=1)[1], before)


def test_summary_is_plain_and_adds_up(data):
    summary = json.loads(json.dumps(data.summary))
    assert summary == data.summary
    assert summary["train_bytes"] + summary["val_bytes"] == summary["bytes"]
    assert summary["train_tokens"] + summary["val_tokens"] == summary["bytes"] + summary["documents"]
    assert data.bytes_per_token("val") == pytest.approx(1, abs=0.01)
