"""The textbook: what a cuBLASLt GEMM with an epilog computes, in torch operations.

A GEMM multiplies; its *epilog* is what happens to the product while it is still in registers, before it is written to
memory. Fusing the epilog saves reading and writing the whole result once more for each separate kernel.

Letters, for this file and for :mod:`fusedmlp.plans`:

    M  rows of the result: the features of a layer's output
    N  columns of the result: tokens
    K  the dimension that is summed over
    A  (M, K)    B  (K, N)    D  (M, N), the result

**Why everything is column-major.** cuBLASLt adds a bias along the rows of D, one value per row, and writes D column by
column. A linear layer in torch is Y = X Wᵀ + b with X (tokens, in) and W (out, in), both row-major, and b runs along
the *columns* of Y. Computing the transpose, Yᵀ = W Xᵀ + b, turns b into a column that fits. And it costs nothing: a
column-major Yᵀ (out, tokens) is, byte for byte, a row-major Y (tokens, out). So results come back here as (M, N) with
strides (1, M), and ``result.d.T`` is the ordinary contiguous tensor.

**The auxiliary matrix (aux).** A backward pass needs to know where the activation was. GELU keeps its input, in the
dtype of D; ReLU needs one bit per element. Both have the shape of D with M padded (:func:`gelu_aux_rows`,
:func:`relu_aux_rows`), because cuBLASLt wants their columns aligned.

Sources: the cuBLAS library documentation, section cublasLtEpilogue_t; nvmath-python, ``MatmulEpilog``.
"""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Epilog(StrEnum):
    """The epilogs of cuBLASLt that a two-layer perceptron can use, by nvmath's names."""

    DEFAULT = "DEFAULT"
    """D = A B"""
    BIAS = "BIAS"
    """D = A B + bias"""
    RELU_BIAS = "RELU_BIAS"
    """D = relu(A B + bias)"""
    GELU_BIAS = "GELU_BIAS"
    """D = gelu(A B + bias)"""
    RELU_AUX_BIAS = "RELU_AUX_BIAS"
    """RELU_BIAS, and aux = one bit per element: was it positive?"""
    GELU_AUX_BIAS = "GELU_AUX_BIAS"
    """GELU_BIAS, and aux = A B + bias"""
    DRELU = "DRELU"
    """D = A B where aux says positive, else 0"""
    DGELU = "DGELU"
    """D = A B * gelu'(aux)"""
    DRELU_BGRAD = "DRELU_BGRAD"
    """DRELU, and bgrad = D summed over tokens, (M,)"""
    DGELU_BGRAD = "DGELU_BGRAD"
    """DGELU, and bgrad = D summed over tokens, (M,)"""
    BGRADA = "BGRADA"
    """D = A B, and bgrad = A summed over K, (M,)"""
    BGRADB = "BGRADB"
    """D = A B, and bgrad = B summed over K, (N,)"""


HAS_BIAS = frozenset({Epilog.BIAS, Epilog.RELU_BIAS, Epilog.GELU_BIAS, Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS})
WRITES_AUX = frozenset({Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS})
READS_AUX = frozenset({Epilog.DRELU, Epilog.DGELU, Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD})
WRITES_BGRAD = frozenset({Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD, Epilog.BGRADA, Epilog.BGRADB})


class Result(NamedTuple):
    """What a GEMM with an epilog writes."""

    d: Tensor
    """(M, N), column-major: ``d.T`` is contiguous."""
    aux: Tensor | None = None
    """(padded M, N), column-major, for the *_AUX_BIAS epilogs."""
    bgrad: Tensor | None = None
    """(M,) or (N,) bias gradient, for the *BGRAD* epilogs."""


