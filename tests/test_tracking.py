"""Metrics on disk and in W&B: exact over crashes, and untouched by whatever W&B does."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from fusedmlp import files, tracking, wandb_run
from fusedmlp.config import Config, TrackingConfig
from fusedmlp.schema import ConfigError, to_dict
from fusedmlp.tracking import Tracker, read_metrics
from fusedmlp.wandb_run import read_offline_run

KEY = "0123456789abcdef" * 3  # shaped like an API key
HISTORY = list(range(1, 101))


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path_factory):
    """No credentials, no settings from outside; what wandb itself set (its service's address) stays."""
    for name in [n for n in os.environ if n.startswith("WANDB_") and n != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.delenv("NETRC", raising=False)


def tracker(run_dir, resume_step=None, config=None, **section) -> Tracker:
    return Tracker(run_dir, TrackingConfig(**section), config or {}, resume_step=resume_step)


def steps(run_dir) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]


def wandb_steps(run_dir) -> list[int]:
    return [row["step"] for row in read_offline_run(run_dir / "wandb")["history"]]


def summary_of(run_dir) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def fake_run(**methods):
    """A W&B run whose methods do nothing, except those given."""
    names = ("define_metric", "log", "finish")
    run = {name: methods.get(name, lambda *_, **__: None) for name in names}
    return SimpleNamespace(**run, summary={}, step=0)


def child(code: str, *arguments: object, **env: str) -> subprocess.CompletedProcess:
    """Run ``code`` in an own interpreter, hence with an own wandb service and no terminal."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    root = str(Path(tracking.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": root, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from fusedmlp import tracking, wandb_run
from fusedmlp.config import TrackingConfig
run_dir = Path(sys.argv[1])
tracker = tracking.Tracker(run_dir, TrackingConfig(), {}, resume_step=None)
"""


def test_offline_run_reads_back_with_config_history_summary_and_name(tmp_path):
    config = to_dict(Config()) | {"long": "x" * 100_000}  # spans several blocks of the log
    run = tracker(tmp_path / "run", config=config, tags=["a", "b"])
    run.text(1, "sample", "a < b")
    run.text(1, "sample", "second")
    run.log(1, {"train/loss": 2.5, "val/loss": 2.0, "perf/mfu_pct": None})
    run.log(2, {"train/loss": 1.5})
    run.text(2, "last words", "bye")
    run.finish({"recipes": [{"name": "x", "ms": 0.5}], "best_val_loss": 2.0}, "finished")

    found = read_offline_run(tmp_path / "run" / "wandb")
    assert found["name"] == "run"
    assert {k: found["config"][k] for k in config} == config  # nested, with its lists and nulls
    first, second = found["history"]
    assert (first["step"], first["_step"], first["train/loss"], first["val/loss"]) == (1, 1, 2.5, 2.0)
    assert "perf/mfu_pct" not in first
    page = next((tmp_path / "run" / "wandb").glob(f"offline-run-*/files/{first['sample']['path']}"))
    assert "--- step 1\na &lt; b\n--- step 1\nsecond\n" in page.read_text()
    assert found["summary"]["last words"] == "--- step 2\nbye\n"
    assert (second["step"], second["train/loss"]) == (2, 1.5)
    assert found["summary"]["recipes"] == [{"name": "x", "ms": 0.5}]
    assert found["exit"] == 0

    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0] == {
        "step": 1, "train/loss": 2.5, "val/loss": 2.0, "perf/mfu_pct": None
    }  # fmt: skip
    summary = summary_of(tmp_path / "run")
    assert (summary["exit"], summary["best_val_loss"]) == ("finished", 2.0)
    assert summary["wandb"] == {"mode": "offline", "run_id": found["id"], "rows_dropped": 0, "error": None}


