"""``bench=host``: what one eager call costs the host, where the shapes are too small to hide it."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedmlp import mlp_arms, timing
from fusedmlp.bench_report import Table, interval, us
from fusedmlp.config import BenchConfig
from fusedmlp.device import DTYPES
from fusedmlp.mlp_arms import Problem
from fusedmlp.model import options_of

TOKENS, WIDTH = 8, 64  # the GPU is done before the host has queued the next kernel
ROUNDS = 5  # times config.rounds: host times scatter more than device times

ARMS = ("torch", "fused")

log = logging.getLogger(__name__)


def rows(config: BenchConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure forward without gradients, and forward with backward, for each activation."""
    dtype = config.dtypes[0]
    for which in config.passes:
        for activation in config.activations:
            log.info("host, %s, %s", which, activation)
            problem = Problem(
                tokens=TOKENS,
                width=WIDTH,
                activation=activation,
                dtype=DTYPES[dtype],
                device=device,
                training=which == "training",
                seed=config.seed,
                options=options_of(config.mlp),
            )
            row = {"pass": which, "activation": activation, "dtype": dtype, "width": WIDTH, "tokens": TOKENS}
            yield {**row, **_measure(problem, config)}


def _measure(problem: Problem, config: BenchConfig) -> dict[str, Any]:
    arms = {"torch": partial(mlp_arms.eager, problem), "fused": partial(mlp_arms.fused, problem)}

    def check(arm: str, results: tuple[Tensor, ...]) -> None:
        problem.errors(arm, results)

    outcome = timing.contest(arms, check, problem.device, ROUNDS * config.rounds, config.block_ms, host=True)
    return {
        "us": outcome.us(),
        "fused_over_torch": outcome.ratio("fused", "torch", config.seed) if len(outcome.times) == 2 else None,
        "left_out": outcome.left_out,
        "wrong": outcome.wrong,
    }


def tables(done: list[dict[str, Any]]) -> list[Table]:
    """A line for each case."""
    lines = [
        [r["pass"], r["activation"], r["dtype"], *(us(r["us"].get(a)) for a in ARMS), interval(r["fused_over_torch"])]
        for r in done
    ]
    head = ["pass", "activation", "dtype", "torch us", "fused us", "fused / torch"]
    return [Table(f"Host time of one call, {TOKENS} tokens, d {WIDTH}", head, lines)]


NOTES = [
    "Eager calls of the module, linear-activation-linear against FusedMLP, many in a row: host time until they return. "
    "Training is forward and torch.autograd.grad. The device is synchronised before and after a turn, outside of the "
    "clock.",
]
