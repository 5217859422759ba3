"""``bench=precision``: what each compute type costs and how exact it is, on a GEMM with BIAS (fc1 of the MLP)."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedmlp import plans, timing
from fusedmlp.bench_gemm import Layer, Operands, epilog_arm
from fusedmlp.bench_report import Table, us
from fusedmlp.config import BenchConfig
from fusedmlp.device import DTYPES
from fusedmlp.epilogs import Epilog
from fusedmlp.timing import Step, Unavailable

# Relative errors above these are wrong, not imprecise: some times what each arithmetic gives on random operands.
LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
ROUNDED_LIMIT = 1e-2  # fp32 operands rounded to TF32, bf16 or fp16; fp16 accumulation
TF32 = "torch TF32"

log = logging.getLogger(__name__)


def rows(config: BenchConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure every compute type that takes the dtype, for each dtype and width."""
    for width in config.widths:
        for dtype, torch_dtype in DTYPES.items():
            log.info("precision, d %d, %s", width, dtype)
            layer = Layer(config.tokens, width, torch_dtype, device, config.seed)
            row = {"width": width, "tokens": config.tokens, "dtype": dtype}
            yield {**row, **_measure(layer, dtype, config)}
            del layer
            timing.release(device)


def _measure(layer: Layer, dtype: str, config: BenchConfig) -> dict[str, Any]:
    x, w, b = layer.x, layer.w1, layer.b1
    o = Operands(w, x.T, b, None, lambda: (F.linear(x, w, b),))
    arms: dict[str, Callable[[], Step]] = {"torch": lambda: o.separate}
    if dtype == "fp32":
        arms[TF32] = partial(_tf32, o)
    for name, dtypes in plans.COMPUTE_TYPES.items():
        if DTYPES[dtype] in dtypes:
            arms[name] = partial(epilog_arm, Epilog.BIAS, o, name, config.mlp.search == "measured")
    reference = (F.linear(x.double(), w.double(), b.double()),)
    errors: dict[str, float] = {}

    def check(arm: str, got: tuple[Tensor, ...]) -> None:
        found = timing.relative_errors(got, reference)
        errors[arm] = found[0]
        rounded = arm == TF32 or "FAST" in arm or arm == "COMPUTE_16F"
        timing.require(("D",), found, [ROUNDED_LIMIT if rounded else LIMITS[dtype]])

    outcome = timing.contest(arms, check, x.device, config.rounds, config.block_ms)
    times = outcome.us()
    flops = 2 * x.shape[0] * w.numel()
    return {
        "us": times,
        "tflops": {arm: flops / t / 1e6 for arm, t in times.items()},
        "relative_error": errors,
        "left_out": outcome.left_out,
        "wrong": outcome.wrong,
    }


def _tf32(o: Operands) -> Step:
    if o.a.device.type != "cuda":
        raise Unavailable("TF32 is an arithmetic of NVIDIA's GPUs")

    def step() -> tuple[Tensor, ...]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return o.separate()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return step


def tables(done: list[dict[str, Any]]) -> list[Table]:
    """A line for each arm of each case."""
    lines = [
        [str(r["width"]), r["dtype"], arm, us(t), f"{r['tflops'][arm]:.3g}", f"{r['relative_error'][arm]:.1e}"]
        for r in done
        for arm, t in r["us"].items()
    ]
    head = ["d", "dtype", "compute type", "us", "TFLOP/s", "relative error against float64"]
    return [Table("Linear layer with bias, d to 4 d features: median time and error", head, lines)]


NOTES = [
    "All three dtypes, whatever `dtypes` says. The FAST types round fp32 tensors inside the GEMM, so they take no "
    "other dtype; fp16 and bf16 tensors accumulate in fp32 under COMPUTE_32F.",
]
