"""Recipes: which GEMMs and kernels make up the MLP, forward and backward, and who executes them.

The MLP of a transformer, with X (tokens, in), W1 (hidden, in), W2 (out, hidden), all row-major:

    forward                       as a column-major GEMM         epilog
    Z = X W1ᵀ + b1,  H = act(Z)   Hᵀ  = act(W1 Xᵀ + b1)          GELU_AUX_BIAS (GELU_BIAS without backward) | RELU_BIAS
    Y = H W2ᵀ + b2                Yᵀ  = W2 Hᵀ + b2               BIAS

    backward, given dY            as a column-major GEMM         epilog
    dZ = (dY W2) * act'(Z)        dZᵀ = (W2ᵀ dYᵀ) * act'(Z)      DGELU | none, then one kernel for ReLU
    dW2 = dYᵀ H,  db2 = sum dY    dW2ᵀ = Hᵀ dY                   BGRADB
    dX = dZ W1                    dXᵀ = W1ᵀ dZᵀ                  none
    dW1 = dZᵀ X,  db1 = sum dZ    dW1ᵀ = Xᵀ dZ                   BGRADB

This is the textbook recipe, and the ``reference`` engine executes it in torch operations (:mod:`fusedmlp.epilogs`).
The ``nvmath`` engine does not take it on trust: each stage has several candidates (:mod:`fusedmlp.stages`), plain torch
among them, and the first time that it meets a problem it races them (:mod:`fusedmlp.race`). On an H200, for instance,
DGELU is nearly free while DGELU_BGRAD takes twice as long as separate kernels, and BGRADB wins for narrow layers and
loses for wide ones. The winners are kept, on disk if there is a plan store.

ReLU keeps no aux matrix: H itself says where the activation was positive (H > 0, as in torch's own backward).

What the nvmath engine cannot do, ``reference`` computes, with the reason logged once.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedmlp import epilogs, gemms, plans, race, stages
from fusedmlp.epilogs import Epilog, gelu_aux_rows
from fusedmlp.plans import Unsupported
from fusedmlp.stages import Gemm
from fusedmlp.store import Race

log = logging.getLogger(__name__)

ACTIVATIONS = ("gelu", "relu")
MAX_PROBLEMS = 4096
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How to execute: values and meaning as in :class:`fusedmlp.config.MLPConfig`."""

    engine: str = "auto"
    on_unsupported: str = "fallback"
    search: str = "measured"
    compute_type: str | None = None

    def exact(self, dtype: torch.dtype) -> bool:
        """Whether full fp32 accuracy is asked for."""
        return dtype is torch.float32 and self.compute_type in (None, "COMPUTE_32F", "COMPUTE_32F_PEDANTIC")


class Forward(NamedTuple):
    """What the forward pass gives, and keeps for the backward pass."""

    y: Tensor
    """(tokens, out)"""
    h: Tensor
    """(tokens, hidden), after the activation."""
    aux: Tensor
    """GELU: (tokens, padded hidden), before the activation. ReLU: empty."""


class Grads(NamedTuple):
    """Gradients; None where nobody asked."""

    x: Tensor | None
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    w1: bool
    b1: bool
    w2: bool
    b2: bool


def aux_shape(tokens: int, hidden: int, activation: str) -> tuple[int, int]:
    """Shape of :attr:`Forward.aux`, whatever the engine."""
    return (tokens, gelu_aux_rows(hidden)) if activation == "gelu" else (0, 0)


