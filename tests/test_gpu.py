"""The nvmath engine on a real GPU: ``pytest -m gpu``. Tolerances are set by torch's own error at the same dtype."""

import gc
import threading

import pytest
import torch
from mlp_cases import NAMES, fused, make_case, relative_error, torch_answer

from fusedmlp import epilogs, gemms, plans, recipes
from fusedmlp.epilogs import HAS_BIAS, READS_AUX, WRITES_AUX, WRITES_BGRAD, Epilog
from fusedmlp.mlp import FusedMLP, TorchMLP, fused_mlp
from fusedmlp.plans import Unsupported
from fusedmlp.recipes import Options

pytestmark = pytest.mark.gpu

STRICT = Options(engine="nvmath", on_unsupported="error", search="heuristic")
HALF_AND_SINGLE = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _no_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    recipes.forget()


def rounding(dtype, gelu):
    """One rounding step of ``dtype``; in fp32, cuBLASLt's tanh shows: it is good to about 3e-6 (13.1, H200)."""
    return 4e-6 if gelu and dtype is torch.float32 else torch.finfo(dtype).eps


def no_worse_than_torch(actual, case):
    """Error against float64 at most twice torch's own at that dtype, plus one rounding step where torch is exact."""
    exact, theirs = torch_answer(case.to(torch.float64)), torch_answer(case)
    floor = rounding(case.x.dtype, case.activation == "gelu")
    for name in NAMES:
        if exact[name] is not None:
            ours = relative_error(actual[name], exact[name])
            limit = 2 * relative_error(theirs[name], exact[name]) + floor
            assert ours <= limit, f"{name}: {ours:.2e} > {limit:.2e}"


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 129, 64), (96, 64, 200), (100, 7, 32), (3072, 512, 768)])
@pytest.mark.parametrize("epilog", list(Epilog))
def test_every_epilog_is_what_the_textbook_says(epilog, m, n, k, dtype):
    g = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(m, k, generator=g, device="cuda").to(dtype)  # row-major, as a weight
    b = torch.randn(n, k, generator=g, device="cuda").to(dtype).T  # column-major, as inputs
    if epilog in (Epilog.BGRADA, Epilog.BGRADB):  # cuBLASLt takes these with A column-major only
        a = a.T.contiguous().T
    if epilog is Epilog.BGRADB:  # as in the weight gradient
        b = b.contiguous()
    z = torch.randn(n, m, generator=g, device="cuda").to(dtype).T
    bias = torch.randn(m, generator=g, device="cuda").to(dtype) if epilog in HAS_BIAS else None
    aux = None
    if epilog in READS_AUX:
        aux = epilogs.pack_relu_mask(z) if "RELU" in epilog else epilogs.pad_gelu_aux(z)
    actual = gemms.gemm(epilog, a, b, bias=bias, aux=aux, tune=False)

    def wide(t):
        return t if t is None or t.dtype is torch.uint8 else t.double()

    expected = epilogs.gemm(epilog, wide(a), wide(b), bias=wide(bias), aux=wide(aux))
    textbook = epilogs.gemm(epilog, a, b, bias=bias, aux=aux)
    eps = rounding(dtype, "GELU" in epilog)
    assert relative_error(actual.d, expected.d) <= 2 * relative_error(textbook.d, expected.d) + eps
    assert actual.d.shape == (m, n)
    assert actual.d.T.is_contiguous()
    if epilog in WRITES_AUX:
        assert actual.aux.shape == textbook.aux.shape
        if "GELU" in epilog:
            assert relative_error(actual.aux[:m], expected.aux[:m]) <= 2 * eps
        else:
            pre = wide(a) @ wide(b) + wide(bias)[:, None]
            sure = pre.abs() > 1e-2 * pre.abs().max()  # near zero the sign is a matter of rounding
            mask = epilogs.unpack_relu_mask(actual.aux, m)
            assert torch.equal(mask[sure], (pre > 0)[sure])
    if epilog in WRITES_BGRAD:
        limit = 2 * relative_error(textbook.bgrad, expected.bgrad) + eps
        assert relative_error(actual.bgrad, expected.bgrad) <= limit


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden"), [((4, 128), 128, 512), ((129,), 64, 192), ((1,), 768, 3072), ((2, 3, 5), 256, 1024)]
)
def test_values_and_gradients(tokens, width, hidden, activation, dtype):
    case = make_case(tokens, width, hidden, None, activation, dtype=dtype, device="cuda")
    no_worse_than_torch(fused(case, STRICT), case)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(("bias1", "bias2"), [(True, False), (False, True), (False, False)])
