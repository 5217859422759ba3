"""The operators on the reference engine: values, gradients, and how they sit in torch."""

import itertools
import logging

import pytest
import torch
from mlp_cases import NAMES, fused, make_case, relative_error, torch_answer

from fusedmlp import epilogs, recipes
from fusedmlp.mlp import FusedMLP, TorchMLP, fused_mlp
from fusedmlp.plans import Unsupported
from fusedmlp.recipes import Options

HOW = ("auto", "fallback", "measured", None)


def assert_same(actual, expected, tolerance):
    for name in NAMES:
        assert (actual[name] is None) == (expected[name] is None), name
        if actual[name] is not None:
            assert actual[name].shape == expected[name].shape, name
            assert relative_error(actual[name], expected[name]) <= tolerance, name


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(("bias1", "bias2"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "out"),
    [((5, 7), 24, 40, 24), ((1,), 16, 100, 16), ((129,), 31, 192, 1), ((2, 3, 4), 1, 8, 5), ((7,), 20, 1, 20)],
)
def test_values_and_gradients_match_torch_in_float64(activation, bias1, bias2, tokens, width, hidden, out):
    case = make_case(tokens, width, hidden, out, activation, bias1, bias2, torch.float64)
    assert_same(fused(case), torch_answer(case), 1e-13)  # float64 rounding over at most 192 terms


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(activation, bias):
    case = make_case((4, 3), 6, 10, 5, activation, bias, bias, torch.float64)
    leaves = [t.requires_grad_() for t in case.tensors if t is not None]

    def function(*given):
        given = iter(given)
        return fused_mlp(*(None if t is None else next(given) for t in case.tensors), activation=activation)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(activation, bias):
    case = make_case((4, 3), 12, 20, 12, activation, bias, bias)
    x, w1, b1, w2, b2 = (t if t is None else t.requires_grad_() for t in case.tensors)
    torch.library.opcheck(torch.ops.fusedmlp.mlp.default, (x, w1, b1, w2, b2, activation, *HOW))
    plain = tuple(t if t is None else t.detach() for t in (x, w1, b1, w2, b2))
    torch.library.opcheck(torch.ops.fusedmlp.mlp_inference.default, (*plain, activation, *HOW))
    _, h, aux = torch.ops.fusedmlp.mlp(*plain, activation, *HOW)
    for needs in ([True] * 5, [False, True, False, False, True]):
        arguments = (case.dy, plain[0], h, aux, plain[1], plain[3], needs, activation, *HOW)
        torch.library.opcheck(torch.ops.fusedmlp.mlp_backward.default, arguments)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=5)))
