"""``bench=mlp``: one MLP, training and inference, by everybody who can compute it (:mod:`fusedmlp.mlp_arms`)."""

import logging
import math
from collections.abc import Iterator
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from fusedmlp import timing
from fusedmlp.bench_report import Table, interval, us
from fusedmlp.config import BenchConfig
from fusedmlp.device import DTYPES
from fusedmlp.mlp_arms import ARMS, HIDDEN, NORM_ARMS, TORCH_ARMS, Problem
from fusedmlp.model import options_of
from fusedmlp.recipes import Options, engine_for, fallback_reasons

SMALL_WIDTH = 1600  # GPT-2's models end here; geometric means are given up to this width, and over all
FLOOR = "gemm_floor"

log = logging.getLogger(__name__)


def rows(config: BenchConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure, one case after the other: same widths together, since searches for GEMMs are remembered."""
    cases = [
        (d, t, p, a) for d in config.widths for t in config.dtypes for a in config.activations for p in config.passes
    ]
    for number, (width, dtype, which, activation) in enumerate(cases, 1):
        log.info("[%d/%d] mlp %s, d %d, %s, %s", number, len(cases), which, width, activation, dtype)
        problem = Problem(
            tokens=config.tokens,
            width=width,
            activation=activation,
            dtype=DTYPES[dtype],
            device=device,
            training=which == "training",
            seed=config.seed,
            options=options_of(config.mlp),
        )
        row = {"pass": which, "width": width, "hidden": HIDDEN * width, "tokens": config.tokens}
        yield {**row, "activation": activation, "dtype": dtype, **_measure(problem, config)}
        del problem
        timing.release(device)


def _measure(problem: Problem, config: BenchConfig) -> dict[str, Any]:
    errors: dict[str, float] = {}

    def check(arm: str, results: tuple[Tensor, ...]) -> None:
        if arm != FLOOR:
            errors[arm] = max(problem.errors(arm, results))

    names = [arm for arm in ARMS if config.arms is None or arm in config.arms]
    arms = {name: partial(ARMS[name], problem) for name in names}
    before = fallback_reasons()
    outcome = timing.contest(arms, check, problem.device, config.rounds, config.block_ms)
    times = outcome.us()
    fused = "fused" in times
    torch_times = {arm: t for arm, t in times.items() if arm in TORCH_ARMS}
    fastest = min(torch_times, key=lambda arm: torch_times[arm]) if torch_times else None
    return {
        "us": times,
        "tflops": {arm: problem.flops / t / 1e6 for arm, t in times.items()},
        "speedup_of_fused_over": {a: outcome.ratio(a, "fused", config.seed) for a in times if a != "fused" and fused},
        "fastest_torch": fastest,
        "fused_over_floor": outcome.ratio("fused", FLOOR, config.seed) if fused and FLOOR in times else None,
        "max_relative_error": errors,
        "fallbacks": [why for why, count in fallback_reasons().items() if count > before.get(why, 0)],
        "left_out": outcome.left_out,
        "wrong": outcome.wrong,
        "prepare_s": {arm: round(s, 2) for arm, s in outcome.prepare_s.items()},
    }


def means(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means of the speed-up of fused, over widths up to :data:`SMALL_WIDTH` and over all."""
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in done:
        for activation in ("all", row["activation"]):
            for widths in (f"<= {SMALL_WIDTH}", "all"):
                if widths == "all" or row["width"] <= SMALL_WIDTH:
                    groups.setdefault((row["pass"], row["dtype"], activation, widths), []).append(row)
    found = []
    for (which, dtype, activation, widths), group in groups.items():
        over: dict[str, list[float]] = {}
        for row in group:
            ratios = row["speedup_of_fused_over"]
            if row["fastest_torch"] in ratios:
                ratios = {**ratios, "fastest_torch": ratios[row["fastest_torch"]]}
            for arm, ratio in ratios.items():
                over.setdefault(arm, []).append(ratio[0])
        found.append(
            {
                "pass": which,
                "dtype": dtype,
                "activation": activation,
                "widths": widths,
                "cases": len(group),
                # A mean over fewer cases than the others' would compare different things.
                "speedup_of_fused_over": {a: geometric_mean(v) for a, v in over.items() if len(v) == len(group)},
            }
        )
    return found


def tables(done: list[dict[str, Any]]) -> list[Table]:
    """Times and ratios of each case, then the means."""
    arms = [arm for arm in ARMS if any(arm in r["us"] for r in done)]
    case = ["pass", "d", "activation", "dtype"]
    head = [*case, *(f"{a} us" + (" (with LayerNorm)" if a in NORM_ARMS else "") for a in arms)]
    head += ["fused TFLOP/s", "fused over eager", "fused over the fastest torch", "fused / GEMM floor"]
    lines = []
    for r in done:
        ratios, fastest = r["speedup_of_fused_over"], r["fastest_torch"]
        best = f"{interval(ratios.get(fastest))} {fastest}" if fastest in ratios else "–"
        lines.append(
            [r["pass"], str(r["width"]), r["activation"], r["dtype"]]
            + [us(r["us"].get(arm)) for arm in arms]
            + [f"{r['tflops'].get('fused', math.nan):.3g}", interval(ratios.get("eager")), best]
            + [interval(r["fused_over_floor"])]
        )
    columns = ["fastest_torch", *(a for a in arms if a not in ("fused", FLOOR))]
    mean_lines = [
        [m["pass"], m["dtype"], m["activation"], m["widths"], str(m["cases"])]
        + [f"{m['speedup_of_fused_over'][c]:.3f}" if c in m["speedup_of_fused_over"] else "–" for c in columns]
        for m in means(done)
    ]
    means_head = ["pass", "dtype", "activation", "widths", "cases", *(f"over {c}" for c in columns)]
    return [
        Table("Median time, and speed-up of fused with its 95% interval", head, lines),
        Table("Speed-up of fused, geometric means", means_head, mean_lines),
    ]


def notes(device: torch.device, options: Options) -> list[str]:
    """What a reader must know."""
    engine, why = engine_for(device, options)
    said = [
        "Training is y, then the gradients of x, both weights and both biases for a random upstream gradient; the GEMM "
        "floor is the six plain GEMMs of that. Inference is y without gradients; its floor is two GEMMs. Hidden layers "
        f"are {HIDDEN} times as wide. A speed-up is the other arm's time over that of fused: above 1, fused is faster.",
        "The fastest torch is the fastest by median time among " + ", ".join(TORCH_ARMS) + ", where they took part.",
        "Every arm was checked before it was timed: relative error against float64 at most twice that of eager torch, "
        "plus one rounding of the dtype.",
    ]
    if engine != "nvmath":
        said.append(
            f"The fused arm ran on the {engine} engine, torch operations{f' ({why})' if why else ''}: its times say "
            "nothing about fused epilogs."
        )
    return said
