"""Training end to end on the CPU: exact, resumable, honest about what it measures."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, SMALL
from mlp_cases import weights_hash

from fusedmlp import checkpoint, recipes, trainer
from fusedmlp.config import Config
from fusedmlp.launch import RunFailed
from fusedmlp.schema import ConfigError, from_dict, to_dict
from fusedmlp.state import build
from fusedmlp.tracking import read_metrics
from fusedmlp.trainer import parity_probe, train, train_step
from fusedmlp.wandb_run import read_offline_run

DROPOUT_AND_ACCUMULATION = ("model.dropout=0.1", "trainer.grad_accum=2", "trainer.batch_size=2")


def rows_of(config: Config) -> list[dict]:
    return read_metrics(Path(config.run_dir) / "metrics.jsonl")


def weights_of(config: Config, step: int = 20) -> dict:
    return checkpoint.load(checkpoint.path_of(Path(config.run_dir) / "checkpoints", step))["model"]


def same_weights(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def curve(config: Config) -> list[tuple]:
    return [(r["step"], r["train/loss"], r["train/lr"], r["train/grad_norm"]) for r in rows_of(config)]


def test_a_run_leaves_what_is_promised(small, capsys):
    config = small("tracking=offline", "trainer.keep_last=1")
    summary = train(config)
    run_dir = Path(config.run_dir)
    assert from_dict(yaml.safe_load((run_dir / "config.yaml").read_text()), Config) == config
    rows = rows_of(config)
    assert [r["step"] for r in rows] == list(range(1, 21))
    last = rows[-1]
    for key in (
        "tokens train/loss train/lr train/grad_norm val/loss perf/tokens_per_s perf/step_ms perf/mfu_pct "
        "perf/peak_mem_gib parity/loss_abs_diff parity/grad_rel_err fused/plans fused/plan_hits fused/plan_misses "
        "fused/plan_ms fused/tune_ms fused/fallbacks fused/workspace_mib"
    ).split():
        assert key in last, key
    assert last["tokens"] == 20 * 4 * 32
    assert last["perf/mfu_pct"] is None  # a CPU has no entry in the table of peaks, and a guess is no measurement
    assert last["perf/tokens_per_s"] * last["perf/step_ms"] == pytest.approx(4 * 32 * 1e3)
    on_disk = json.loads((run_dir / "summary.json").read_text())
    for key in ("engine", "recipes", "fallback_reasons", "data", "environment", "exit", "best_val_loss"):
        assert key in on_disk, key
    assert on_disk["exit"] == summary["exit"] == "finished"
    assert on_disk["engine"] == "reference"
    assert len(on_disk["data"]["sha256"]) == 64
    assert checkpoint.steps_in(run_dir / "checkpoints") == [20]
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    for word in ("20 steps", "train loss", "val loss", "tokens/s", "parity", "engine reference", str(run_dir)):
        assert word in printed
    tracked = read_offline_run(run_dir / "wandb")
    assert tracked["config"]["model"]["d_model"] == 32
    assert [r["step"] for r in tracked["history"]] == list(range(1, 21))
    assert tracked["history"][9]["val/loss"] == rows[9]["val/loss"]
    assert tracked["history"][9]["train/loss"] == rows[9]["train/loss"]
    assert tracked["summary"]["exit"] == "finished"
    assert tracked["exit"] == 0


def test_straight_and_resumed_runs_are_bitwise_equal(small):
    straight = small(*DROPOUT_AND_ACCUMULATION, run="straight")
    train(straight)
    full = small(*DROPOUT_AND_ACCUMULATION, run="resumed")
    # The same 20-step schedule, stopped after 10.
    half = small(*DROPOUT_AND_ACCUMULATION, run="resumed")
    stop_after(10, half)
    assert [r["step"] for r in rows_of(half)] == list(range(1, 11))
    full.resume = "auto"
    train(full)
    assert curve(full) == curve(straight)
    assert same_weights(weights_of(full), weights_of(straight))
    saved = [checkpoint.load(checkpoint.path_of(Path(c.run_dir) / "checkpoints", 20)) for c in (full, straight)]
    assert str(saved[0]["optimizer"]) == str(saved[1]["optimizer"])


def stop_after(step: int, config: Config) -> None:
    """Train, and have SIGTERM arrive during ``step``."""
    real = trainer.train_step

    def interrupting(state, now):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state, now)

    trainer.train_step = interrupting
    try:
        with pytest.raises(SystemExit) as leaving:
            train(config)
    finally:
        trainer.train_step = real
    assert leaving.value.code == 143


def test_looking_does_not_change_training(small):
    plain = small("trainer.eval_every=0", "trainer.parity_every=0", "model.dropout=0.1", run="plain")
    watched = small(
        "trainer.eval_every=2", "trainer.parity_every=1", "trainer.sample_every=3", "model.dropout=0.1", run="watched"
    )
    train(plain)
    train(watched)
    assert curve(plain) == curve(watched)
    assert same_weights(weights_of(plain), weights_of(watched))


def test_accumulation_does_not_change_the_step(small):
    states = [build(small(f"trainer.batch_size={b}", f"trainer.grad_accum={a}")) for b, a in ((8, 1), (2, 4))]
    for step in range(1, 4):
        (loss_a, norm_a), (loss_b, norm_b) = (train_step(s, step) for s in states)
        # fp32: the mean over 256 tokens is added in another order
        torch.testing.assert_close(loss_a, loss_b, rtol=1e-5, atol=0)
        torch.testing.assert_close(norm_a, norm_b, rtol=1e-4, atol=0)


def test_both_arms_start_alike_and_see_the_same_batches(small):
    fused, plain = (build(small(f"mlp={arm}")) for arm in ("fused", "torch"))
    assert weights_hash(fused.model) == weights_hash(plain.model)
    for step in (1, 2, 3):
        for a, b in zip(fused.batch(step, 0), plain.batch(step, 0), strict=True):
            assert torch.equal(a, b)


def test_torch_arm_reports_no_parity_and_no_plans(small):
    config = small("mlp=torch")
    summary = train(config)
    assert summary["engine"] == "torch"
    assert not [k for r in rows_of(config) for k in r if k.startswith(("parity/", "fused/"))]


def test_parity_probe_sees_a_wrong_gradient(small, monkeypatch):
    state = build(small())
    train_step(state, 1)
    assert parity_probe(state, 1)["parity/grad_rel_err"] < 1e-6
    right = recipes.backward

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        return grads._replace(b1=grads.b1 * 1.01)

    monkeypatch.setattr(recipes, "backward", wrong)
    assert parity_probe(state, 1)["parity/grad_rel_err"] > 1e-5


def test_divergence_ends_the_run_and_keeps_the_last_good_checkpoint(small):
    train(small("trainer.max_steps=10"))
    config = small("optim.lr=1e20", "optim.min_lr=1e20", "optim.grad_clip=0")
    config.resume = "auto"
    before = weights_of(config, 10)
    with pytest.raises(RunFailed, match=r"the loss is (nan|inf)"):
        train(config)
    summary = json.loads((Path(config.run_dir) / "summary.json").read_text())
    assert summary["exit"] == "diverged"
    assert checkpoint.steps_in(Path(config.run_dir) / "checkpoints") == [10]
    assert same_weights(weights_of(config, 10), before)


def test_a_crash_is_recorded_as_failed(small, monkeypatch):
    config = small("tracking=offline")
    monkeypatch.setattr(trainer, "evaluate", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config)
    summary = json.loads((Path(config.run_dir) / "summary.json").read_text())
    assert summary["exit"] == "failed"
    assert "ZeroDivisionError" in summary["error"]
    assert read_offline_run(Path(config.run_dir) / "wandb")["exit"] == 1


def test_a_used_run_directory_is_refused(small):
    train(small("trainer.max_steps=5"))
    with pytest.raises(ConfigError, match="resume=auto"):
        train(small())


def test_resume_auto_starts_where_there_is_nothing_and_passes_over_damage(small, caplog):
    config = small("resume=auto")
    train(config)
    directory = Path(config.run_dir) / "checkpoints"
    newest = checkpoint.path_of(directory, 20)
    newest.write_bytes(newest.read_bytes()[:-100])
    config.trainer.max_steps = 25
    train(config)
    assert "step_00000020.pt: it is not a whole checkpoint" in caplog.text
    assert [r["step"] for r in rows_of(config)] == list(range(1, 26))


def test_resume_refuses_another_model_and_another_tokenizer(small):
    train(small())
    for change, message in (("model.d_model=64", "model.d_model: 32"), ("data.tokenizer=bpe", "tokenizer differs")):
        config = small(change)
        config.resume = "auto"
        with pytest.raises(ConfigError, match=message):
            train(config)


def test_a_crash_before_the_first_checkpoint_starts_over_without_doubled_rows(small, monkeypatch):
    config = small("trainer.save_every=0", "trainer.eval_every=0")
    real = trainer.train_step

    def crashing(state, step):
        if step == 5:
            raise KeyError("crash")
        return real(state, step)

    monkeypatch.setattr(trainer, "train_step", crashing)
    with pytest.raises(KeyError):
        train(config)
    monkeypatch.setattr(trainer, "train_step", real)
    assert [r["step"] for r in rows_of(config)] == [1, 2, 3, 4]
    config.resume = "auto"
    train(config)
    assert [r["step"] for r in rows_of(config)] == list(range(1, 21))


def test_going_on_from_an_older_checkpoint_leaves_the_other_way_behind(small, caplog):
    first = small("trainer.save_every=5", "trainer.keep_last=9")
    train(first)
    directory = Path(first.run_dir) / "checkpoints"
    again = small("trainer.max_steps=12", "trainer.save_every=1", "trainer.keep_last=2")
    again.resume = str(checkpoint.path_of(directory, 10))
    train(again)
    assert "step_00000020.pt is removed" in caplog.text
    assert checkpoint.steps_in(directory)[-2:] == [11, 12]
    assert [r["step"] for r in rows_of(again)] == list(range(1, 13))


def test_resuming_a_finished_run_leaves_its_files_alone(small):
    config = small()
    train(config)
    before = {p: p.read_bytes() for p in Path(config.run_dir).glob("*.*") if p.is_file()}
    config.resume = "auto"
    assert train(config)["exit"] == "finished"
    assert {p: p.read_bytes() for p in Path(config.run_dir).glob("*.*") if p.is_file()} == before
    shorter = small("trainer.max_steps=10")
    shorter.resume = "auto"
    with pytest.raises(ConfigError, match="has done 20 steps"):
        train(shorter)


def test_another_runs_checkpoint_does_not_continue_this_run(small):
    first, second = small(run="first"), small(run="second")
    train(first)
    train(second)
    second.resume = first.run_dir
    with pytest.raises(ConfigError, match="holds a run already"):
        train(second)


def test_optimizer_settings_come_from_the_config(small, caplog):
    train(small("trainer.max_steps=10"))
    config = small("optim.weight_decay=5", "optim.beta1=0.5")
    config.resume = "auto"
    train(config)
    assert "resuming with another optim" in caplog.text
    saved = checkpoint.load(checkpoint.path_of(Path(config.run_dir) / "checkpoints", 20))["optimizer"]
    assert saved["param_groups"][0]["weight_decay"] == 5
    assert saved["param_groups"][0]["betas"][0] == 0.5


def test_resume_from_a_path_continues_in_a_new_directory(small):
    first = small(run="first")
    train(first)
    second = small("trainer.max_steps=22", run="second")
    second.resume = first.run_dir
    train(second)
    assert [r["step"] for r in rows_of(second)] == [21, 22]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(small, precision):
    config = small(f"trainer.precision={precision}", "trainer.grad_accum=2")
    summary = train(config)
    assert summary["exit"] == "finished"
    assert summary["parity/largest_loss_abs_diff"] < 0.02
    assert (checkpoint.load(checkpoint.path_of(Path(config.run_dir) / "checkpoints", 20))["scaler"] != {}) == (
        precision == "fp16"
    )


def test_fp16_resumes_with_its_scaler(small):
    options = ("trainer.precision=fp16", *DROPOUT_AND_ACCUMULATION)
    straight = small(*options, run="straight")
    train(straight)
    resumed = small(*options, run="resumed")
    stop_after(10, small(*options, run="resumed"))
    resumed.resume = "auto"
    train(resumed)
    assert curve(resumed) == curve(straight)


def test_compiled_run_has_the_checkpoint_of_a_plain_one(small):
    torch._dynamo.reset()
    compiled = small("trainer.compile=default", "trainer.max_steps=3", "optim.warmup_steps=1", run="compiled")
    train(compiled)
    plain = small("trainer.max_steps=3", "optim.warmup_steps=1", run="plain")
    train(plain)
    a, b = weights_of(compiled, 3), weights_of(plain, 3)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)  # Adam's first steps amplify rounding
    plain.resume, plain.trainer.max_steps = compiled.run_dir, 5
    plain.run_dir += "_continued"
    assert train(plain)["step"] == 5


def test_dry_run_writes_nothing(small, capsys):
    config = small("dry_run=true")
    assert train(config)["exit"] == "dry_run"
    assert "d_model: 32" in capsys.readouterr().out
    assert not Path(config.run_dir).exists()


def test_training_learns(small):
    config = small("trainer.max_steps=60", "trainer.batch_size=8")
    train(config)
    losses = [r["train/loss"] for r in rows_of(config)]
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)  # the padded vocabulary at the start
    assert losses[-1] < losses[0] - 1.5


def command(tmp_path: Path, corpus: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *SMALL,
        f"data.files=[{corpus}]",
        f"run_dir={tmp_path / 'run'}",
        *overrides,
    ]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_leave_with_the_documented_status(tmp_path, corpus, number, status):
    environment = os.environ | {"FUSEDMLP_CACHE": str(tmp_path / "cache")}
    run = command(tmp_path, corpus, "trainer.max_steps=100000", "tracking=offline")
    process = subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and len(read_metrics(metrics)) >= 5):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "interrupted"
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints")[-1] == summary["step"]
    assert out.strip().splitlines()[-1].startswith("interrupted:")
    steps = summary["step"] + 3
    again = command(tmp_path, corpus, f"trainer.max_steps={steps}", "tracking=offline", "resume=auto")
    subprocess.run(again, env=environment, check=True, capture_output=True, timeout=120)
    assert [r["step"] for r in read_metrics(metrics)] == list(range(1, steps + 1))
    history = read_offline_run(tmp_path / "run" / "wandb")["history"]
    assert [r["step"] for r in history] == list(range(1, steps + 1))


def test_a_signal_late_in_a_step_still_leaves_a_checkpoint_of_the_last_step(small, monkeypatch):
    config = small()
    real = trainer.evaluate

    def interrupted(state):
        if state.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state)

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    monkeypatch.setattr(trainer, "_due", lambda step, every: step == 10 and every == 10)
    with pytest.raises(SystemExit):
        train(config)
    summary = json.loads((Path(config.run_dir) / "summary.json").read_text())
    assert summary["exit"] == "interrupted"
    assert checkpoint.steps_in(Path(config.run_dir) / "checkpoints")[-1] == summary["step"]


def test_checkpoint_opens_in_a_bare_interpreter(small, tmp_path):
    config = small("trainer.max_steps=5")
    train(config)
    path = checkpoint.path_of(Path(config.run_dir) / "checkpoints", 5)
    code = (
        "import sys, torch; d = torch.load(sys.argv[1], weights_only=True); "
        "assert not any(m.startswith('fusedmlp') for m in sys.modules); "
        "print(d['step'], d['config']['model']['d_model'])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(path)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["5", "32"]


def test_config_in_a_checkpoint_is_plain_and_complete(small):
    config = small("trainer.max_steps=5")
    train(config)
    saved = checkpoint.load(checkpoint.path_of(Path(config.run_dir) / "checkpoints", 5))
    assert saved["config"] == to_dict(config)
