"""AdamW with weight decay where it belongs, and the learning rate over time."""

import math

import torch
from torch import nn

from fusedmlp.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in torch's fused form; decay on matrices and embeddings, none on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2), fused=True
    )


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of step ``step`` (from 1): linear up to ``lr``, then a cosine down to ``min_lr`` at the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