def test_only_gradients_that_were_asked_for_cost_a_gemm(activation, needs, monkeypatch):
    case = make_case(activation=activation, dtype=torch.float64)
    expected = torch_answer(case)
    epilogs_run = []
    real = epilogs.gemm
    monkeypatch.setattr(epilogs, "gemm", lambda e, *a, **k: (epilogs_run.append(e), real(e, *a, **k))[1])
    leaves = [t.clone().requires_grad_(n) for t, n in zip(case.tensors, needs, strict=True)]
    y = fused_mlp(*leaves, activation=activation)
    epilogs_run.clear()
    if not any(needs):
        assert not y.requires_grad
        return
    y.backward(case.dy)
    for leaf, need, name in zip(leaves, needs, NAMES[1:], strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert relative_error(leaf.grad, expected[name]) <= 1e-13
    x, w1, b1, w2, _ = needs
    assert len(epilogs_run) == w2 + x + w1 + (x or w1 or b1)


def test_nothing_is_kept_without_gradients(monkeypatch):
    seen = []
    real = epilogs.gemm
    monkeypatch.setattr(epilogs, "gemm", lambda e, *a, **k: (seen.append(e), real(e, *a, **k))[1])
    mlp = FusedMLP(16, 32)
    with torch.no_grad():
        mlp(torch.randn(3, 16))
    assert seen == ["GELU_BIAS", "BIAS"]


def test_graph_can_be_walked_twice():
    for activation in ("gelu", "relu"):
        case = make_case(activation=activation)
        leaves = [t.requires_grad_() for t in case.tensors]
        y = fused_mlp(*leaves, activation=activation)
        first = torch.autograd.grad(y, leaves, case.dy, retain_graph=True)
        second = torch.autograd.grad(y, leaves, case.dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_refused():
    case = make_case()
    x = case.x.requires_grad_()
    (g,) = torch.autograd.grad(fused_mlp(*case.tensors).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


@pytest.mark.parametrize("tokens", [(0,), (3, 0), (0, 5)])
def test_empty_batch(tokens):
    case = make_case(tokens)
    result = fused(case)
    assert result["y"].shape == (*tokens, 24)
    assert result["dx"].shape == (*tokens, 24)
    assert all(not result[n].any() for n in NAMES[2:])
    assert result["dW1"].shape == case.w1.shape


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded"])
def test_strides_and_offsets(layout):
    case = make_case((6, 5), dtype=torch.float64)
    if layout == "transposed":
        case.x = case.x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "sliced":
        case.x = torch.cat((case.x, case.x), dim=-1)[..., 3:27]
    elif layout == "offset":
        case.x = torch.cat((torch.zeros(1, dtype=torch.float64), case.x.flatten()))[1:].view(6, 5, 24)
    else:
        case.x = case.x[:1].expand(6, 5, 24)
    case.b1 = torch.cat((case.b1, case.b1))[3:43]
    case.w1 = case.w1.T.contiguous().T
    assert_same(fused(case), torch_answer(case), 1e-13)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_compiles_without_graph_breaks(activation, dynamic):
    torch._dynamo.reset()
    mlp = FusedMLP(16, 32, activation).double()
    compiled = torch.compile(mlp, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
        expected = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
        actual = torch.autograd.grad(compiled(x).square().sum(), [x, *mlp.parameters()])
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_weights(compiled):
    torch._dynamo.reset()
    fused_arm, torch_arm = FusedMLP(16, 32), TorchMLP(16, 32)
    torch_arm.load_state_dict(fused_arm.state_dict())
    run = torch.compile(fused_arm, fullgraph=True) if compiled else fused_arm
    x = torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = run(x), torch_arm(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)  # the reference engine calls the same kernels
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for p, q in zip(fused_arm.parameters(), torch_arm.parameters(), strict=True):
        assert p.grad.dtype is torch.float32
        assert relative_error(p.grad, q.grad) < 2e-2  # bf16 keeps 8 bits; sums over 8 tokens are rounded apart


def test_unsupported_falls_back_once_visibly_or_raises(caplog):
    case = make_case()
    asked = Options(engine="nvmath")
    recipes._fallbacks.clear()
    with caplog.at_level(logging.WARNING, logger="fusedmlp"):
        assert_same(fused(case, asked), torch_answer(case), 1e-6)  # fp32
        fused(case, asked)
    messages = [r.message for r in caplog.records]
    assert len(messages) == 1
    assert "needs a CUDA device" in messages[0]
    assert sum(recipes.fallback_reasons().values()) == 4  # two forward, two backward
    with pytest.raises(Unsupported, match="needs a CUDA device"):
        fused(case, Options(engine="nvmath", on_unsupported="error"))
    recipes._fallbacks.clear()


def test_auto_on_cpu_is_no_fallback():
    recipes._fallbacks.clear()
    fused(make_case())
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "not one of gelu, relu"),
        ({"x": torch.randn(3, 23)}, "do not fit"),
        ({"w2": torch.randn(24, 39)}, "do not fit"),
        ({"b1": torch.randn(24)}, "fc1_bias has shape"),
        ({"b2": torch.randn(1, 24)}, "fc2_bias has shape"),
        ({"w1": torch.randn(40, 24, dtype=torch.float64)}, "different dtypes"),
    ],
)
def test_bad_arguments_are_named(change, message):
    case = make_case()
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        fused_mlp(*case.tensors, activation=case.activation)


def test_one_dimensional_input():
    case = make_case(())
    assert_same(fused(case), torch_answer(case), 1e-6)  # fp32
