"""The training loop: step, log, evaluate, compare with torch, sample, save; and what a run leaves behind.

The randomness of a step (its batch, its dropout) is a function of the seed and the step alone. So evaluation, samples
and parity probes cannot disturb training, and a resumed run needs no saved generator state.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fusedmlp import checkpoint, metrics, plans, recipes
from fusedmlp.config import Config
from fusedmlp.environment import describe
from fusedmlp.launch import RunFailed
from fusedmlp.mlp import FusedMLP, torch_mlps
from fusedmlp.optim import learning_rate
from fusedmlp.sampling import extend
from fusedmlp.schema import ConfigError, to_dict
from fusedmlp.signals import GracefulStop
from fusedmlp.state import State, build
from fusedmlp.tracking import Tracker, check

log = logging.getLogger(__name__)

WARMUP_STEPS = 3  # of this process; compilation, autotuning and CUDA graph capture happen in them: reported apart
SAMPLES, SAMPLE_TOKENS = 3, 160


class Diverged(RunFailed):
    """The loss is not a finite number."""


def train_step(state: State, step: int) -> tuple[Tensor, Tensor]:
    """One optimizer step (counted from 1): mean loss over its micro-steps and gradient norm before clipping."""
    c = state.config
    torch.manual_seed(_step_seed(c.seed, step))
    total = torch.zeros((), device=state.device)
    for micro in range(c.trainer.grad_accum):
        inputs, targets = state.batch(step, micro)
        with state.autocast():
            loss = state.model(inputs, targets) / c.trainer.grad_accum
        state.scaler.scale(loss).backward()
        total += loss.detach()
    state.scaler.unscale_(state.optimizer)  # before clipping: the threshold is meant for true gradients
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), c.optim.grad_clip or float("inf"))
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(step, c.optim, c.trainer.max_steps)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.step = step
    return total, norm


def _step_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % 2**63


@torch.no_grad()
def evaluate(state: State) -> float:
    """Mean cross-entropy in nats per token over the first ``trainer.eval_steps`` validation batches."""
    state.model.eval()
    total = torch.zeros((), device=state.device)
    for index in range(state.config.trainer.eval_steps):
        inputs, targets = state.val_batch(index)
        with state.autocast():
            total += state.model(inputs, targets)
    state.model.train()
    return total.item() / state.config.trainer.eval_steps


def parity_probe(state: State, step: int) -> dict[str, float]:
    """The fused MLP against the torch MLP on the same weights and the first micro-batch of ``step``.

    Both run without torch.compile. ``parity/grad_rel_err`` is the norm of the difference of all MLP gradients over the
    norm of torch's. Gradients of the training run are left untouched.
    """
    inputs, targets = state.batch(step, 0)
    parameters = [p for m in state.model.modules() if isinstance(m, FusedMLP) for p in m.parameters()]

    def loss_and_gradients() -> tuple[Tensor, Tensor]:
        torch.manual_seed(_step_seed(state.config.seed, step))  # the same dropout for both
        with state.autocast():
            loss = state.model.forward(inputs, targets)
        gradients = torch.autograd.grad(state.scaler.scale(loss), parameters)
        return loss.detach().double(), torch.cat([g.flatten() for g in gradients]).double()

    fused_loss, fused = loss_and_gradients()
    with torch_mlps(state.model):
        torch_loss, expected = loss_and_gradients()
    return {
        "parity/loss_abs_diff": (fused_loss - torch_loss).abs().item(),
        "parity/grad_rel_err": ((fused - expected).norm() / expected.norm()).item(),
    }


def samples(state: State) -> list[str]:
    """A few texts that the model writes from the start of a document."""
    eod = state.data.tokenizer.eod
    start = torch.tensor([[eod]], device=state.device)
    texts = []
    for seed in range(SAMPLES):
        with state.autocast():
            tokens = extend(state.model, start, SAMPLE_TOKENS, seed=seed, stop=eod)
        texts.append(state.data.tokenizer.decode(tokens[0, 1:].tolist()))
    return texts


def train(config: Config) -> dict[str, Any]:
    """Train as ``config`` says and return what summary.json holds.

    Raises:
        ConfigError: the config does not fit this machine, its data, or the run directory.
        RunFailed: the loss diverged; the last good checkpoint is untouched.
        SystemExit: after SIGINT or SIGTERM, with a checkpoint written.
    """
    run_dir = Path(config.run_dir or "runs/unnamed").absolute()
    config.run_dir = str(run_dir)
    start = _start_of(config, run_dir)
    check(config.tracking)
    began = time.perf_counter()
    state = build(config)
    _announce(state)
    if config.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), end="")
        return {"best_val_loss": None, "exit": "dry_run"}
    if start is not None:
        state.restore(start)
        if state.step > config.trainer.max_steps:
            raise ConfigError(f"trainer.max_steps={config.trainer.max_steps}, but {start} has done {state.step} steps")
        if state.step == config.trainer.max_steps and (run_dir / "summary.json").exists():
            log.info("nothing left to do: %s has done all %d steps", start, state.step)
            return json.loads((run_dir / "summary.json").read_text())
        log.info("resuming from %s at step %d", start, state.step)
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(to_dict(config)), run_dir / "config.yaml")
    if config.trainer.compile != "off":
        mode = None if config.trainer.compile == "default" else config.trainer.compile
        state.model.compile(mode=mode)  # in place: parameter names stay, and model.forward is still the plain one
    continuing = start is not None or (run_dir / "metrics.jsonl").exists()  # at step 0 after a crash before any save
    if continuing:
        checkpoint.drop_after(checkpoint.directory_of(run_dir), state.step)
    tracker = Tracker(run_dir, config.tracking, to_dict(config), resume_step=state.step if continuing else None)
    loop = Loop(state, tracker)
    ending, error = "failed", None
    try:
        with GracefulStop() as stop, logging_redirect_tqdm():
            loop.run(stop)
        ending = "interrupted" if stop.received else "finished"
    except Diverged:
        ending = "diverged"
        raise
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        summary = loop.summary(ending) | {"wall_s": time.perf_counter() - began}
        if error:
            summary["error"] = error
        tracker.finish(summary, ending)
        print(_last_line(state, summary))
    if stop.received:
        sys.exit(stop.exit_status)
    return summary


def _start_of(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint to start from, or None; refuse to mix a new run into an old one's directory."""
    if config.resume == "auto":
        return checkpoint.newest_valid(checkpoint.directory_of(run_dir))
    used = (run_dir / "metrics.jsonl").exists()
    if config.resume is not None:
        found = checkpoint.find(Path(config.resume).expanduser(), best=False)
        if not used or found.resolve().is_relative_to(run_dir.resolve()):
            return found
    if used:
        raise ConfigError(f"run_dir={run_dir} holds a run already: continue it with resume=auto, or name another")
    return None