def forward(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, options: Options
) -> Forward:
    """The MLP for training: x (tokens, in) -> :class:`Forward`. Weights as in ``nn.Linear``."""

    def reference() -> Forward:
        if activation == "gelu":
            h, aux, _ = epilogs.gemm(Epilog.GELU_AUX_BIAS, w1, x.T, bias=b1)
            assert aux is not None
            kept = aux.T
        else:
            h, kept = epilogs.gemm(Epilog.RELU_BIAS, w1, x.T, bias=b1).d, x.new_empty((0, 0))
        y = epilogs.gemm(Epilog.BIAS, w2, h, bias=b2).d
        return Forward(y.T, h.T, kept)

    def raced(gemm: Gemm, stage: Stage) -> Forward:
        h, aux = stage("fc1", lambda: stages.fc1(gemm, activation, keep=True, exact=options.exact(x.dtype)), x, w1, b1)
        y = stage("fc2", lambda: stages.fc2(gemm), h, w2, b2)
        return Forward(y, h, x.new_empty((0, 0)) if aux is None else aux)

    problem = (x.shape, w1.shape, w2.shape, b1 is None, b2 is None)
    return _execute(f"{activation} forward", problem, reference, raced, x, options)


def inference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, options: Options
) -> Tensor:
    """The MLP without a backward pass: x (tokens, in) -> (tokens, out); nothing is kept."""

    def reference() -> Tensor:
        first = Epilog.GELU_BIAS if activation == "gelu" else Epilog.RELU_BIAS
        h = epilogs.gemm(first, w1, x.T, bias=b1).d
        return epilogs.gemm(Epilog.BIAS, w2, h, bias=b2).d.T

    def raced(gemm: Gemm, stage: Stage) -> Tensor:
        h, _ = stage("fc1", lambda: stages.fc1(gemm, activation, keep=False, exact=options.exact(x.dtype)), x, w1, b1)
        return stage("fc2", lambda: stages.fc2(gemm), h, w2, b2)

    problem = (x.shape, w1.shape, w2.shape, b1 is None, b2 is None)
    return _execute(f"{activation} inference", problem, reference, raced, x, options)


def backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    aux: Tensor,
    w1: Tensor,
    w2: Tensor,
    needs: Needs,
    activation: str,
    options: Options,
) -> Grads:
    """The gradients that ``needs`` asks for, from dy (tokens, out) and what :func:`forward` kept.

    The kept tensors are only read, so that a graph may be walked again (``retain_graph=True``).
    """
    through = needs.x or needs.w1 or needs.b1  # the gradient goes further back than fc2

    def reference() -> Grads:
        dw2, db2 = _weight_grads(h, dy, needs.w2, needs.b2)
        if not through:
            return Grads(None, None, None, dw2, db2)
        if activation == "gelu":
            dz = epilogs.gemm(Epilog.DGELU, w2.T, dy.T, aux=aux.T).d.T
        else:
            dz = torch.ops.aten.threshold_backward(epilogs.gemm(Epilog.DEFAULT, w2.T, dy.T).d.T, h, 0)
        dx = epilogs.gemm(Epilog.DEFAULT, w1.T, dz.T).d.T if needs.x else None
        dw1, db1 = _weight_grads(x, dz, needs.w1, needs.b1)
        return Grads(dx, dw1, db1, dw2, db2)

    def raced(gemm: Gemm, stage: Stage) -> Grads:
        dw2 = db2 = dx = dw1 = db1 = None
        if needs.w2 or needs.b2:
            dw2, db2 = stage("wgrad2", lambda: stages.wgrad(gemm, needs.w2, needs.b2), h, dy)
        if through:
            exact = options.exact(x.dtype)
            dz, dw1, db1 = stage(
                "hidden",
                lambda: stages.hidden(gemm, activation, needs.w1, needs.b1, exact=exact),
                *(dy, w2, h, aux, x),
            )
            if needs.x:
                dx = stage("dgrad1", lambda: stages.dgrad1(gemm), dz, w1)
        return Grads(dx, dw1, db1, dw2, db2)

    problem = (x.shape, w1.shape, w2.shape, needs)
    return _execute(f"{activation} backward", problem, reference, raced, x, options)


