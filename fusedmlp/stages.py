"""The stages of the MLP and, for each, the ways to compute it: the candidates that a race chooses from.

Letters: X (tokens, in), W1 (hidden, in), W2 (out, hidden), all row-major. Every candidate of a stage takes the same
tensors and gives the same results, contiguous, within rounding. Its name lists its kernels in order: epilogs in
capitals are cuBLASLt GEMMs planned here, ``mm`` and ``linear`` are torch's own GEMMs, the rest are separate kernels.

    stage      computes                                   from
    fc1        H = act(X W1ᵀ + b1), and aux               x, w1, b1
    fc2        Y = H W2ᵀ + b2                             h, w2, b2
    wgrad2     dW2 = dYᵀ H, db2 = sum of dY               h, dy
    hidden     dZ = (dY W2) act'(Z), dW1 = dZᵀ X, db1     dy, w2, h, aux, x
    dgrad1     dX = dZ W1                                 dz, w1

The candidates of ``hidden`` are pairs, since the bias gradient can ride on either GEMM or on the kernel between.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedmlp import epilogs, kernels
from fusedmlp.epilogs import Epilog, Result

Gemm = Callable[..., Result]
Candidates = dict[str, Callable[..., Any]]


def is_torch(name: str) -> bool:
    """Whether a candidate uses torch's own kernels only."""
    return not any(part.isupper() for part in name.replace(",", "+").split("+"))


def uses_torch_gemm(name: str) -> bool:
    """Whether a candidate has one of torch's own GEMMs in it, which know nothing of compute types."""
    return not {"mm", "linear", "addmm_activation"}.isdisjoint(name.replace(",", "+").split("+"))


