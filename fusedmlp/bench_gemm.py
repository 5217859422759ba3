"""``bench=gemm``: each GEMM of the MLP with its epilog, against a plain GEMM followed by separate kernels.

Letters: T tokens, D width, H = 4 D hidden. The rows of a layer's output are columns here: see :mod:`fusedmlp.epilogs`.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import benchmark

from fusedmlp import epilogs, gemms, plans, timing
from fusedmlp.bench_report import Table, interval, us
from fusedmlp.config import BenchConfig
from fusedmlp.device import DTYPES
from fusedmlp.epilogs import READS_AUX, WRITES_BGRAD, Epilog
from fusedmlp.mlp_arms import HIDDEN, ROUNDING_LIMIT
from fusedmlp.timing import Step, Unavailable

CLAIMED_PCT = (20.0, 50.0)  # what articles on epilog fusion promise, without saying of what
MIN_TIMER_S = 0.1
ARMS = {
    "plain": "plain GEMM",
    "separate": "torch, separate kernels",
    "epilog_first": "epilog, first algorithm",
    "epilog_tuned": "epilog, autotuned",
}
GEMMS = {
    "gelu": [
        ("fc1", Epilog.GELU_AUX_BIAS),
        ("fc1", Epilog.GELU_BIAS),
        ("dgrad", Epilog.DGELU),
        ("dgrad", Epilog.DGELU_BGRAD),
    ],
    "relu": [
        ("fc1", Epilog.RELU_AUX_BIAS),
        ("fc1", Epilog.RELU_BIAS),
        ("dgrad", Epilog.DRELU),
        ("dgrad", Epilog.DRELU_BGRAD),
    ],
    "any": [("fc2", Epilog.BIAS), ("dW2", Epilog.BGRADB), ("dW1", Epilog.BGRADB)],
}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Operands:
    """One GEMM as cuBLASLt takes it, and the same with torch's kernels."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    aux: Tensor | None
    separate: Step
    """D transposed (row-major), then the bias gradient where there is one."""


class Layer:
    """The tensors of one MLP, all random or computed from random ones, as its GEMMs see them."""

    def __init__(self, tokens: int, width: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        hidden = HIDDEN * width

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype) * scale

        self.x, self.dy = draw(tokens, width), draw(tokens, width)
        self.w1, self.b1 = draw(hidden, width, scale=width**-0.5), draw(hidden)
        self.w2, self.b2 = draw(width, hidden, scale=hidden**-0.5), draw(width)
        self.z = F.linear(self.x, self.w1, self.b1)

    def operands(self, gemm: str, epilog: Epilog, activation: str) -> Operands:
        """The operands of ``gemm``."""
        gelu = activation == "gelu"
        h = F.gelu(self.z, approximate="tanh") if gelu else F.relu(self.z)

        def slope(grad: Tensor) -> Tensor:
            if gelu:
                return torch.ops.aten.gelu_backward(grad, self.z, approximate="tanh")
            return torch.ops.aten.threshold_backward(grad, h, 0)

        match gemm:
            case "fc1":

                def fc1() -> tuple[Tensor, ...]:
                    z = F.linear(self.x, self.w1, self.b1)
                    return (F.gelu(z, approximate="tanh") if gelu else F.relu(z),)

                return Operands(self.w1, self.x.T, self.b1, None, fc1)
            case "fc2":
                return Operands(self.w2, h.T, self.b2, None, lambda: (F.linear(h, self.w2, self.b2),))
            case "dgrad":
                aux = epilogs.pad_gelu_aux(self.z.T) if gelu else epilogs.pack_relu_mask(self.z.T)

                def dgrad() -> tuple[Tensor, ...]:
                    dz = slope(self.dy @ self.w2)
                    return (dz, dz.sum(0)) if epilog in WRITES_BGRAD else (dz,)

                return Operands(self.w2.T, self.dy.T, None, aux, dgrad)
            case _:
                inputs, grad = (h, self.dy) if gemm == "dW2" else (self.x, slope(self.dy @ self.w2))
                return Operands(inputs.T, grad, None, None, lambda: (grad.T @ inputs, grad.sum(0)))


def results(r: epilogs.Result) -> tuple[Tensor, ...]:
    """What is compared: D transposed and the bias gradient. A wrong aux would show in the gradients of bench=mlp."""
    return (r.d.T,) if r.bgrad is None else (r.d.T, r.bgrad)


def epilog_arm(epilog: Epilog, o: Operands, compute_type: str | None, tune: bool) -> Step:
    """The GEMM with its epilog, planned by cuBLASLt's first guess or autotuned.

    Raises:
        Unavailable: nvmath cannot run here, or refuses the problem.
    """
    reason = plans.why_unavailable(o.a.device)
    if reason:
        raise Unavailable(reason)

    def step() -> tuple[Tensor, ...]:
        return results(gemms.gemm(epilog, o.a, o.b, bias=o.bias, aux=o.aux, compute_type=compute_type, tune=tune))

    try:
        step()
    except plans.Unsupported as refusal:
        raise Unavailable(str(refusal)) from refusal
    return step