class Loop:
    """Runs the steps, and does beside them what their numbers ask for."""

    def __init__(self, state: State, tracker: Tracker) -> None:
        self.state, self.tracker = state, tracker
        self.first_step = state.step + 1
        self.clock = metrics.TrainingClock()
        self.flops_per_token = metrics.flops_per_token(state.config.model, state.data.vocab_size)
        self.peak_flops = metrics.peak_flops(state.device, state.dtype)
        self.steps_since_lap = 0
        self.measured_steps, self.measured_s, self.warmup_s = 0, 0.0, 0.0
        self.seconds = dict.fromkeys(("eval", "parity", "sample", "save"), 0.0)
        self.last: dict[str, float | None] = {}
        self.largest_parity: float | None = None
        if state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(state.device)

    def run(self, stop: GracefulStop) -> None:
        """All steps that are left, or until ``stop`` has received a signal."""
        t = self.state.config.trainer
        steps = range(self.first_step, t.max_steps + 1)
        bar = tqdm(steps, initial=self.state.step, total=t.max_steps, unit="step", disable=None, dynamic_ncols=True)
        for step in bar:
            loss, norm = train_step(self.state, step)
            self.steps_since_lap += 1
            if step - self.first_step < WARMUP_STEPS:
                self._end_of_warmup_step()
            stopping = stop.received  # read once: what comes later in this step waits for the next
            last = step == t.max_steps or stopping is not None
            row: dict[str, float | int | None] = {}
            if last or step == 1 or step % t.log_every == 0:
                row |= self._training_row(step, loss, norm)
            improved = False
            if _due(step, t.eval_every) or (last and t.eval_every and not stopping):
                self._require_finite(loss, step)
                row["val/loss"] = val_loss = self._beside("eval", lambda: evaluate(self.state))
                improved = self.state.best_val_loss is None or val_loss < self.state.best_val_loss
                if improved:
                    self.state.best_val_loss = val_loss
            if self.state.engine != "torch" and _due(step, t.parity_every):
                row |= self._beside("parity", lambda step=step: parity_probe(self.state, step))
                difference = row["parity/loss_abs_diff"]
                self.largest_parity = max(self.largest_parity or 0.0, difference or 0.0)
            if _due(step, t.sample_every) or (last and not stopping):
                self._beside("sample", self._print_samples)
            if row:
                self._log(step, row, bar)
            if _due(step, t.save_every) or last or improved:
                self._require_finite(loss, step)
                self._beside("save", lambda improved=improved: self.state.save(best=improved))
            if stopping:
                log.warning("%s: saved step %d and leaving", stopping.name, step)
                break
        bar.close()

    def _end_of_warmup_step(self) -> None:
        self._synchronise()
        self.warmup_s += self.clock.lap()
        self.steps_since_lap = 0

    def _training_row(self, step: int, loss: Tensor, norm: Tensor) -> dict[str, float | int | None]:
        self._require_finite(loss, step)  # reads the loss, so the GPU has finished the step
        row: dict[str, float | int | None] = {
            "tokens": step * self.state.tokens_per_step,
            "train/loss": loss.item(),
            "train/lr": self.state.optimizer.param_groups[0]["lr"],
            "train/grad_norm": norm.item(),
        }
        if self.steps_since_lap:
            self._synchronise()
            seconds = self.clock.lap()
            self.measured_steps += self.steps_since_lap
            self.measured_s += seconds
            rate = self.steps_since_lap * self.state.tokens_per_step / seconds
            row |= {
                "perf/tokens_per_s": rate,
                "perf/step_ms": seconds / self.steps_since_lap * 1e3,
                "perf/mfu_pct": 100 * rate * self.flops_per_token / self.peak_flops if self.peak_flops else None,
                "perf/peak_mem_gib": metrics.peak_memory_gib(self.state.device),
            }
            self.steps_since_lap = 0
        if self.state.engine != "torch":
            row |= {f"fused/{k}": v for k, v in plans.stats_row().items()}
            row["fused/fallbacks"] = sum(recipes.fallback_reasons().values())
        return row

    def _beside(self, what: str, work: Any) -> Any:
        """Do ``work`` with the training clock stopped, and book its time under ``what``."""
        self._synchronise()
        self.clock.pause()
        began = time.perf_counter()
        result = work()
        self._synchronise()
        self.seconds[what] += time.perf_counter() - began
        self.clock.go_on()
        return result

    def _log(self, step: int, row: dict[str, float | int | None], bar: Any) -> None:
        self.tracker.log(step, row)
        self.last |= row
        shown = {name: self.last.get(key) for key, name in _SHOWN.items()}
        text = {k: f"{v:,.0f}" if v > 100 else f"{v:.4g}" for k, v in shown.items() if v is not None}
        bar.set_postfix(text)
        if bar.disable:  # no terminal: a line for each row instead of a moving bar
            log.info("step %d/%d %s", step, bar.total, " ".join(f"{k}={v}" for k, v in text.items()))

    def _print_samples(self) -> None:
        for text in samples(self.state):
            log.info("--- sample at step %d\n%s", self.state.step, text)
            self.tracker.text(self.state.step, "sample", text)

    def _require_finite(self, loss: Tensor, step: int) -> None:
        if not torch.isfinite(loss):
            kept = checkpoint.steps_in(checkpoint.directory_of(self.state.run_dir))
            where = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was written yet"
            raise Diverged(f"the loss is {loss.item()} at step {step}; {where}; a lower optim.lr may help")

    def _synchronise(self) -> None:
        if self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)

    def summary(self, ending: str) -> dict[str, Any]:
        """What summary.json holds: the last word on this run."""
        state, rate = self.state, None
        if self.measured_s:
            rate = self.measured_steps * state.tokens_per_step / self.measured_s
        nats_per_byte = None
        if state.best_val_loss is not None and state.config.data.source != "synthetic":
            nats_per_byte = state.best_val_loss / state.data.bytes_per_token("val")
        return self.last | {
            "exit": ending,
            "step": state.step,
            "tokens": state.step * state.tokens_per_step,
            "best_val_loss": state.best_val_loss,
            "best_val_nats_per_byte": nats_per_byte,
            "parity/largest_loss_abs_diff": self.largest_parity,
            "perf/mean_tokens_per_s": rate,
            "engine": state.engine,
            "recipes": recipes.report(),
            "fallback_reasons": recipes.fallback_reasons(),
            "parameters": state.model.parameter_count(),
            "data": state.data.summary,
            "environment": describe(state.device, cublaslt_version=plans.cublaslt_version()),
            "seconds": {"training": self.measured_s, "warm_up": self.warmup_s, **self.seconds},
        }


