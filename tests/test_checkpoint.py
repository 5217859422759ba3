"""Checkpoints: whole or not there, the right ones kept, damage noticed, nothing executed."""

import itertools
import json
import logging
import os
import pickle
import random
import zipfile

import pytest
import torch

from fusedmlp import checkpoint
from fusedmlp.checkpoint import best_step, damage, directory_of, find, load, newest_valid, path_of, save, steps_in
from fusedmlp.schema import ConfigError


def payload(step: int = 0) -> dict:
    g = torch.Generator().manual_seed(step)
    return {"step": step, "model": {"w": torch.randn(40, 50, generator=g), "b": torch.randn(3, generator=g)}}


def same(a: dict, b: dict) -> bool:
    return a["step"] == b["step"] and all(torch.equal(a["model"][k], b["model"][k]) for k in ("w", "b"))


def save_all(directory, steps, keep_last=2, best=()):
    for step in steps:
        save(directory, step, payload(step), keep_last, 1.0 / step if step in best else None)


def test_saved_and_loaded(tmp_path):
    path = save(tmp_path / "run" / "checkpoints", 100, payload(100), 2)
    assert path.name == "step_00000100.pt"
    assert same(load(path), payload(100))
    assert load(path)["format"] == checkpoint.FORMAT
    assert os.listdir(path.parent) == [path.name]
    assert same(torch.load(path, weights_only=True), payload(100))


@pytest.mark.parametrize("written", [0, 1, 1000])
def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path, monkeypatch, written):
    save(tmp_path, 7, payload(7), 2, 0.5)
    before = path_of(tmp_path, 7).read_bytes()

    def failing(content, file):
        file.write(bytes(written))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        for step in (7, 8):
            with pytest.raises(OSError, match="No space left"):
                save(tmp_path, step, payload(0), 1, 0.4)
    assert steps_in(tmp_path) == [7]
    assert path_of(tmp_path, 7).read_bytes() == before
    assert best_step(tmp_path) == 7
    assert json.loads((tmp_path / "best.json").read_text())["val_loss"] == 0.5
    # What the crash left has another name, and goes with the next save.
    save(tmp_path, 9, payload(9), 2)
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step_00000007.pt", "step_00000009.pt"]


def test_leftovers_of_a_killed_process_are_removed_and_never_read(tmp_path):
    leftover = tmp_path / "step_00000099.pt.4711.tmp"
    leftover.write_bytes(b"half a checkpoint")
    assert steps_in(tmp_path) == []
    assert newest_valid(tmp_path) is None
    save(tmp_path, 1, payload(1), 2)
    assert not leftover.exists()


@pytest.mark.parametrize("keep_last", [1, 2, 3, 100])
def test_the_newest_are_kept(tmp_path, keep_last):
    steps = list(range(10, 80, 10))
    save_all(tmp_path, steps, keep_last)
    assert steps_in(tmp_path) == steps[-keep_last:]


def test_the_best_outlives_the_others(tmp_path):
    save_all(tmp_path, [10, 20, 30, 40, 50], best=[10, 20])
    assert best_step(tmp_path) == 20
    assert steps_in(tmp_path) == [20, 40, 50]
    save_all(tmp_path, [60], best=[60])
    save_all(tmp_path, [70])
    assert steps_in(tmp_path) == [60, 70]  # a dethroned best has no privilege, and the new one counts among the newest


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        path_of(tmp_path, step).touch()
    (tmp_path / "step_final.pt").touch()
    (tmp_path / "step_00000006.pt.bak").touch()
    (tmp_path / "step_7.pt").touch()
    assert steps_in(tmp_path) == [5, 99_999_999, 100_000_000]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        '{"step": null}',
        '{"step": "seven"}',
        '{"step": [1]}',
        '{"step": 12345}',
        "\x00" * 50,
    ],
)
def test_a_missing_or_broken_best_json_is_no_best(tmp_path, content):
    save_all(tmp_path, [1, 2])
    if content is not None:
        (tmp_path / "best.json").write_text(content)
    assert best_step(tmp_path) is None
    assert find(tmp_path, best=True) == path_of(tmp_path, 2)
    save_all(tmp_path, [3, 4], keep_last=1)  # pruning goes on
    assert steps_in(tmp_path) == [4]


def test_bytes_that_are_no_text_in_best_json(tmp_path):
    save_all(tmp_path, [1])
    (tmp_path / "best.json").write_bytes(b"\xff\xfe\x80")
    assert best_step(tmp_path) is None


# ---------------------------------------------------------------------------------------------------------------------
# Damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("sound"), 1, payload(1), 2)
    return path, path.read_bytes()


def test_a_sound_file_has_no_damage(sound):
    assert damage(sound[0]) is None


def test_truncation_at_any_length_is_noticed(sound, tmp_path):
    content = sound[1]
    path = tmp_path / "step_00000001.pt"
    lengths = {*range(0, len(content), 97), *range(len(content) - 200, len(content)), 1, 2, 3, 4}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        assert damage(path), length


def test_a_hole_of_zeros_is_noticed(sound, tmp_path):
    """What a power cut leaves where a file system had the length already, and not the data."""
    content = sound[1]
    path = tmp_path / "step_00000001.pt"
    for start in range(0, len(content) - 512, 512):
        if any(content[start : start + 512]):
            path.write_bytes(content[:start] + bytes(512) + content[start + 512 :])
            assert damage(path), start


def tensor_bytes(content: bytes) -> range:
    """Where the large tensor lies in the file."""
    data = payload(1)["model"]["w"].numpy().tobytes()
    start = content.index(data)
    return range(start, start + len(data))