def gelu_aux_rows(m: int) -> int:
    """Rows of the aux matrix of GELU: M rounded up to a multiple of 8 elements."""
    return -(-m // 8) * 8


def relu_aux_rows(m: int) -> int:
    """Rows of the aux matrix of ReLU in bytes (8 elements each): M rounded up to a multiple of 128 bits."""
    return -(-m // 128) * 16


def gemm(epilog: Epilog, a: Tensor, b: Tensor, *, bias: Tensor | None = None, aux: Tensor | None = None) -> Result:
    """One GEMM with its epilog.

    Args:
        epilog: what to compute.
        a: (M, K).
        b: (K, N).
        bias: (M,), for epilogs with a bias; an absent bias is a bias of zeros.
        aux: (padded M, N), for epilogs that read what an *_AUX_BIAS epilog wrote.
    """
    match epilog:
        case Epilog.DEFAULT:
            return Result(product(a, b))
        case Epilog.BIAS:
            return Result(product(a, b, bias))
        case Epilog.RELU_BIAS:
            return Result(product(a, b, bias).relu_())
        case Epilog.GELU_BIAS:
            return Result(gelu(product(a, b, bias)))
        case Epilog.RELU_AUX_BIAS:
            z = product(a, b, bias)
            return Result(z.relu(), aux=pack_relu_mask(z))
        case Epilog.GELU_AUX_BIAS:
            z = product(a, b, bias)
            return Result(gelu(z), aux=pad_gelu_aux(z))
        case Epilog.DRELU:
            return Result(drelu(product(a, b), _given(aux, epilog)))
        case Epilog.DGELU:
            return Result(dgelu(product(a, b), _given(aux, epilog)))
        case Epilog.DRELU_BGRAD:
            d = drelu(product(a, b), _given(aux, epilog))
            return Result(d, bgrad=d.sum(dim=1))
        case Epilog.DGELU_BGRAD:
            d = dgelu(product(a, b), _given(aux, epilog))
            return Result(d, bgrad=d.sum(dim=1))
        case Epilog.BGRADA:
            return Result(product(a, b), bgrad=a.sum(dim=1))
        case Epilog.BGRADB:
            return Result(product(a, b), bgrad=b.sum(dim=0))


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A B (+ bias along the rows), (M, N), column-major: torch writes row-major, so it computes (Bᵀ Aᵀ)ᵀ."""
    return torch.mm(b.T, a.T).T if bias is None else torch.addmm(bias, b.T, a.T).T


def gelu(z: Tensor) -> Tensor:
    """GELU in the tanh approximation, the only one that cuBLASLt has.

    gelu(z) = z/2 (1 + tanh(u)) with u = sqrt(2/pi) (z + 0.044715 z³).
    """
    return F.gelu(z.T, approximate="tanh").T


def dgelu(grad: Tensor, aux: Tensor) -> Tensor:
    """``grad`` (M, N) times the derivative of :func:`gelu` at the first M rows of ``aux``.

    gelu'(z) = (1 + tanh(u))/2 + z/2 (1 - tanh²(u)) u' with u' = sqrt(2/pi) (1 + 3 * 0.044715 z²).
    """
    z = aux[: grad.shape[0]]
    return torch.ops.aten.gelu_backward(grad.T, z.T, approximate="tanh").T


def drelu(grad: Tensor, aux: Tensor) -> Tensor:
    """``grad`` (M, N) where the bit mask ``aux`` is set, else 0."""
    return torch.where(unpack_relu_mask(aux, grad.shape[0]).T, grad.T, grad.new_zeros(())).T


def pad_gelu_aux(z: Tensor) -> Tensor:
    """GELU's aux matrix: ``z`` (M, N) with M padded by zeros to a multiple of 8; ``z`` itself where that is M."""
    missing = gelu_aux_rows(z.shape[0]) - z.shape[0]
    return F.pad(z.T, (0, missing)).T if missing else z


def pack_relu_mask(z: Tensor) -> Tensor:
    """ReLU's aux matrix as cuBLASLt stores it: (relu_aux_rows(M), N) uint8, column-major.

    Bit ``i`` (least significant first) of byte ``r`` in column ``n`` says whether ``z[8 r + i, n] > 0``.
    """
    m, n = z.shape
    bits = F.pad((z.T > 0).to(torch.uint8), (0, relu_aux_rows(m) * 8 - m))  # (N, padded M)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=z.device)
    return (bits.view(n, relu_aux_rows(m), 8) * weights).sum(dim=2, dtype=torch.uint8).T


def unpack_relu_mask(aux: Tensor, m: int) -> Tensor:
    """The inverse of :func:`pack_relu_mask`: (M, N) bool, column-major."""
    shifts = torch.arange(8, dtype=torch.uint8, device=aux.device)
    bits = (aux.T.unsqueeze(2) >> shifts) & 1  # (N, bytes, 8)
    return bits.flatten(1)[:, :m].bool().T


def _given(aux: Tensor | None, epilog: Epilog) -> Tensor:
    if aux is None:
        raise ValueError(f"the epilog {epilog} reads an aux matrix, and none was given")
    return aux
