"""The plan store: what survives processes, crashes and damage, and what a file from elsewhere cannot do."""

import base64
import copy
import errno
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusedmlp import store as store_module
from fusedmlp.store import ALGORITHM_BYTES, FORMAT, Algorithm, PlanStore, Race

FINGERPRINT = {"gpu": "NVIDIA H200", "sm_count": 132, "driver": None, "cublaslt": 130100, "torch": "2.13.0"}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def algorithm(seed: int, workspace_bytes: int = 4096) -> Algorithm:
    return Algorithm(random.Random(seed).randbytes(ALGORITHM_BYTES), workspace_bytes)


def filled(path: Path | None, fingerprint=FINGERPRINT) -> PlanStore:
    store = PlanStore(path, dict(fingerprint))
    store.add_algorithm("DEFAULT 8x16r16@256", algorithm(1))
    store.add_algorithm("BGRADB 8x16r16@256", algorithm(2, 0))
    store.add_race("forward fc1 8x16", Race("BIAS+gelu", {"BIAS+gelu": 12.34, "linear+gelu": 13.0}))
    store.save()
    return store


def document() -> dict:
    """A sound file, as data."""
    with tempfile.TemporaryDirectory() as folder:
        filled(Path(folder) / "plans.json")
        return json.loads((Path(folder) / "plans.json").read_text())


def contents(store: PlanStore) -> tuple:
    return store.algorithms, store.races


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "plans.json"


# ---------------------------------------------------------------------------------------------------------------------
# Round trip


@QUICK
@given(
    algorithms=st.dictionaries(
        st.text(),
        st.builds(
            Algorithm,
            st.binary(min_size=ALGORITHM_BYTES, max_size=ALGORITHM_BYTES),
            st.integers(0, 32 * 2**20),
        ),
        max_size=4,
    ),
    races=st.dictionaries(
        st.text(),
        st.builds(Race, st.text(), st.dictionaries(st.text(), st.floats(0, 1e12), max_size=4)),
        max_size=4,
    ),
)
def test_what_is_saved_is_read_back(algorithms, races):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        store = PlanStore(path, FINGERPRINT)
        for key, value in algorithms.items():
            store.add_algorithm(key, value)
        for key, value in races.items():
            store.add_race(key, value)
        store.save()
        assert path.exists() == bool(algorithms or races)
        assert contents(PlanStore(path, FINGERPRINT)) == (algorithms, races)


def test_a_new_directory_is_made(tmp_path):
    deep = tmp_path / "a" / "b" / "plans.json"
    filled(deep)
    assert contents(PlanStore(deep, FINGERPRINT)) == contents(filled(None))


def test_no_path_means_memory_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = filled(None)
    assert len(store.algorithms) == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_new_is_not_written(path):
    store = filled(path)
    path.unlink()
    store.save()
    assert not path.exists()
    PlanStore(path, FINGERPRINT).save()
    assert not path.exists()
    store.add_race("another", Race("a", {}))
    store.save()
    assert contents(PlanStore(path, FINGERPRINT)) == contents(store)


def test_the_file_is_json_that_a_person_can_read(path):
    filled(path)
    text = path.read_text()
    assert text.endswith("}\n")
    found = json.loads(text)
    assert found["format"] == FORMAT
    assert found["fingerprint"] == FINGERPRINT
    assert found["races"]["forward fc1 8x16"] == {
        "winner": "BIAS+gelu",
        "times_us": {"BIAS+gelu": 12.34, "linear+gelu": 13.0},
    }
    assert list(found["algorithms"]) == sorted(found["algorithms"])  # the same content, the same bytes


# ---------------------------------------------------------------------------------------------------------------------
# Many writers


def test_an_entry_in_the_file_stays_and_new_ones_join_it(path):
    """Two that started from the same empty file: the first to save decides, and both end with the same."""
    first, second = PlanStore(path, FINGERPRINT), PlanStore(path, FINGERPRINT)
    first.add_algorithm("same", algorithm(1))
    first.add_race("same", Race("a", {"a": 1.0}))
    first.add_algorithm("first", algorithm(3))
    second.add_algorithm("same", algorithm(2))
    second.add_race("same", Race("b", {"b": 1.0}))
    second.add_algorithm("second", algorithm(4))
    first.save()
    second.save()
    expected = {"same": algorithm(1), "first": algorithm(3), "second": algorithm(4)}
    for store in (second, PlanStore(path, FINGERPRINT)):
        assert store.algorithms == expected
        assert store.races == {"same": Race("a", {"a": 1.0})}