def test_own_reader_agrees_with_wandbs_and_bears_cut_and_damaged_logs(tmp_path):
    run = tracker(tmp_path)
    for step in range(1, 301):
        run.log(step, {"train/loss": 1 / step, "tokens": 2**40 + step})
    run.finish({}, "interrupted")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    ours = read_offline_run(file)
    assert [row["step"] for row in ours["history"]] == list(range(1, 301))

    theirs = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file],
        capture_output=True, text=True, env={**os.environ, "WANDB_MODE": "offline"}, timeout=30,
    )  # fmt: skip
    if "No such command" in theirs.stderr:
        pytest.skip("this wandb has no `leet inspect`")
    records = [json.loads(line) for line in theirs.stdout.splitlines()]
    assert [r["history"]["item"] for r in records if r["type"] == "history"] == ours["history"]

    data = file.read_bytes()
    assert len(data) > 2 * 2**15
    for size in (0, 3, 7, 100, 2**15 - 2, 2**15 + 3, len(data) - 1):
        file.write_bytes(data[:size])
        cut = read_offline_run(file)["history"]
        assert cut == ours["history"][: len(cut)]
        assert size < 2**15 or len(cut) > 50
    file.write_bytes(data[: 2**15 + 500] + b"\xff" + data[2**15 + 501 :])  # costs the rest of the second block
    kept = [row["step"] for row in read_offline_run(file)["history"]]
    assert 100 < len(kept) < 300
    assert kept[-1] == 300


def test_crash_and_resume_lose_and_double_no_step_and_write_no_secret(tmp_path):
    crash = """
for step in range(1, 71):
    tracker.log(step, {"train/loss": 1 / step})
    time.sleep(0.03)  # so that W&B writes some of the rows, and loses some, at its flush once a second
os._exit(1)
"""
    assert child(crash, tmp_path, WANDB_API_KEY=KEY).returncode == 1
    before = wandb_steps(tmp_path)
    assert steps(tmp_path) == list(range(1, 71))
    assert before == list(range(1, len(before) + 1))
    assert read_offline_run(tmp_path / "wandb")["exit"] is None

    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 71, "train/lo')  # torn in mid-write
    run = tracker(tmp_path, resume_step=50)
    for step in range(51, 101):
        run.log(step, {"train/loss": 1 / step})
    run.finish({}, "finished")
    assert steps(tmp_path) == HISTORY
    assert sorted(wandb_steps(tmp_path)) == HISTORY
    assert [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1 / s for s in HISTORY]
    logs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert len({file.name for file in logs}) == 1  # one W&B run, continued
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert len(files) > 6
    assert not [f for f in files if KEY.encode() in f.read_bytes()]


@pytest.mark.parametrize("held", [0, 20, 50, 65])
def test_resumed_run_sends_what_wandb_lacks(tmp_path, monkeypatch, held):
    """Whatever share of the rows reached W&B before the crash, the whole history is there after the resume."""
    for part, last in ((None, 70), (50, 100)):
        run = tracker(tmp_path, wandb="disabled", resume_step=part)
        for step in range((part or 0) + 1, last + 1):
            run.log(step, {"train/loss": 1 / step})
            if part is None and step == 50:
                at_checkpoint = (tmp_path / "metrics.jsonl").read_text()
        run.finish({}, "finished")
    (tmp_path / "metrics.jsonl").write_text(at_checkpoint)
    sent: list[int] = []
    fake = fake_run(log=lambda row, step, commit: sent.append(step))
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    rows = [{"_step": step, "step": step} for step in range(1, held + 1)]
    monkeypatch.setattr(wandb_run, "read_offline_run", lambda _: {"history": rows})
    run = tracker(tmp_path, resume_step=50)
    for step in range(51, 101):
        run.log(step, {"train/loss": 1 / step})
    run.finish({}, "finished")
    assert sent == list(range(held + 1, 101))


