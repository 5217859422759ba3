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

Choices made here, measured on an H200:

* DGELU and not DGELU_BGRAD: with the bias reduction in the same epilog the GEMM takes twice as long as with separate
  kernels, while DGELU alone is nearly free. The bias gradient rides on the weight GEMM instead (BGRADB).
* ReLU keeps no aux matrix. H itself says where the activation was positive (H > 0, as in torch's own backward), and a
  plain GEMM followed by one masking kernel is faster than the DRELU epilog.

Two engines execute the same recipe, GEMM by GEMM: ``nvmath`` (:func:`fusedmlp.plans.gemm`) and ``reference``
(:func:`fusedmlp.epilogs.gemm`). What the nvmath engine cannot do, ``reference`` computes, with the reason logged once.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedmlp import epilogs, plans
from fusedmlp.epilogs import Epilog, Result, gelu_aux_rows
from fusedmlp.plans import Unsupported

log = logging.getLogger(__name__)

ACTIVATIONS = ("gelu", "relu")
MAX_REFUSED = 4096
Gemm = Callable[..., Result]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How to execute: values and meaning as in :class:`fusedmlp.config.MLPConfig`."""

    engine: str = "auto"
    on_unsupported: str = "fallback"
    search: str = "measured"
    compute_type: str | None = None


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

    def recipe(gemm: Gemm) -> Forward:
        if activation == "gelu":
            h, aux, _ = gemm(Epilog.GELU_AUX_BIAS, w1, x.T, bias=b1)
            assert aux is not None
            kept = aux.T
        else:
            h, _, _ = gemm(Epilog.RELU_BIAS, w1, x.T, bias=b1)
            kept = x.new_empty((0, 0))
        y = gemm(Epilog.BIAS, w2, h, bias=b2).d
        return Forward(y.T, h.T, kept)

    return _execute(recipe, "forward", x, w1, w2, activation, options)


def inference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, options: Options
) -> Tensor:
    """The MLP without a backward pass: x (tokens, in) -> (tokens, out); nothing is kept."""
    first = Epilog.GELU_BIAS if activation == "gelu" else Epilog.RELU_BIAS

    def recipe(gemm: Gemm) -> Tensor:
        h = gemm(first, w1, x.T, bias=b1).d
        return gemm(Epilog.BIAS, w2, h, bias=b2).d.T

    return _execute(recipe, "inference", x, w1, w2, activation, options)


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

    def recipe(gemm: Gemm) -> Grads:
        dw2, db2 = _weight_grads(gemm, h, dy, needs.w2, needs.b2)
        if not (needs.x or needs.w1 or needs.b1):
            return Grads(None, None, None, dw2, db2)
        if activation == "gelu":
            dz = gemm(Epilog.DGELU, w2.T, dy.T, aux=aux.T).d.T
        else:
            dz = torch.ops.aten.threshold_backward(gemm(Epilog.DEFAULT, w2.T, dy.T).d.T, h, 0)
        dx = gemm(Epilog.DEFAULT, w1.T, dz.T).d.T if needs.x else None
        dw1, db1 = _weight_grads(gemm, x, dz, needs.w1, needs.b1)
        return Grads(dx, dw1, db1, dw2, db2)

    return _execute(recipe, "backward", x, w1, w2, activation, options)


def _weight_grads(
    gemm: Gemm, inputs: Tensor, grad: Tensor, need_w: bool, need_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dW (out, in) and db (out,) of a linear layer, from its inputs (tokens, in) and grad (tokens, out)."""
    if need_w and need_b:
        dw, _, db = gemm(Epilog.BGRADB, inputs.T, grad)
        return dw.T, db
    return (
        gemm(Epilog.DEFAULT, inputs.T, grad).d.T if need_w else None,
        grad.sum(dim=0) if need_b else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Who executes

_fallbacks: Counter[str] = Counter()
_refused: dict[tuple[object, ...], str] = {}  # problems that the nvmath engine refused, and why
_lock = threading.Lock()


def _execute(
    recipe: Callable[[Gemm], T], what: str, x: Tensor, w1: Tensor, w2: Tensor, activation: str, options: Options
) -> T:
    """Run ``recipe`` on the engine that ``options`` names, or on the reference engine where that cannot."""
    if options.engine == "reference" or (options.engine == "auto" and x.device.type == "cpu"):
        return recipe(epilogs.gemm)
    problem = (what, x.shape, w1.shape, w2.shape, x.dtype, x.device, activation, options)
    reason = _refused.get(problem) or _constraint(x, w1, w2, options)
    if reason is None:
        gemm = partial(plans.gemm, compute_type=options.compute_type, tune=options.search == "measured")
        try:
            return recipe(gemm)
        except Unsupported as refusal:
            reason = str(refusal)
            with _lock:
                if len(_refused) >= MAX_REFUSED:  # one for each number of tokens: bounded, and cheap to find out again
                    _refused.clear()
                _refused[problem] = reason
    if options.on_unsupported == "error":
        raise Unsupported(f"fused MLP {what}: {reason}")
    with _lock:
        first_time = reason not in _fallbacks
        _fallbacks[reason] += 1
    if first_time:
        log.warning("fused MLP %s computed with torch operations: %s", what, reason)
    return recipe(epilogs.gemm)


def _constraint(x: Tensor, w1: Tensor, w2: Tensor, options: Options) -> str | None:
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


def describe(activation: str) -> dict[str, list[str]]:
    """The recipe in words: for each pass, the epilogs of its GEMMs in order."""
    gelu = activation == "gelu"
    return {
        "forward": [Epilog.GELU_AUX_BIAS if gelu else Epilog.RELU_BIAS, Epilog.BIAS],
        "inference": [Epilog.GELU_BIAS if gelu else Epilog.RELU_BIAS, Epilog.BIAS],
        "backward": [Epilog.BGRADB, Epilog.DGELU if gelu else Epilog.DEFAULT, Epilog.DEFAULT, Epilog.BGRADB],
    }