def flipped(content: bytes, position: int, mask: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= mask
    return bytes(changed)


def test_a_flipped_bit_in_a_tensor_is_noticed(sound, tmp_path):
    content = sound[1]
    inside = tensor_bytes(content)
    assert len(inside) == 8000
    path = tmp_path / "step_00000001.pt"
    draw = random.Random(0)
    for position in [inside[0], inside[-1], *draw.sample(inside, 100)]:
        path.write_bytes(flipped(content, position, 1 << draw.randrange(8)))
        assert "damaged" in damage(path), position
        with pytest.raises(ConfigError, match="damaged"):
            load(path)


def test_a_flipped_bit_is_noticed_or_harmless(sound, tmp_path):
    """Anywhere before the archive's directory: the records, their names, the padding between them."""
    content = sound[1]
    with zipfile.ZipFile(sound[0]) as archive:
        directory = archive.start_dir
    path = tmp_path / "step_00000001.pt"
    draw = random.Random(1)
    noticed = 0
    outside = [i for i in range(directory) if i not in tensor_bytes(content)]
    for position in draw.sample(outside, 300):
        path.write_bytes(flipped(content, position, 1 << draw.randrange(8)))
        try:
            assert same(load(path), payload(1)), position
        except ConfigError:
            noticed += 1
    assert 50 < noticed < 300  # pickled values and names are noticed, padding is not


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip", b"PK\x05\x06" + bytes(18), bytes(5000)])
def test_what_is_no_archive_is_damaged_or_refused(tmp_path, content):
    path = tmp_path / "step_00000001.pt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"step_00000001\.pt"):
        load(path)


def test_missing_files_and_folders_are_damaged(tmp_path):
    assert damage(tmp_path / "nothing.pt")
    assert damage(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def test_newest_valid_passes_over_damage_with_a_warning_each(tmp_path, caplog):
    save_all(tmp_path, [1, 2, 3, 4], keep_last=10)
    path_of(tmp_path, 4).write_bytes(path_of(tmp_path, 4).read_bytes()[:-1])
    path_of(tmp_path, 3).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="fusedmlp"):
        assert newest_valid(tmp_path) == path_of(tmp_path, 2)
    first, second = (r.getMessage() for r in caplog.records)
    assert "step_00000004.pt" in first
    assert "step_00000003.pt" in second
    assert "passed over" in first


def test_newest_valid_of_nothing(tmp_path):
    assert newest_valid(tmp_path) is None
    assert newest_valid(tmp_path / "nowhere") is None
    path_of(tmp_path, 1).write_bytes(b"x")
    assert newest_valid(tmp_path) is None


@pytest.mark.parametrize("best", [True, False])
def test_find_takes_a_file_a_run_or_its_checkpoints(tmp_path, best):
    directory = directory_of(tmp_path)
    save_all(directory, [1, 2, 3], keep_last=10, best=[1])
    expected = path_of(directory, 1 if best else 3)
    assert find(tmp_path, best=best) == expected
    assert find(directory, best=best) == expected
    for step in (1, 2, 3):
        assert find(path_of(directory, step), best=best) == path_of(directory, step)


@pytest.mark.parametrize("best", [True, False])
def test_find_says_where_nothing_is(tmp_path, best):
    (tmp_path / "checkpoints").mkdir()
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no checkpoint there") as refusal:
            find(path, best=best)
        assert str(path) in str(refusal.value)


# ---------------------------------------------------------------------------------------------------------------------
# Loading what others wrote


class Payload:
    """Touches a file when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("in_archive", [True, False])
def test_code_in_a_checkpoint_is_not_executed(tmp_path, in_archive):
    marker, path = tmp_path / "executed", tmp_path / "step_00000001.pt"
    content = {"format": checkpoint.FORMAT, "step": 1, "model": Payload(marker)}
    if in_archive:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match=r"step_00000001\.pt"):
        load(path)
    assert not marker.exists()
    torch.load(path, weights_only=False) if in_archive else pickle.loads(path.read_bytes())
    assert marker.exists()  # it would have done something


@pytest.mark.parametrize(
    "content",
    [
        {"model": {}},
        {"format": checkpoint.FORMAT + 1, "model": {}},
        {"format": None},
        {"format": str(checkpoint.FORMAT)},
        [1, 2],
        torch.zeros(3),
        None,
    ],
    ids=str,
)
def test_torch_files_that_are_no_checkpoints_of_this_project(tmp_path, content):
    path = tmp_path / "foreign.pt"
    torch.save(content, path)
    with pytest.raises(ConfigError, match=f"not a checkpoint of format {checkpoint.FORMAT}"):
        load(path)


def test_a_file_of_old_torch_and_a_foreign_archive(tmp_path):
    old, foreign = tmp_path / "old.pt", tmp_path / "foreign.zip"
    torch.save({"format": checkpoint.FORMAT}, old, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("readme.txt", "no tensors here")
    for path in (old, foreign):
        with pytest.raises(ConfigError, match=path.name):
            load(path)


def test_tensors_arrive_on_the_cpu_and_own_their_memory(tmp_path):
    path = save(tmp_path, 1, payload(1), 2)
    tensors = load(path)["model"].values()
    assert all(t.device.type == "cpu" for t in tensors)
    path.write_bytes(b"")  # the loaded values do not depend on the file
    for actual, expected in itertools.zip_longest(tensors, payload(1)["model"].values()):
        assert torch.equal(actual, expected)