def test_resumed_online_run_continues_behind_the_servers_last_step(tmp_path, monkeypatch):
    sent: list[int] = []
    fake = fake_run(log=lambda row, step, commit: sent.append(step))
    fake.step = 4
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {s}}}\n' for s in range(1, 7)))
    run = tracker(tmp_path, resume_step=5, wandb="online")
    run.log(6, {})
    run.finish({}, "finished")
    assert sent == [4, 5, 6]


def test_resume_drops_later_and_torn_rows(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n{"step": 3}\n{"ste')
    run = tracker(tmp_path, resume_step=2, wandb="disabled")
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert "line 2" in caplog.text
    assert "line 5" not in caplog.text
    with pytest.raises(ValueError, match="step 2 logged after step 2"):
        run.log(2, {})
    run.log(3, {"x": 1})
    assert steps(tmp_path) == [1, 2, 3]  # flushed, though the tracker is still open
    run.finish({}, "finished")


def test_non_finite_and_foreign_numbers_are_valid_json(tmp_path):
    import numpy as np

    run = tracker(tmp_path, wandb="disabled")
    run.log(1, {"a": float("nan"), "b": -float("inf"), "c": np.float32(0.5), "d": np.int64(3), "e": None})
    run.finish({"loss": float("inf"), "path": Path("x"), "nested": [{"y": float("nan")}]}, "diverged")

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": None, "b": None, "c": 0.5, "d": 3, "e": None}
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary == {"loss": None, "path": "x", "nested": [{"y": None}], "exit": "diverged"}


def raising(*_, **__):
    raise RuntimeError("no such thing")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_raising_wandb_costs_one_warning(tmp_path, monkeypatch, caplog, broken):
    monkeypatch.setattr(wandb, "init", raising if broken == "init" else lambda **_: fake_run(**{broken: raising}))
    run = tracker(tmp_path)
    for step in HISTORY:
        run.log(step, {"train/loss": 1.0})
    start = time.monotonic()
    run.finish({"a": 1}, "finished")
    assert time.monotonic() - start < 3
    assert steps(tmp_path) == HISTORY
    assert summary_of(tmp_path)["exit"] == "finished"
    assert summary_of(tmp_path)["wandb"]["error"] == "RuntimeError: no such thing"
    assert [r.levelno for r in caplog.records if r.name == "fusedmlp.wandb_run"] == [logging.WARNING]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_hanging_wandb_stalls_neither_training_nor_the_end(tmp_path, monkeypatch, caplog, broken):
    release = threading.Event()

    def hang(*_, **__):
        release.wait(60)
        return fake_run()

    monkeypatch.setattr(wandb, "init", hang if broken == "init" else lambda **_: fake_run(**{broken: hang}))
    monkeypatch.setattr(wandb_run, "_kill_service", lambda: None)  # it is shared with the other tests
    if broken != "finish":  # a healthy queue may fall behind for a moment on a busy machine
        monkeypatch.setattr(wandb_run, "QUEUE_ROWS", 10)
    monkeypatch.setitem(wandb_run.FINISH_TIMEOUT_S, "offline", 0.5)
    run = tracker(tmp_path)
    start = time.monotonic()
    for step in HISTORY:
        run.log(step, {"train/loss": 1.0})
    assert time.monotonic() - start < 2
    run.finish({}, "finished")
    assert time.monotonic() - start < 5
    assert steps(tmp_path) == HISTORY
    state = summary_of(tmp_path)["wandb"]
    assert state["error"] == "no answer within 0.5 s at the end of the run"
    assert (state["rows_dropped"] >= 89) == (broken != "finish")
    drops = [r.getMessage() for r in caplog.records if "it loses rows" in r.getMessage()]
    assert len(drops) == (broken != "finish")
    assert (f"lacks {state['rows_dropped']} rows" in caplog.text) == (broken != "finish")
    release.set()
    run._wandb._thread.join(5)
    assert not run._wandb._thread.is_alive()  # no thread is left behind once wandb answers


def test_a_frozen_wandb_service_does_not_keep_the_process_from_ending(tmp_path):
    freeze = """
from wandb.sdk import wandb_setup
tracker.log(1, {"train/loss": 1.0})
while not list(run_dir.glob("wandb/offline-run-*/*.wandb")):
    time.sleep(0.05)
time.sleep(0.5)
os.kill(wandb_setup.singleton()._connection._proc._process.pid, signal.SIGSTOP)
wandb_run.FINISH_TIMEOUT_S["offline"] = 1.0
tracker.log(2, {"train/loss": 1.0})
tracker.finish({}, "finished")
"""
    result = child(freeze, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "no answer within 1 s" in summary_of(tmp_path)["wandb"]["error"]
    assert steps(tmp_path) == [1, 2]


def test_online_without_credentials_is_refused_at_once_with_a_remedy(tmp_path):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"online.*no W&B API key.*wandb login.*tracking\.wandb=offline") as refused:
        tracker(tmp_path / "run", wandb="online")
    assert time.monotonic() - start < 10
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_online_with_a_malformed_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ConfigError, match="40"):
        tracker(tmp_path, wandb="online")


def test_new_online_run_that_wandb_refuses_ends_but_a_resumed_one_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", raising)
    with pytest.raises(ConfigError, match="no such thing"):
        tracker(tmp_path, wandb="online")
    run = tracker(tmp_path, wandb="online", resume_step=0)
    run.log(1, {})
    run.finish({}, "finished")
    assert steps(tmp_path) == [1]
    assert "W&B is off" in caplog.text


@pytest.mark.parametrize(("asked", "env", "mode"), [
    ("offline", "disabled", "disabled"), ("online", "offline", "offline"), ("online", "dryrun", "offline"),
    ("offline", "online", "offline"), ("disabled", "online", "disabled"), ("offline", "nonsense", "offline"),
])  # fmt: skip
def test_the_environment_can_only_take_away(monkeypatch, asked, env, mode):
    monkeypatch.setenv("WANDB_MODE", env)
    assert wandb_run.effective_mode(TrackingConfig(wandb=asked)) == mode


def test_disabled_leaves_no_wandb(tmp_path):
    code = 'tracker.log(1, {"x": 1.0}); tracker.finish({}, "finished"); print("wandb" in sys.modules)'
    result = child(code, tmp_path, WANDB_MODE="disabled")
    assert result.stdout.strip() == "False", result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_three_runs_have_three_ids_their_own_configs_and_exit_codes(tmp_path):
    exits = {1: "finished", 2: "failed", 3: "diverged"}
    open_runs = {seed: tracker(tmp_path / str(seed), config={"seed": seed, "none": None}) for seed in exits}
    for seed, run in open_runs.items():  # all open at once, as the two arms of a comparison are
        run.log(1, {"seed_was": seed})
    for seed, run in open_runs.items():
        run.finish({}, exits[seed])
        run.finish({}, "finished")  # a second call changes nothing
    found = {seed: read_offline_run(tmp_path / str(seed) / "wandb") for seed in exits}
    assert len({run["id"] for run in found.values()}) == 3
    assert {seed: run["config"]["seed"] for seed, run in found.items()} == {1: 1, 2: 2, 3: 3}
    assert {seed: run["history"][0]["seed_was"] for seed, run in found.items()} == {1: 1, 2: 2, 3: 3}
    assert {seed: run["exit"] for seed, run in found.items()} == {1: 0, 2: 1, 3: 1}
    assert {seed: summary_of(tmp_path / str(seed))["exit"] for seed in exits} == exits


def test_a_wandb_that_cannot_be_imported_costs_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = tracker(tmp_path)
    run.log(1, {"x": 1.0})
    run.finish({}, "finished")
    assert steps(tmp_path) == [1]
    assert "ModuleNotFoundError" in summary_of(tmp_path)["wandb"]["error"]
    assert "W&B is off" in caplog.text


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.write_atomic(path, "old")
    monkeypatch.setattr(files.os, "fsync", raising)
    with pytest.raises(RuntimeError):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