def test_absent_biases(activation, bias1, bias2):
    case = make_case((64,), 64, 256, None, activation, bias1, bias2, torch.bfloat16, "cuda")
    no_worse_than_torch(fused(case, STRICT), case)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "out", "dtype"),
    [
        ((7,), 33, 100, 33, torch.bfloat16),
        ((16,), 64, 256, 1, torch.bfloat16),
        ((7,), 32, 100, 32, torch.float16),
        ((5,), 17, 30, 9, torch.float32),
        ((5,), 16, 32, 16, torch.float64),
        ((0,), 16, 32, 16, torch.bfloat16),
    ],
)
def test_awkward_problems_are_right_with_or_without_fallback(tokens, width, hidden, out, dtype, activation):
    case = make_case(tokens, width, hidden, out, activation, dtype=dtype, device="cuda")
    no_worse_than_torch(fused(case, Options(search="heuristic")), case)


def test_auto_is_nvmath_here_and_training_shapes_need_no_fallback():
    assert recipes.engine_for(torch.device("cuda:0"), Options()) == ("nvmath", None)
    for activation in ("gelu", "relu"):
        case = make_case((8, 128), 128, 512, None, activation, dtype=torch.bfloat16, device="cuda")
        fused(case)
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize("layout", ["transposed", "offset", "sliced", "bias slice"])
def test_strides_and_alignments(layout):
    case = make_case((6, 16), 64, 256, dtype=torch.bfloat16, device="cuda")
    if layout == "transposed":
        case.x = case.x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "offset":  # two bytes off: a plan made for aligned pointers would fault
        case.x = torch.cat((case.x.new_zeros(1), case.x.flatten()))[1:].view(6, 16, 64)
        assert case.x.data_ptr() % 16 == 2
    elif layout == "sliced":
        case.x = torch.cat((case.x, case.x), -1)[..., 5:69]
    else:
        case.b1, case.b2 = torch.cat((case.b1, case.b1))[3:259], torch.cat((case.b2, case.b2))[1:65]
    fused(make_case((6, 16), 64, 256, dtype=torch.bfloat16, device="cuda"), STRICT)  # the aligned plan comes first
    no_worse_than_torch(fused(case, STRICT), case)
    torch.cuda.synchronize()


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_opcheck(activation):
    case = make_case((64,), 64, 256, None, activation, device="cuda")
    leaves = tuple(t.requires_grad_() for t in case.tensors)
    how = (activation, "nvmath", "error", "heuristic", None)
    torch.library.opcheck(torch.ops.fusedmlp.mlp.default, (*leaves, *how))
    plain = tuple(t.detach() for t in leaves)
    torch.library.opcheck(torch.ops.fusedmlp.mlp_inference.default, (*plain, *how))
    _, h, aux = torch.ops.fusedmlp.mlp(*plain, *how)
    arguments = (case.dy, plain[0], h, aux, plain[1], plain[3], [True] * 5, *how)
    torch.library.opcheck(torch.ops.fusedmlp.mlp_backward.default, arguments)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_compiled(activation, mode):
    torch._dynamo.reset()
    mlp = FusedMLP(128, 512, activation, options=STRICT).cuda()
    plain = TorchMLP(128, 512, activation).cuda()
    plain.load_state_dict(mlp.state_dict())
    compiled = torch.compile(mlp, fullgraph=True, mode=mode)
    for _ in range(5):  # the graph is recorded in the second call and replayed from the third on
        x = torch.randn(256, 128, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y, expected = compiled(x), plain(x)
        y.float().square().sum().backward()
        expected.float().square().sum().backward()
        assert relative_error(y, expected) < 1e-2
        for p, q in zip(mlp.parameters(), plain.parameters(), strict=True):
            assert relative_error(p.grad, q.grad) < 2e-2
            p.grad = q.grad = None


def test_manual_capture_and_replay():
    mlp = FusedMLP(128, 512, options=STRICT).cuda().bfloat16()
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            mlp(x).float().square().sum().backward()
    torch.cuda.synchronize()
    for p in mlp.parameters():
        p.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = mlp(x)
        y.float().square().sum().backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        mlp.fc1.weight.mul_(0.5)
    for p in mlp.parameters():
        p.grad.zero_()
    graph.replay()
    captured = [p.grad.clone() for p in mlp.parameters()]
    replayed = y.clone()
    for p in mlp.parameters():
        p.grad.zero_()
    expected = mlp(x)
    expected.float().square().sum().backward()
    assert torch.equal(replayed, expected)
    assert all(torch.equal(a, p.grad) for a, p in zip(captured, mlp.parameters(), strict=True))


def test_cold_capture_is_a_clear_error_and_leaves_the_device_usable():
    gemms.cache.clear()
    mlp = FusedMLP(64, 256, options=STRICT).cuda().bfloat16()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mlp(x)
    assert mlp(x).isfinite().all()


def test_other_streams_and_threads():
    mlp = FusedMLP(128, 512, options=STRICT).cuda().bfloat16()
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    expected = mlp(x).detach()
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = mlp(x)
                y.float().sum().backward()
                if not torch.equal(y, expected):
                    wrong.append(1)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_memory_is_flat_over_many_token_counts_and_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(gemms.cache, "capacity", 16)
    mlp = FusedMLP(64, 256, options=STRICT).cuda().bfloat16()

    def step(tokens):
        mlp(torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)).float().sum().backward()

    for tokens in range(8, 200, 8):
        step(tokens)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for tokens in range(200, 500, 4):
        step(tokens)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert len(gemms.cache) <= 16
    gemms.cache.clear()


