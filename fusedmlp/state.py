"""Everything that one training run holds: built from a config, saved to and restored from checkpoints."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedmlp import checkpoint, gemms, recipes
from fusedmlp.config import Config
from fusedmlp.data import TokenData, load_data
from fusedmlp.device import autocast, require_one_process, resolve_device, resolve_precision, set_fp32_math
from fusedmlp.model import GPT, options_of
from fusedmlp.optim import make_optimizer
from fusedmlp.schema import ConfigError, to_dict

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class State:
    """A run in progress."""

    config: Config
    run_dir: Path
    device: torch.device
    dtype: torch.dtype
    engine: str
    """Who computes the MLPs: ``nvmath``, ``reference``, or ``torch`` for the torch arm."""
    data: TokenData
    model: GPT
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    step: int = 0
    """Optimizer steps done."""
    best_val_loss: float | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes."""
        t = self.config.trainer
        return t.batch_size * t.grad_accum * self.config.model.block_size

    def autocast(self) -> Any:
        """The context that forward passes run in."""
        return autocast(self.device, self.dtype)

    def batch(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch, block) of a micro-step of optimizer step ``step`` (from 1), on the device."""
        t = self.config.trainer
        batch = self.data.batch("train", step - 1, micro, batch_size=t.batch_size, grad_accum=t.grad_accum)
        return self._to_device(*batch)

    def val_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch, block) of the ``index``-th validation batch, on the device."""
        return self._to_device(*self.data.val_batch(index, self.config.trainer.batch_size))

    def _to_device(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.device.type == "cpu":
            return x, y
        return x.pin_memory().to(self.device, non_blocking=True), y.pin_memory().to(self.device, non_blocking=True)

    def save(self, best: bool) -> Path:
        """Write a checkpoint of this step; ``best`` says that its validation loss is the lowest so far."""
        payload = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "best_val_loss": self.best_val_loss,
            "config": to_dict(self.config),
            "tokenizer": self.data.tokenizer.to_dict(),
            "data_sha256": self.data.summary["sha256"],
            "device": self.device.type,
            "dtype": str(self.dtype),
        }
        directory = checkpoint.directory_of(self.run_dir)
        keep_last = self.config.trainer.keep_last
        return checkpoint.save(directory, self.step, payload, keep_last, self.best_val_loss if best else None)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimizer, scaler and step. Batches and dropout follow from the step.

        Raises:
            ConfigError: the checkpoint is damaged or of another model or tokenizer. What else differs is a warning.
        """
        saved = checkpoint.load(path)
        now, then = to_dict(self.config), saved["config"]
        differing = [
            f"model.{k}: {then['model'].get(k)} in the checkpoint, {v} now"
            for k, v in now["model"].items()
            if k != "dropout" and then["model"].get(k) != v
        ]
        if saved["tokenizer"] != self.data.tokenizer.to_dict():
            differing.append("the tokenizer differs (data, data.tokenizer or data.vocab_size changed)")
        if differing:
            raise ConfigError([f"cannot resume from {path}: {d}" for d in differing])
        for what, a, b in (
            ("data", saved["data_sha256"], self.data.summary["sha256"]),
            ("device", saved["device"], self.device.type),
            ("precision", saved["dtype"], str(self.dtype)),
            ("seed", then["seed"], now["seed"]),
            ("trainer.batch_size", then["trainer"]["batch_size"], now["trainer"]["batch_size"]),
            ("trainer.grad_accum", then["trainer"]["grad_accum"], now["trainer"]["grad_accum"]),
            ("trainer.max_steps", then["trainer"]["max_steps"], now["trainer"]["max_steps"]),
            ("optim", then["optim"], now["optim"]),
        ):
            if a != b:
                log.warning("resuming with another %s (%s, was %s): not the run that would have been", what, b, a)
        self.model.load_state_dict(saved["model"])
        # The moments come from the checkpoint, what the config says of the optimizer from the config.
        configured = [{k: g[k] for k in ("weight_decay", "betas")} for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(settings)
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])
        self.step, self.best_val_loss = saved["step"], saved["best_val_loss"]


def build(config: Config) -> State:
    """Resolve device and precision, prepare the data, and make the model of this config.

    Raises:
        ConfigError: the config does not fit this machine or its data.
    """
    require_one_process(config.parallel)
    device = resolve_device(config.device)
    dtype = resolve_precision(config.trainer.precision, device)
    set_fp32_math(config.mlp, dtype)
    engine = _engine(config, device)
    gemms.use_store(config.mlp.plan_store)
    data = load_data(config.data, config.model.block_size, config.seed)
    torch.manual_seed(config.seed)  # weights are drawn on the CPU, so they are the same whatever the device
    model = GPT(config.model, data.vocab_size, config.mlp).to(device)
    return State(
        config=config,
        run_dir=Path(config.run_dir or "."),
        device=device,
        dtype=dtype,
        engine=engine,
        data=data,
        model=model,
        optimizer=make_optimizer(model, config.optim),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype is torch.float16),
    )


def _engine(config: Config, device: torch.device) -> str:
    if config.mlp.backend == "torch":
        return "torch"
    engine, reason = recipes.engine_for(device, options_of(config.mlp))
    if reason is not None and config.mlp.on_unsupported == "error":
        raise ConfigError(f"mlp.engine={config.mlp.engine}: {reason}")
    if engine == "reference":
        log.info("MLP engine: reference, the same mathematics in torch operations (%s)", reason or f"on {device}")
    return engine