def rows(config: BenchConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure each GEMM of each width and dtype."""
    gemms = [(g, e, a) for a, list_ in GEMMS.items() if a == "any" or a in config.activations for g, e in list_]
    for width in config.widths:
        for dtype in config.dtypes:
            log.info("gemm, d %d, %s", width, dtype)
            layer = Layer(config.tokens, width, DTYPES[dtype], device, config.seed)
            for gemm, epilog, activation in gemms:
                o = layer.operands(gemm, epilog, config.activations[0] if activation == "any" else activation)
                row = {"gemm": gemm, "epilog": str(epilog), "width": width, "tokens": config.tokens, "dtype": dtype}
                yield {**row, **_measure(epilog, o, config)}
                timing.release(device)


def _measure(epilog: Epilog, o: Operands, config: BenchConfig) -> dict[str, Any]:
    aux = o.aux.double() if o.aux is not None and epilog in READS_AUX and "GELU" in epilog else o.aux
    bias = o.bias.double() if o.bias is not None else None
    reference = results(epilogs.gemm(epilog, o.a.double(), o.b.double(), bias=bias, aux=aux))
    floor = torch.finfo(o.a.dtype).eps if config.mlp.compute_type in (None, "COMPUTE_32F") else ROUNDING_LIMIT
    limits = [2 * e + floor for e in timing.relative_errors(o.separate(), reference)]
    errors: dict[str, float] = {}
    steps: dict[str, Step] = {}

    def check(arm: str, got: tuple[Tensor, ...]) -> None:
        if arm != "plain":
            found = timing.relative_errors(got, reference)
            errors[arm] = max(found)
            timing.require(("D", "bias gradient")[: len(reference)], found, limits)

    def keep(arm: str, build: Callable[[], Step]) -> Step:
        steps[arm] = build()
        return steps[arm]

    product = torch.empty_like(reference[0], dtype=o.a.dtype)
    builders: dict[str, Callable[[], Step]] = {
        "plain": lambda: lambda: (torch.mm(o.b.T, o.a.T, out=product),),
        "separate": lambda: o.separate,
        "epilog_first": partial(epilog_arm, epilog, o, config.mlp.compute_type, False),
        "epilog_tuned": partial(epilog_arm, epilog, o, config.mlp.compute_type, True),
    }
    outcome = timing.contest(
        {arm: partial(keep, arm, build) for arm, build in builders.items()},
        check,
        o.a.device,
        config.rounds,
        config.block_ms,
    )
    times = outcome.us()
    fused = min((arm for arm in times if arm.startswith("epilog")), key=lambda arm: times[arm], default=None)
    speedup = outcome.ratio("separate", fused, config.seed) if fused and "separate" in times else None
    return {
        "us": times,
        "timer_us": {arm: _timer_us(steps[arm]) for arm in times},
        "speedup_over_separate": speedup,
        "speedup_pct": 100 * (speedup.value - 1) if speedup else None,
        "share_of_claim": [(speedup.value - 1) * 100 / claim for claim in CLAIMED_PCT] if speedup else None,
        "max_relative_error": errors,
        "left_out": outcome.left_out,
        "wrong": outcome.wrong,
    }


def _timer_us(step: Step) -> float:
    """Microseconds by torch.utils.benchmark: no graph, so that host time shows where it is longer."""
    timer = benchmark.Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MIN_TIMER_S).median) * 1e6


def claim(row: dict[str, Any]) -> str:
    """How the speed-up stands to the claimed one."""
    pct = row["speedup_pct"]
    if pct is None:
        return "–"
    low, high = CLAIMED_PCT
    if pct < low:
        return "none of it" if pct <= 0 else f"{100 * pct / low:.0f}% of the lower end"
    return "within" if pct <= high else "above"


def tables(done: list[dict[str, Any]]) -> list[Table]:
    """Times by graph replay and by torch.utils.benchmark, speed-up, and the claim."""
    low, high = CLAIMED_PCT
    head = ["d", "dtype", "GEMM", "epilog", *(f"{name} us" for name in ARMS.values())]
    head += ["speed-up of the epilog", f"of the claimed {low:.0f}–{high:.0f}%"]
    lines, timer_lines = [], []
    for r in done:
        case = [str(r["width"]), r["dtype"], r["gemm"], r["epilog"]]
        ratios = [interval(r["speedup_over_separate"]), claim(r)]
        lines.append([*case, *(us(r["us"].get(arm)) for arm in ARMS), *ratios])
        timer_lines.append([*case, *(us(r["timer_us"].get(arm)) for arm in ARMS)])
    return [
        Table("Median time, and speed-up over separate kernels with its 95% interval", head, lines),
        Table("Median time by torch.utils.benchmark, without graphs", head[:-2], timer_lines),
    ]


NOTES = [
    "Separate kernels: torch's linear (whose own GEMM adds the bias), then the activation; for gradients a plain GEMM, "
    "then the activation's gradient and the bias gradient as torch has them. First algorithm: what cuBLASLt's "
    "heuristic names first; autotuned: the fastest of up to eight. The speed-up is that of the faster of the two.",
    f"Fusing epilogs is commonly said to give {CLAIMED_PCT[0]:.0f}–{CLAIMED_PCT[1]:.0f}%.",
]