def test_operands_are_not_kept_alive():
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    mlp = FusedMLP(64, 256, options=STRICT).cuda().bfloat16()
    with torch.no_grad():
        mlp(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = mlp(x.clone())
    y.float().sum().backward()
    for p in mlp.parameters():
        p.grad = None
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_nan_is_not_hidden():
    for activation in ("gelu", "relu"):
        case = make_case((32,), 64, 256, None, activation, dtype=torch.bfloat16, device="cuda")
        case.w1[3, 5] = torch.nan
        with torch.no_grad():
            _, h, _ = torch.ops.fusedmlp.mlp(*case.tensors, activation, "nvmath", "error", "heuristic", None)
            y = torch.ops.fusedmlp.mlp_inference(*case.tensors, activation, "nvmath", "error", "heuristic", None)
        assert h[:, 3].isnan().all()
        assert y.isnan().all()


def test_compute_types():
    case = make_case((256,), 256, 1024, device="cuda")
    exact = torch_answer(case.to(torch.float64))["y"]
    errors = {}
    for name in ("COMPUTE_32F", "COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_16BF", "COMPUTE_32F_FAST_16F"):
        with torch.no_grad():
            y = fused_mlp(*case.tensors, options=Options("nvmath", "error", "heuristic", name))
        errors[name] = relative_error(y, exact)
    assert errors["COMPUTE_32F"] < 2e-6  # fp32 products
    assert 1e-5 < errors["COMPUTE_32F_FAST_TF32"] < 2e-3  # operands rounded to 10 bits of mantissa
    half = make_case((16,), 64, 256, dtype=torch.float16, device="cuda")
    with pytest.raises(Unsupported, match=r"COMPUTE_32F_FAST_16F does not take float16 tensors"):
        fused(half, Options("nvmath", "error", "heuristic", "COMPUTE_32F_FAST_16F"))
    no_worse = fused(half, Options("nvmath", "error", "heuristic", "COMPUTE_16F"))
    assert relative_error(no_worse["y"], torch_answer(half.to(torch.float64))["y"]) < 1e-2  # fp16 accumulation


def test_autotuned_plans_agree_with_heuristic_ones():
    case = make_case((512,), 256, 1024, dtype=torch.bfloat16, device="cuda")
    tuned = Options("nvmath", "error", "measured")
    before = plans.stats.tune_ms
    no_worse_than_torch(fused(case, tuned), case)
    assert plans.stats.tune_ms > before