def test_threads_of_a_process_share_a_store(path):
    store = PlanStore(path, FINGERPRINT)
    start, count, each = threading.Barrier(4), 4, 6

    def work(me):
        start.wait()
        for i in range(each):
            store.add_race(f"{me} {i}", Race(str(me), {"t": float(i)}))
            store.save()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = PlanStore(path, FINGERPRINT).races
    assert found == store.races
    assert len(found) == count * each


WRITER = """
import json, sys, time
from pathlib import Path
from fusedmlp.store import Algorithm, PlanStore, Race
path, go, me, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = PlanStore(path, json.loads(sys.argv[5]))
print("ready", flush=True)
while not go.exists():
    time.sleep(0.002)
for i in range(count):
    store.add_algorithm(f"own {me} {i}", Algorithm(bytes([me]) * 64, i))
    store.add_algorithm(f"shared {i}", Algorithm(bytes([me]) * 64, i))
    store.add_race(f"shared {i}", Race(str(me), {"t": me}))
    store.save()
print("done", flush=True)
"""
WRITERS, ENTRIES = 3, 15


@pytest.fixture(scope="module")
def many_processes(tmp_path_factory):
    """Writers that finish, one that is killed in the middle, and all that a reader saw meanwhile."""
    folder = tmp_path_factory.mktemp("many")
    path, go = folder / "plans.json", folder / "go"
    counts = [ENTRIES] * WRITERS + [10**6]  # the last one would never end
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(go), str(i), str(count), json.dumps(FINGERPRINT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for i, count in enumerate(counts)
    ]
    *writers, victim = children
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        go.touch()
        seen, deadline = [], time.monotonic() + 60
        while any(c.poll() is None for c in children) and time.monotonic() < deadline:
            try:
                seen.append(path.read_text())
            except FileNotFoundError:
                assert not seen  # once there, always there
            if seen and victim.poll() is None and f"own {WRITERS} 3" in seen[-1]:
                os.kill(victim.pid, signal.SIGKILL)
            time.sleep(0.001)
        ends = [(*w.communicate(timeout=10), w.returncode) for w in writers]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return path, ends, seen, victim.returncode


def test_processes_lose_nothing(many_processes):
    path, ends, _, killed = many_processes
    assert [end[2] for end in ends] == [0] * WRITERS, ends
    assert all(end[:2] == ("done\n", "") for end in ends)  # no warning either, beside a killed writer
    assert killed == -signal.SIGKILL
    found = PlanStore(path, FINGERPRINT)
    for i in range(ENTRIES):
        for me in range(WRITERS):
            assert found.algorithms[f"own {me} {i}"] == Algorithm(bytes([me]) * 64, i)
        winner = int(found.races[f"shared {i}"].winner)
        assert found.algorithms[f"shared {i}"] == Algorithm(bytes([winner]) * 64, i)  # one writer's, whole
    assert f"own {WRITERS} 3" in found.algorithms  # what the killed one had saved


def test_a_reader_never_sees_half_a_file_nor_a_changed_entry(many_processes):
    _, _, seen, _ = many_processes
    entries = {}
    assert len(set(seen)) > 3
    for text in dict.fromkeys(seen):
        found = json.loads(text)
        assert found["fingerprint"] == FINGERPRINT
        assert not entries.keys() - found["algorithms"].keys()  # none goes missing
        for key, value in found["algorithms"].items():
            assert entries.setdefault(key, value) == value