_SHOWN = {
    "train/loss": "loss",
    "val/loss": "val",
    "perf/tokens_per_s": "tokens/s",
    "perf/mfu_pct": "mfu_pct",
    "parity/loss_abs_diff": "parity",
}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _announce(state: State) -> None:
    c, d, t = state.config, state.data.summary, state.device
    name = torch.cuda.get_device_name(t) if t.type == "cuda" else "CPU"
    log.info(
        f"model: {state.model.parameter_count():,} parameters, MLP {c.mlp.backend} ({state.engine}), "
        f"{name}, {str(state.dtype).removeprefix('torch.')}"
    )
    log.info(
        f"data: {c.data.source}, {d['train_tokens']:,} training and {d['val_tokens']:,} validation tokens; "
        f"{state.tokens_per_step:,} tokens a step, {c.trainer.max_steps} steps"
    )


def _last_line(state: State, s: dict[str, Any]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{s['exit']}: {s['step']} steps, train loss {number(s.get('train/loss'), '.4f')}, "
        f"val loss {number(s.get('val/loss'), '.4f')}, {number(s['perf/mean_tokens_per_s'], ',.0f')} tokens/s, "
        f"largest parity difference {number(s['parity/largest_loss_abs_diff'], '.1e')}, engine {s['engine']}, "
        f"run_dir {state.run_dir}"
    )
