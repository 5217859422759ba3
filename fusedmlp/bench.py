"""Measures GEMMs, the MLP, compute types and host cost: ``python -m fusedmlp.bench bench=mlp widths=[768,1024]``.

Each benchmark prints its tables and leaves NAME.json, NAME.md and NAME.png in the run directory. Exit status 1 says
that results were wrong, or that the fused arm failed; whoever cannot take part is listed with the reason.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedmlp import bench_gemm, bench_host, bench_mlp, bench_precision, gemms, plans, plots, recipes
from fusedmlp.bench_report import Report, Table
from fusedmlp.config import BenchConfig
from fusedmlp.device import DTYPES, resolve_device, set_fp32_math
from fusedmlp.environment import describe
from fusedmlp.launch import RunFailed, main
from fusedmlp.model import options_of
from fusedmlp.schema import to_dict

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


class Bench(NamedTuple):
    """One benchmark."""

    title: str
    rows: Callable[[BenchConfig, torch.device], Iterator[dict[str, Any]]]
    tables: Callable[[Rows], list[Table]]
    plot: Callable[[Rows, Path], None]
    notes: list[str]


def benches(config: BenchConfig, device: torch.device) -> dict[str, Bench]:
    """The benchmarks that ``config`` asks for."""
    b = f"{config.tokens:,} tokens"
    mlp_notes = bench_mlp.notes(device, options_of(config.mlp))
    found = {
        "gemm": Bench(f"GEMMs with epilogs, {b}", bench_gemm.rows, bench_gemm.tables, plots.gemm, bench_gemm.NOTES),
        "mlp": Bench(f"The MLP, {b}", bench_mlp.rows, bench_mlp.tables, plots.mlp, mlp_notes),
        "precision": Bench(
            f"Compute types, {b}",
            bench_precision.rows,
            bench_precision.tables,
            plots.precision,
            bench_precision.NOTES,
        ),
        "host": Bench("Host cost of a call", bench_host.rows, bench_host.tables, plots.host, bench_host.NOTES),
    }
    return found if config.bench == "all" else {config.bench: found[config.bench]}


def method(config: BenchConfig, device: torch.device, host: bool) -> str:
    """How the times were taken."""
    rounds = config.rounds * (bench_host.ROUNDS if host else 1)
    turns = (
        f"Arms take turns of about {config.block_ms:g} ms in {rounds} rounds of one process, in an order that changes "
        "every round; medians over rounds. Intervals: 95%, bootstrap over rounds."
    )
    if host:
        return f"Wall clock. {turns}"
    if device.type == "cuda":
        return f"CUDA graph replays, timed with events. {turns}"
    return (
        f"Wall clock of calls on the CPU: there are no CUDA graphs and no cuBLASLt here, so that nothing below tells "
        f"how fast a GPU is. {turns}"
    )


def extra(config: BenchConfig, device: torch.device, rows: Rows) -> dict[str, Any]:
    """What the recipes decided, and the means over cases."""
    engine, why = recipes.engine_for(device, options_of(config.mlp))
    found: dict[str, Any] = {"engine": engine, "engine_reason": why, "fallbacks": recipes.fallback_reasons()}
    found["recipes"] = recipes.report()
    if rows and "speedup_of_fused_over" in rows[0]:
        found["geometric_means"] = bench_mlp.means(rows)
    return found


def run(config: BenchConfig) -> None:
    """Measure what the config asks for.

    Raises:
        RunFailed: results were wrong, or the fused arm failed.
    """
    device = resolve_device(config.device)
    for dtype in config.dtypes:
        set_fp32_math(config.mlp, DTYPES[dtype])
    gemms.use_store(config.mlp.plan_store)
    assert config.run_dir is not None
    folder = Path(config.run_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for name, bench in benches(config, device).items():
        stem = "_".join(filter(None, [config.name, name if config.bench == "all" or not config.name else None]))
        report = Report(
            title=bench.title,
            stem=folder / stem,
            config=to_dict(config),
            environment=describe(device, plans.cublaslt_version()),
            method=method(config, device, name == "host"),
            notes=bench.notes,
            tables=bench.tables,
            extra=lambda rows: extra(config, device, rows),
        )
        for row in bench.rows(config, device):
            report.add(row)
        print(report.finish() + "\n", flush=True)
        bench.plot(report.rows, report.stem.with_name(f"{report.stem.name}.png"))
        wrong += [f"{name} {line}" for line in report.wrong()]
    log.info("results in %s", folder)
    if wrong:
        raise RunFailed("\n".join(["results that cannot be used:", *wrong]))


if __name__ == "__main__":
    main("bench", BenchConfig, run)