def fc1(gemm: Gemm, activation: str, *, keep: bool, exact: bool) -> Candidates:
    """(x, w1, b1) -> h, aux; aux is None for relu and without ``keep``.

    ``exact`` leaves out GELU epilogs, whose tanh is good to about 3e-6: enough for 16-bit results, not for fp32 ones.
    """
    relu = activation == "relu"
    fused = Epilog.RELU_BIAS if relu else Epilog.GELU_AUX_BIAS if keep else Epilog.GELU_BIAS

    def epilog(x: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        d, aux, _ = gemm(fused, w1, x.T, bias=b1)
        return d.T, None if aux is None else aux.T

    def after(z: Tensor) -> tuple[Tensor, Tensor | None]:
        if relu:
            return z.relu_(), None
        return F.gelu(z, approximate="tanh"), epilogs.pad_gelu_aux(z.T).T if keep else None

    def bias_then_kernel(x: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return after(gemm(Epilog.BIAS, w1, x.T, bias=b1).d.T)

    def linear_then_kernel(x: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return after(F.linear(x, w1, b1))

    def addmm_activation(x: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        bias = w1.new_zeros(w1.shape[0]) if b1 is None else b1
        return torch._addmm_activation(bias, x, w1.T, use_gelu=not relu), None

    found: Candidates = {}
    if relu or not exact:
        found[fused] = epilog
        if relu or not keep:
            found["addmm_activation"] = addmm_activation
    found[f"BIAS+{activation}"] = bias_then_kernel
    found[f"linear+{activation}"] = linear_then_kernel
    return found


def fc2(gemm: Gemm) -> Candidates:
    """(h, w2, b2) -> y."""
    return {
        "BIAS": lambda h, w2, b2: gemm(Epilog.BIAS, w2, h.T, bias=b2).d.T,
        "linear": F.linear,
    }


def wgrad(gemm: Gemm, need_w: bool, need_b: bool) -> Candidates:
    """(inputs, grad) -> dW (out, in), db (out,) of a linear layer; None for what is not needed."""
    if not (need_w and need_b):
        found: Candidates = {"sum": lambda inputs, grad: (None, grad.sum(dim=0))}
        if need_w:
            found = {
                "DEFAULT": lambda inputs, grad: (gemm(Epilog.DEFAULT, inputs.T, grad).d.T, None),
                "mm": lambda inputs, grad: (torch.mm(grad.T, inputs), None),
            }
        return found

    def bgradb(inputs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        d, _, bgrad = gemm(Epilog.BGRADB, inputs.T, grad)
        return d.T, bgrad

    return {
        "BGRADB": bgradb,
        "DEFAULT+sum": lambda inputs, grad: (gemm(Epilog.DEFAULT, inputs.T, grad).d.T, grad.sum(dim=0)),
        "mm+sum": lambda inputs, grad: (torch.mm(grad.T, inputs), grad.sum(dim=0)),
    }


def dgrad1(gemm: Gemm) -> Candidates:
    """(dz, w1) -> dx."""
    return {
        "DEFAULT": lambda dz, w1: gemm(Epilog.DEFAULT, w1.T, dz.T).d.T,
        "mm": torch.mm,
    }


def hidden(gemm: Gemm, activation: str, need_w: bool, need_b: bool, *, exact: bool) -> Candidates:
    """(dy, w2, h, aux, x) -> dz, dW1, db1; None for what is not needed. ``exact`` as for :func:`fc1`."""
    first = _activation_gradients(gemm, activation, exact=exact)
    second = wgrad(gemm, need_w, need_b) if need_w or need_b else {"": lambda inputs, grad: (None, None)}

    def pair(a: Callable[..., Tensor], b: Callable[..., Any]) -> Callable[..., Any]:
        def run(dy: Tensor, w2: Tensor, h: Tensor, aux: Tensor, x: Tensor) -> tuple[Tensor, Any, Any]:
            dz = a(dy, w2, h, aux)
            return dz, *b(x, dz)

        return run

    found = {f"{i},{j}".rstrip(","): pair(a, b) for i, a in first.items() for j, b in second.items()}
    if not need_b:
        return found

    # The bias gradient comes out of the first half here, so the second is a plain GEMM or nothing.
    plain = wgrad(gemm, True, False) if need_w else {"": lambda inputs, grad: (None, None)}

    def with_kernel(b: Callable[..., Any]) -> Callable[..., Any]:
        def run(dy: Tensor, w2: Tensor, h: Tensor, aux: Tensor, x: Tensor) -> tuple[Tensor, Any, Tensor]:
            saved = aux if activation == "gelu" else h
            dz, db = kernels.activation_gradient(gemm(Epilog.DEFAULT, w2.T, dy.T).d.T, saved, activation)
            return dz, b(x, dz)[0], db

        return run

    def with_bgrad(b: Callable[..., Any]) -> Callable[..., Any]:
        def run(dy: Tensor, w2: Tensor, h: Tensor, aux: Tensor, x: Tensor) -> tuple[Tensor, Any, Tensor | None]:
            d, _, db = gemm(Epilog.DGELU_BGRAD, w2.T, dy.T, aux=aux.T)
            return d.T, b(x, d.T)[0], db

        return run

    for name, weights in plain.items():
        if kernels.available():
            found[f"DEFAULT+kernel,{name}".rstrip(",")] = with_kernel(weights)
        if activation == "gelu" and not exact:
            found[f"DGELU_BGRAD,{name}".rstrip(",")] = with_bgrad(weights)
    return found


def _activation_gradients(gemm: Gemm, activation: str, *, exact: bool) -> Candidates:
    """(dy, w2, h, aux) -> dz."""
    threshold, gelu_backward = torch.ops.aten.threshold_backward, torch.ops.aten.gelu_backward

    def derivative(dh: Tensor, h: Tensor, aux: Tensor) -> Tensor:
        if activation == "relu":
            return threshold(dh, h, 0)
        return gelu_backward(dh, aux[:, : dh.shape[1]], approximate="tanh")

    after = "threshold" if activation == "relu" else "gelu_backward"
    found: Candidates = {}
    if activation == "gelu" and not exact:
        found["DGELU"] = lambda dy, w2, h, aux: gemm(Epilog.DGELU, w2.T, dy.T, aux=aux.T).d.T
    found[f"DEFAULT+{after}"] = lambda dy, w2, h, aux: derivative(gemm(Epilog.DEFAULT, w2.T, dy.T).d.T, h, aux)
    found[f"mm+{after}"] = lambda dy, w2, h, aux: derivative(torch.mm(dy, w2), h, aux)
    return found