def test_a_killed_writer_leaves_no_lock(many_processes):
    path, *_ = many_processes
    store = PlanStore(path, FINGERPRINT)
    store.add_race("afterwards", Race("a", {}))
    started = time.monotonic()
    store.save()
    assert time.monotonic() - started < 5
    assert "afterwards" in PlanStore(path, FINGERPRINT).races


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(where, path, monkeypatch):
    """A power cut, for what this process can tell: nothing after the failing call runs."""

    class PowerCut(BaseException):
        pass

    def cut(*args):
        raise PowerCut

    filled(path)
    before = path.read_bytes()
    store = PlanStore(path, FINGERPRINT)
    store.add_race("new", Race("a", {}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync" if where == "write" else "replace", cut)
        with pytest.raises(PowerCut):
            store.save()
    assert path.read_bytes() == before
    store.save()  # what was not written is still to be written
    assert "new" in PlanStore(path, FINGERPRINT).races


# ---------------------------------------------------------------------------------------------------------------------
# Files that are not what they should be


def changed(*keys, to) -> bytes:
    """The sound file with one value changed; keys lead to it."""
    found = document()
    node = found
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = to
    return json.dumps(found).encode()


def without(*keys) -> bytes:
    found = document()
    node = found
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return json.dumps(found).encode()


A, R = ("algorithms", "DEFAULT 8x16r16@256"), ("races", "forward fc1 8x16")
GARBAGE = random.Random(0).randbytes(10_000_000)
DAMAGED = {
    "empty": b"",
    "blank": b" \n",
    "text": b"plans",
    "binary": b"\x80\x04\x95pickle",
    "NULs": bytes(4096),
    "UTF-16": json.dumps({"format": 1}).encode("utf-16"),
    "10 MB of garbage": GARBAGE,
    "10 MB of spaces": b" " * 10_000_000,
    "10 MB of brackets": b"[" * 10_000_000,
    "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "deep in an entry": json.dumps(document()).encode().replace(b"12.34", b"[" * 50_000 + b"]" * 50_000),
    "long number": b"1" * 100_000,
    "list": b"[]",
    "string": b'"format"',
    "number": b"1",
    "null": b"null",
    "two documents": json.dumps(document()).encode() * 2,
    "no format": without("format"),
    "another format": changed("format", to=FORMAT + 1),
    "format of 10 MB": changed("format", to="x" * 10_000_000),
    "no fingerprint": without("fingerprint"),
    "foreign fingerprint": changed("fingerprint", "gpu", to="NVIDIA H100"),
    "fingerprint with more": changed("fingerprint", "more", to=1),
    "fingerprint with less": without("fingerprint", "driver"),
    "fingerprint is null": changed("fingerprint", to=None),
    "no algorithms": without("algorithms"),
    "algorithms is a list": changed("algorithms", to=[]),
    "algorithms is null": changed("algorithms", to=None),
    "an algorithm is a string": changed(*A, to="AAAA"),
    "an algorithm is null": changed(*A, to=None),
    "no data": without(*A, "data"),
    "data too short": changed(*A, "data", to=base64.b64encode(bytes(63)).decode()),
    "data too long": changed(*A, "data", to=base64.b64encode(bytes(65)).decode()),
    "data of 10 MB": changed(*A, "data", to=base64.b64encode(GARBAGE).decode()),
    "data empty": changed(*A, "data", to=""),
    "data is not base64": changed(*A, "data", to="*" * 88),
    "data without padding": changed(*A, "data", to=base64.b64encode(bytes(64)).decode().rstrip("=")),
    "data is not ASCII": changed(*A, "data", to="é" * 88),
    "data is a number": changed(*A, "data", to=64),
    "data is a list": changed(*A, "data", to=[0] * 64),
    "no workspace": without(*A, "workspace_bytes"),
    "workspace is negative": changed(*A, "workspace_bytes", to=-1),
    "workspace is a fraction": changed(*A, "workspace_bytes", to=1.5),
    "workspace is a string": changed(*A, "workspace_bytes", to="4096"),
    "workspace is a bool": changed(*A, "workspace_bytes", to=True),
    "workspace is null": changed(*A, "workspace_bytes", to=None),
    "workspace of 1 TB": changed(*A, "workspace_bytes", to=10**12),
    "workspace beyond 64 bits": changed(*A, "workspace_bytes", to=10**30),
    "no races": without("races"),
    "races is a list": changed("races", to=[["a", "b"]]),
    "a race is a string": changed(*R, to="BIAS"),
    "no winner": without(*R, "winner"),
    "winner is a number": changed(*R, "winner", to=5),
    "winner is a list": changed(*R, "winner", to=["BIAS"]),
    "winner is null": changed(*R, "winner", to=None),
    "no times": without(*R, "times_us"),
    "times is a list": changed(*R, "times_us", to=[1.0]),
    "times is null": changed(*R, "times_us", to=None),
    "a time is null": changed(*R, "times_us", "a", to=None),
    "a time is a word": changed(*R, "times_us", "a", to="fast"),
    "a time is the word nan": changed(*R, "times_us", "a", to="nan"),
    "a time is a list": changed(*R, "times_us", "a", to=[1]),
    "a time is NaN": changed(*R, "times_us", "a", to=math.nan),
    "a time is infinite": changed(*R, "times_us", "a", to=math.inf),
    "a time beyond float": changed(*R, "times_us", "a", to=10**400),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(what, path, caplog):
    path.write_bytes(DAMAGED[what])
    store = PlanStore(path, FINGERPRINT)
    assert contents(store) == ({}, {})
    assert len(warnings(caplog)) == 1
    assert "is ignored and will be replaced" in caplog.text
    assert str(path) in caplog.text
    assert len(caplog.text) < 2000  # the damage is named, not quoted whole
    store.save()
    assert path.read_bytes() == DAMAGED[what]  # there is nothing new to write
    store.add_race("new", Race("a", {"a": 1.0}))
    store.save()
    assert contents(PlanStore(path, FINGERPRINT)) == ({}, {"new": Race("a", {"a": 1.0})})
    assert len(warnings(caplog)) == 1


def test_a_file_truncated_at_any_length_is_ignored(path, caplog):
    filled(path)
    whole = path.read_bytes()
    expected = contents(PlanStore(path, FINGERPRINT))
    for length in range(len(whole)):
        caplog.clear()
        path.write_bytes(whole[:length])
        store = PlanStore(path, FINGERPRINT)
        if length == len(whole) - 1:  # only the last newline is missing
            assert contents(store) == expected
            assert warnings(caplog) == []
            continue
        assert contents(store) == ({}, {}), length
        assert len(warnings(caplog)) == 1, length
        if length % 100 == 0:
            filled(path)
            assert contents(PlanStore(path, FINGERPRINT)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**320) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ("format",),
    ("fingerprint",),
    ("fingerprint", "gpu"),
    ("algorithms",),
    A,
    (*A, "data"),
    (*A, "workspace_bytes"),
    ("races",),
    R,
    (*R, "winner"),
    (*R, "times_us"),
    (*R, "times_us", "BIAS+gelu"),
]
SOUND = document()


@settings(QUICK, max_examples=300)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_no_value_anywhere_ends_a_run(place, value):
    found = copy.deepcopy(SOUND)
    node = found
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        path.write_text(json.dumps(found))
        store = PlanStore(path, FINGERPRINT)  # whatever it makes of it, it raises nothing
        for a in store.algorithms.values():
            assert len(a.data) == ALGORITHM_BYTES
            assert type(a.workspace_bytes) is int
            assert a.workspace_bytes >= 0
        for r in store.races.values():
            assert isinstance(r.winner, str)
            assert all(math.isfinite(t) for t in r.times_us.values())


@settings(QUICK, max_examples=200)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_no_flipped_byte_ends_a_run(place, byte):
    text = bytearray(json.dumps(SOUND).encode())
    text[place % len(text)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.json"
        path.write_bytes(text)
        PlanStore(path, FINGERPRINT)


def test_a_file_that_becomes_foreign_meanwhile_is_replaced(path, caplog):
    store = filled(path)
    filled(path, {"gpu": "another"})
    caplog.clear()
    store.add_race("new", Race("a", {}))
    store.save()
    assert contents(PlanStore(path, FINGERPRINT)) == contents(store)
    assert warnings(caplog) == []


# ---------------------------------------------------------------------------------------------------------------------
# Places that cannot be written


def _under_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "plans.json"


def _read_only(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "folder").mkdir(mode=0o555)
    return tmp_path / "folder" / "plans.json"


def _unsearchable(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        pytest.skip("root may search anywhere")
    (tmp_path / "folder").mkdir(mode=0o000)
    return tmp_path / "folder" / "plans.json"


def _full_disk(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "write_atomic", full)
    return tmp_path / "plans.json"


def _permission_denied(tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store_module, "FileLock", denied)
    return tmp_path / "plans.json"


def _lock_that_never_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    lock = store_module.FileLock(f"{tmp_path / 'plans.json'}.lock")
    lock.acquire()
    monkeypatch.setattr(store_module, "_held_by_a_test", lock, raising=False)  # until the test ends
    return tmp_path / "plans.json"


@pytest.mark.parametrize(
    "place",
    [_under_a_file, _read_only, _unsearchable, _full_disk, _permission_denied, _lock_that_never_comes],
)
def test_a_place_that_cannot_be_written_costs_one_warning(place, tmp_path, monkeypatch, caplog):
    store = PlanStore(place(tmp_path, monkeypatch), FINGERPRINT)
    for i in range(3):
        store.add_algorithm(f"a{i}", algorithm(i))
        store.add_race(f"r{i}", Race("a", {}))
        store.save()
    assert (len(store.algorithms), len(store.races)) == (3, 3)  # kept for this process
    assert len(warnings(caplog)) == 1
    assert "cannot be written" in caplog.text


def test_a_directory_in_place_of_the_file_ends_nothing(path, caplog):
    path.mkdir()
    store = PlanStore(path, FINGERPRINT)
    store.add_race("r", Race("a", {}))
    store.save()
    store.save()
    assert store.races == {"r": Race("a", {})}
    assert "cannot be written" in caplog.text


def test_an_impossible_name_ends_nothing(tmp_path):
    store = PlanStore(tmp_path / ("x" * 300), FINGERPRINT)
    store.add_race("r", Race("a", {}))
    store.save()
    assert store.races == {"r": Race("a", {})}


def test_a_file_that_may_not_be_looked_at_ends_nothing(path, monkeypatch, caplog):
    def denied(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name in ("exists", "stat", "read_text"):
        monkeypatch.setattr(Path, name, denied)
    store = PlanStore(path, FINGERPRINT)
    assert contents(store) == ({}, {})
    assert len(warnings(caplog)) <= 1