def _weight_grads(inputs: Tensor, grad: Tensor, need_w: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """dW (out, in) and db (out,) of a linear layer, from its inputs (tokens, in) and grad (tokens, out)."""
    if need_w and need_b:
        dw, _, db = epilogs.gemm(Epilog.BGRADB, inputs.T, grad)
        return dw.T, db
    return (
        epilogs.gemm(Epilog.DEFAULT, inputs.T, grad).d.T if need_w else None,
        grad.sum(dim=0) if need_b else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Who executes

Stage = Callable[..., Any]
"""stage(name, make_candidates, *tensors) computes a stage by the candidate that was chosen for this problem."""

_choices: dict[tuple[Any, ...], dict[str, Callable[..., Any]]] = {}  # problem -> stage -> candidate
_log: dict[str, Race] = {}  # what was chosen in this process, for people to read
_fallbacks: Counter[str] = Counter()
_refused: dict[tuple[Any, ...], str] = {}  # problems that the nvmath engine refused, and why
_lock = threading.RLock()


def _execute(
    what: str,
    problem: tuple[Any, ...],
    reference: Callable[[], T],
    raced: Callable[[Gemm, Stage], T],
    x: Tensor,
    options: Options,
) -> T:
    """Run the pass on the engine that ``options`` names, or on the reference engine where that cannot."""
    if options.engine == "reference" or (options.engine == "auto" and x.device.type == "cpu"):
        return reference()
    key = (what, *problem, x.dtype, x.device.index, options)
    chosen = _choices.get(key)
    reason = None if chosen is not None else _refused.get(key) or _constraint(x, options)
    if reason is None:
        try:
            return raced(_gemm(options), _stage(what, key, chosen, x, options))
        except Unsupported as refusal:
            reason = str(refusal)
            with _lock:
                _choices.pop(key, None)  # of the stages before the refused one
                _bound(_refused, key)[key] = reason
    if options.on_unsupported == "error":
        raise Unsupported(f"fused MLP {what}: {reason}")
    with _lock:
        first_time = reason not in _fallbacks
        _fallbacks[reason] += 1
    if first_time:
        log.warning("fused MLP %s computed with torch operations: %s", what, reason)
    return reference()


@cache
def _gemm(options: Options) -> Gemm:
    return partial(gemms.gemm, compute_type=options.compute_type, tune=options.search == "measured")


def _stage(
    what: str, key: tuple[Any, ...], chosen: dict[str, Callable[..., Any]] | None, x: Tensor, options: Options
) -> Stage:
    def stage(name: str, make: Callable[[], stages.Candidates], *tensors: Tensor | None) -> Any:
        nonlocal chosen
        if chosen is None or name not in chosen:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"no recipe yet for the {what} pass of this shape, and racing synchronises, which a CUDA graph "
                    "capture forbids: run the same shapes once before capturing"
                )
            with _lock:
                chosen = _bound(_choices, key).setdefault(key, {})
                if name not in chosen:
                    chosen[name] = _choose(what, name, make(), tensors, x, options)
        return chosen[name](*tensors)

    return stage


def _choose(
    what: str,
    name: str,
    candidates: stages.Candidates,
    tensors: tuple[Tensor | None, ...],
    x: Tensor,
    options: Options,
) -> Callable[..., Any]:
    """The candidate for this stage: from the store, by rule, or by a race that is then stored.

    Raises:
        Unsupported: cuBLASLt can do nothing for this stage; only torch's own kernels would be left.
    """
    if not torch_is_comparable(x.dtype, options):
        candidates = {n: c for n, c in candidates.items() if not stages.uses_torch_gemm(n)}
    shapes = " ".join("x".join(map(str, t.shape)) if t is not None else "-" for t in tensors)
    store = gemms.store_of(x.device)
    problem = (
        f"{what} {name} {shapes} {plans.DTYPES[x.dtype]} {options.compute_type or 'default'} {'/'.join(candidates)}"
    )
    runs: dict[str, Callable[[], Any]] = {n: partial(c, *tensors) for n, c in candidates.items()}
    known = store.races.get(problem) if options.search == "measured" else None
    if known is not None and known.winner in candidates:
        outcome = known
    elif options.search == "heuristic":
        outcome = Race(_by_rule(name, runs, x), {})
    else:
        outcome = race.hold(runs, x.device)
        if all(stages.is_torch(n) for n in outcome.times_us) and not all(map(stages.is_torch, candidates)):
            _, refusals = race.warm_up({n: r for n, r in runs.items() if not stages.is_torch(n)})
            raise Unsupported(next(iter(refusals.values())))
        times = ", ".join(f"{n} {t:g}" for n, t in sorted(outcome.times_us.items(), key=lambda item: item[1]))
        log.info("raced %s: %s us", problem.rpartition(" ")[0], times)
        store.add_race(problem, outcome, instead_of=known)
        store.save()
    _bound(_log, problem)[problem] = outcome
    return candidates[outcome.winner]


def _by_rule(name: str, runs: dict[str, Callable[[], Any]], x: Tensor) -> str:
    """Without a race: the first candidate that runs, in the order that won most often on an H200."""
    narrow = x.shape[1] <= 1024  # the bias gradient rides on the weight GEMM for free in narrow layers only
    if name in ("wgrad2", "hidden") and not narrow:
        runs = dict(sorted(runs.items(), key=lambda item: "BGRADB" in item[0]))
    if all(map(stages.is_torch, runs)):
        return next(iter(runs))
    reasons: list[str] = []
    for candidate, run in runs.items():
        if stages.is_torch(candidate):
            continue
        runners, refusals = race.warm_up({candidate: run})
        if runners:
            return candidate
        reasons += refusals.values()
    raise Unsupported(reasons[0])


def torch_is_comparable(dtype: torch.dtype, options: Options) -> bool:
    """Whether torch's own GEMMs compute as ``options.compute_type`` asks, and so may take part in a race."""
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return False  # torch's would round to TF32
    return options.compute_type in (None, "COMPUTE_32F")


def _bound(table: dict[Any, Any], key: Any) -> dict[Any, Any]:
    """``table`` with room for ``key``: its oldest entry goes when there are too many."""
    if key not in table and len(table) >= MAX_PROBLEMS:
        del table[next(iter(table))]
    return table


def _constraint(x: Tensor, options: Options) -> str | None:
    """The constraint of the nvmath engine that this problem breaks, or None."""
    if x.shape[0] == 0:
        return "there are no tokens, and cuBLASLt takes no empty matrix"
    if x.dtype not in plans.DTYPES:
        return f"the nvmath engine takes {', '.join(plans.DTYPES.values())}, not {str(x.dtype).removeprefix('torch.')}"
    try:
        plans.check_compute_type(options.compute_type, x.dtype)
    except Unsupported as refusal:
        return str(refusal)
    return plans.why_unavailable(x.device)


def engine_for(device: torch.device, options: Options) -> tuple[str, str | None]:
    """Which engine will run on ``device``, ``nvmath`` or ``reference``, and why where it is not the asked one."""
    if options.engine == "reference":
        return "reference", None
    reason = plans.why_unavailable(device)
    if reason is None:
        return "nvmath", None
    return "reference", None if options.engine == "auto" and device.type == "cpu" else reason


def fallback_reasons() -> dict[str, int]:
    """Reasons for which the nvmath engine was not used in this process, and how often."""
    with _lock:
        return dict(_fallbacks)


def report() -> list[dict[str, Any]]:
    """What was chosen in this process: a dict for each problem with ``winner`` and the raced ``times_us``."""
    with _lock:
        return [{"problem": k.rpartition(" ")[0], "winner": r.winner, "times_us": r.times_us} for k, r in _log.items()]


def forget() -> None:
    """Drop all choices and refusals of this process: the next call of a problem chooses again."""
    with _lock:
        for table in (_choices, _refused, _log, _fallbacks):
            table.clear()
