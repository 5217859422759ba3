"""Turns a run directory into a recorded result: ``python docs/results/record.py RUN_DIR NAME "COMMAND" [COMMIT]``.

Writes NAME.json (command, environment, rows) and NAME.md beside this file. COMMIT is for runs on a machine that had no
checkout to read it from.
"""

import json
import sys
from pathlib import Path

KEPT = (
    "step",
    "tokens",
    "train/loss",
    "val/loss",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/mfu_pct",
    "perf/peak_mem_gib",
    "parity/loss_abs_diff",
    "parity/grad_rel_err",
)
SUMMARY = (
    "exit",
    "engine",
    "recipes",
    "fallback_reasons",
    "parameters",
    "best_val_loss",
    "best_val_nats_per_byte",
    "parity/largest_loss_abs_diff",
    "perf/mean_tokens_per_s",
    "seconds",
    "wall_s",
    "data",
)


def main(run_dir: Path, name: str, command: str, commit: str | None) -> None:
    """Write the two files."""
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shown = [r for r in metrics if "val/loss" in r or "parity/loss_abs_diff" in r]
    rows = [{k: r[k] for k in KEPT if k in r} for r in shown]
    environment = summary["environment"]
    environment["commit"] = environment["commit"] or commit
    record = {
        "command": command,
        "environment": environment,
        "summary": {k: summary[k] for k in SUMMARY},
        "rows": rows,
    }
    here = Path(__file__).parent
    (here / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    table = [
        "| step | train loss | val loss | tokens/s | parity: loss difference | parity: relative gradient error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['step']} | {number(r.get('train/loss'), '.4f')} | {number(r.get('val/loss'), '.4f')} | "
            f"{number(r.get('perf/tokens_per_s'), ',.0f')} | {number(r.get('parity/loss_abs_diff'), '.1e')} | "
            f"{number(r.get('parity/grad_rel_err'), '.1e')} |"
            for r in rows
        ),
    ]
    where = environment["gpu"] or f"{environment['cpu']}, no GPU"
    text = [
        f"# {name}",
        "",
        f"    {command}",
        "",
        f"On {where}; torch {environment['torch']}, cuBLASLt {environment['cublaslt']}, nvmath-python "
        f"{environment['nvmath']}, driver {environment['driver']}; commit {environment['commit']}; "
        f"{environment['date']}.",
        "",
        f"{summary['exit']} in {summary['wall_s']:.0f} s of wall time, engine {summary['engine']}, "
        f"{summary['parameters']:,} parameters, best val loss {summary['best_val_loss']:.4f} nats per token "
        f"({summary['best_val_nats_per_byte']:.4f} per byte), {summary['perf/mean_tokens_per_s']:,.0f} tokens/s, "
        f"largest parity difference {summary['parity/largest_loss_abs_diff']:.1e}, peak memory "
        f"{summary['perf/peak_mem_gib']:.2f} GiB, fallbacks: {summary['fallback_reasons'] or 'none'}.",
        "",
        *table,
    ]
    (here / f"{name}.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) == 5 else None)
