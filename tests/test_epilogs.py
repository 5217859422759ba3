"""The textbook: each epilog against its definition, with torch's autograd as the judge of derivatives."""

import math

import pytest
import torch
from torch.nn import functional as F

from fusedmlp.epilogs import (
    HAS_BIAS,
    READS_AUX,
    WRITES_AUX,
    WRITES_BGRAD,
    Epilog,
    dgelu,
    gelu,
    gelu_aux_rows,
    gemm,
    pack_relu_mask,
    relu_aux_rows,
    unpack_relu_mask,
)

M, N, K = 100, 7, 33  # M is a multiple of neither 8 nor 128, so padding shows


@pytest.fixture
def operands() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(M, K, generator=g, dtype=torch.float64),
        "b": torch.randn(N, K, generator=g, dtype=torch.float64).T,
        "bias": torch.randn(M, generator=g, dtype=torch.float64),
        "z": torch.randn(N, M, generator=g, dtype=torch.float64).T,
    }


def derivative(activation, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(activation(z).sum(), z)[0]


def expected(epilog, a, b, bias, z):
    """d, aux (unpacked) and bgrad by definition; z is what aux stands for in the derivative epilogs."""
    act = (lambda t: F.gelu(t, approximate="tanh")) if "GELU" in epilog else F.relu
    acc = a @ b
    if epilog in HAS_BIAS:
        acc = acc + bias[:, None]
    if epilog in READS_AUX:
        acc = acc * derivative(act, z)
    elif "RELU" in epilog or "GELU" in epilog:
        acc = act(acc)
    bgrad = {"BGRADA": a.sum(1), "BGRADB": b.sum(0)}.get(epilog.value, acc.sum(1))
    return acc, bgrad


@pytest.mark.parametrize("epilog", list(Epilog))
def test_epilog_matches_its_definition(epilog, operands):
    a, b, bias, z = operands["a"], operands["b"], operands["bias"], operands["z"]
    aux = None
    if epilog in READS_AUX:
        aux = pack_relu_mask(z) if "RELU" in epilog else F.pad(z.T, (0, gelu_aux_rows(M) - M), value=7.0).T
    result = gemm(epilog, a, b, bias=bias if epilog in HAS_BIAS else None, aux=aux)
    d, bgrad = expected(epilog, a, b, bias, z)
    torch.testing.assert_close(result.d, d, rtol=1e-12, atol=1e-12)  # float64: only the order of additions differs
    assert result.d.T.is_contiguous(), "D is column-major"
    assert (result.aux is not None) == (epilog in WRITES_AUX)
    assert (result.bgrad is not None) == (epilog in WRITES_BGRAD)
    if result.bgrad is not None:
        torch.testing.assert_close(result.bgrad, bgrad, rtol=1e-12, atol=1e-12)
    if result.aux is not None:
        before = a @ b + bias[:, None]
        if "GELU" in epilog:
            assert result.aux.shape == (104, N)
            torch.testing.assert_close(result.aux[:M], before, rtol=1e-12, atol=1e-12)
            assert not result.aux[M:].any()
        else:
            assert result.aux.shape == (16, N)
            assert torch.equal(unpack_relu_mask(result.aux, M), before > 0)
        assert result.aux.T.is_contiguous(), "aux is column-major"


@pytest.mark.parametrize("epilog", sorted(READS_AUX))
def test_missing_aux_is_an_error(epilog, operands):
    with pytest.raises(ValueError, match="reads an aux matrix"):
        gemm(epilog, operands["a"], operands["b"])


def test_absent_bias_is_a_bias_of_zeros(operands):
    a, b = operands["a"], operands["b"]
    for epilog in sorted(HAS_BIAS):
        with_zeros = gemm(epilog, a, b, bias=torch.zeros(M, dtype=torch.float64))
        without = gemm(epilog, a, b)
        torch.testing.assert_close(without.d, with_zeros.d, rtol=1e-13, atol=1e-13)


def test_mask_has_the_least_significant_bit_first():
    z = torch.full((130, 2), -1.0)
    z[0, 0] = z[9, 0] = z[129, 1] = 1.0
    mask = pack_relu_mask(z)
    assert mask.shape == (32, 2)  # 130 bits need two groups of 128
    assert mask[:, 0].tolist() == [1, 2] + [0] * 30
    assert mask[:, 1].tolist() == [0] * 16 + [2] + [0] * 15


def test_aux_padding():
    assert [gelu_aux_rows(m) for m in (1, 8, 9, 100)] == [8, 8, 16, 104]
    assert [relu_aux_rows(m) for m in (1, 128, 129, 3072)] == [16, 16, 32, 384]


def test_gelu_is_the_tanh_approximation_of_the_docstrings():
    z = torch.linspace(-6, 6, 101, dtype=torch.float64)[:, None]
    u = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
    torch.testing.assert_close(gelu(z), z / 2 * (1 + u.tanh()), rtol=1e-12, atol=1e-14)
    written = (1 + u.tanh()) / 2 + z / 2 * (1 - u.tanh() ** 2) * du
    torch.testing.assert_close(dgelu(torch.ones_like(z), z), written, rtol=1e-12, atol=1e-14)


def test_nan_is_not_hidden(operands):
    a = operands["a"].clone()
    a[3, 0] = torch.nan
    for epilog in (Epilog.RELU_BIAS, Epilog.RELU_AUX_BIAS, Epilog.GELU_BIAS, Epilog.GELU_AUX_BIAS):
        d = gemm(epilog, a, operands["b"]).d
        assert d[3].isnan().all(), epilog
        assert d.isnan().sum() == N, epilog
