"""Plans and the choice of engine without a GPU: what identifies a problem, what is remembered, what is given up.

A :class:`FakePlan` stands where cuBLASLt would be asked; everything around it is the real code.
"""

import gc
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from mlp_cases import make_case, relative_error

from fusedmlp import epilogs, plans, recipes
from fusedmlp.epilogs import HAS_BIAS, Epilog
from fusedmlp.plans import PlanCache, PlanStats, Unsupported
from fusedmlp.recipes import Needs, Options

CPU = torch.device("cpu")


class FakePlan:
    """Plans nothing and computes with the textbook; the class attributes steer and record."""

    made: list[tuple]
    refuse: set[Epilog]
    seconds: float

    def __init__(self, epilog, a, b, bias, aux, compute_type, tune):
        FakePlan.made.append((epilog, tuple(a.shape), tuple(b.shape), a.dtype, compute_type, tune))
        time.sleep(FakePlan.seconds)
        if epilog in FakePlan.refuse:
            raise Unsupported(f"{epilog} is refused by the fake")
        self.epilog = epilog

    def run(self, a, b, bias, aux):
        return epilogs.gemm(self.epilog, a, b, bias=bias, aux=aux)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    FakePlan.made, FakePlan.refuse, FakePlan.seconds = [], set(), 0.0
    monkeypatch.setattr(plans, "Plan", FakePlan)
    monkeypatch.setattr(plans, "cache", PlanCache())
    monkeypatch.setattr(plans, "stats", PlanStats())
    monkeypatch.setattr(plans, "_zeros", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recipes, "_refused", {})
    monkeypatch.setattr(recipes, "_fallbacks", Counter())
    return FakePlan


def matrix(rows, cols, dtype=torch.float32, *, alignment=256, column_major=False, ld=None):
    """A matrix whose pointer is a multiple of ``alignment`` and of no larger power of two, unless that is 256."""
    size = torch.empty((), dtype=dtype).element_size()
    outer, inner = (cols, rows) if column_major else (rows, cols)
    ld = ld or inner
    buffer = torch.zeros(outer * ld * size + 1024, dtype=torch.uint8)
    start = -buffer.data_ptr() % 512 + (alignment if alignment < 256 else 0)
    t = buffer[start : start + outer * ld * size].view(dtype).view(outer, ld)[:, :inner]
    t.copy_(torch.randn(outer, inner, generator=torch.Generator().manual_seed(outer * 1000 + inner)))
    t = t.T if column_major else t
    assert t.data_ptr() % alignment == 0
    assert alignment == 256 or t.data_ptr() % (2 * alignment) != 0
    return t


def find(cache, epilog=Epilog.DEFAULT, a=None, b=None, compute_type=None, tune=True):
    a = matrix(8, 16) if a is None else a
    b = matrix(16, 4, column_major=True) if b is None else b
    return cache.find(epilog, a, b, None, None, compute_type, tune)


VARIATIONS = {
    "epilog": {"epilog": Epilog.BGRADB},
    "rows of A": {"a": matrix(9, 16)},
    "columns of B": {"b": matrix(16, 5, column_major=True)},
    "order of A": {"a": matrix(8, 16, column_major=True)},
    "order of B": {"b": matrix(16, 4)},
    "leading dimension of A": {"a": matrix(8, 16, ld=24)},
    "leading dimension of B": {"b": matrix(16, 4, column_major=True, ld=24)},
    "alignment of A": {"a": matrix(8, 16, alignment=16)},
    "alignment of B": {"b": matrix(16, 4, column_major=True, alignment=32)},
    "bf16": {"a": matrix(8, 16, torch.bfloat16), "b": matrix(16, 4, torch.bfloat16, column_major=True)},
    "fp16": {"a": matrix(8, 16, torch.float16), "b": matrix(16, 4, torch.float16, column_major=True)},
    "compute type": {"compute_type": "COMPUTE_32F_FAST_TF32"},
    "tuning": {"tune": False},
}


@pytest.mark.parametrize("what", VARIATIONS)
def test_another_problem_gets_another_plan(what):
    cache = PlanCache()
    plain, other = find(cache), find(cache, **VARIATIONS[what])
    assert plain is not other
    assert find(cache) is plain
    assert find(cache, **VARIATIONS[what]) is other
    assert (len(cache), len(FakePlan.made)) == (2, 2)


def test_all_variations_are_distinct():
    cache = PlanCache()
    found = [find(cache), *(find(cache, **v) for v in VARIATIONS.values())]
    assert len({id(plan) for plan in found}) == len(cache) == len(VARIATIONS) + 1


def test_other_tensors_of_the_same_problem_share_a_plan():
    cache = PlanCache()
    first = find(cache)
    assert find(cache, a=matrix(8, 16), b=matrix(16, 4, column_major=True)) is first
    assert len(FakePlan.made) == 1


def test_hits_and_misses_are_counted():
    for _ in range(3):
        find(plans.cache)
    find(plans.cache, tune=False)
    row = plans.stats_row()
    assert (row["plans"], row["plan_misses"], row["plan_hits"]) == (2, 2, 2)


def test_least_recently_used_goes_first():
    cache = PlanCache(capacity=3)
    a, b, c, d = (matrix(rows, 16) for rows in (1, 2, 3, 4))
    plan_a, plan_b, plan_c = (find(cache, a=t) for t in (a, b, c))
    assert find(cache, a=a) is plan_a  # now b is the oldest
    find(cache, a=d)
    assert len(cache) == 3
    made = len(FakePlan.made)
    assert find(cache, a=a) is plan_a
    assert find(cache, a=c) is plan_c
    assert len(FakePlan.made) == made
    assert find(cache, a=b) is not plan_b
    assert len(FakePlan.made) == made + 1


def test_the_cache_is_bounded_also_with_refusals():
    FakePlan.refuse = {Epilog.BGRADB}
    cache = PlanCache(capacity=4)
    for rows in range(1, 12):
        with pytest.raises(Unsupported) if rows % 2 else nullcontext():
            find(cache, Epilog.BGRADB if rows % 2 else Epilog.DEFAULT, a=matrix(rows, 16))
        assert len(cache) == min(rows, 4)
    cache.clear()
    assert len(cache) == 0


def test_a_refusal_is_remembered_and_not_planned_again():
    FakePlan.refuse = {Epilog.DEFAULT}
    cache = PlanCache()
    for _ in range(3):
        with pytest.raises(Unsupported, match="DEFAULT is refused by the fake"):
            find(cache)
    assert len(FakePlan.made) == 1
    assert plans.stats.plans == plans.stats.plan_hits == 0
    assert plans.stats.plan_misses == 1


def test_a_refusal_keeps_no_operand_alive():
    FakePlan.refuse = {Epilog.DEFAULT}
    cache = PlanCache()
    a = matrix(8, 16)
    alive = weakref.ref(a)
    with pytest.raises(Unsupported):
        find(cache, a=a)
    del a
    gc.collect()  # pytest.raises made reference cycles of its own
    assert alive() is None
    assert len(cache) == 1


def test_an_unexpected_error_is_not_remembered(monkeypatch):
    cache = PlanCache()

    def broken(*args):
        raise torch.OutOfMemoryError("no memory for the workspace")

    with monkeypatch.context() as patch:
        patch.setattr(plans, "Plan", broken)
        with pytest.raises(torch.OutOfMemoryError):
            find(cache)
    assert len(cache) == 0
    assert isinstance(find(cache), FakePlan)


def test_many_threads_plan_a_problem_once():
    FakePlan.seconds = 0.05
    cache, count = PlanCache(), 16
    start, found = threading.Barrier(count), []

    def ask():
        start.wait()
        found.append(find(cache))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == count
    assert len(FakePlan.made) == len({id(p) for p in found}) == 1
    assert (plans.stats.plan_misses, plans.stats.plan_hits) == (1, count - 1)


def test_planning_is_refused_during_graph_capture_and_known_plans_are_not(monkeypatch):
    cache = PlanCache()
    known = find(cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert find(cache) is known
    with pytest.raises(RuntimeError, match="before capturing") as refusal:
        find(cache, Epilog.BGRADB)
    assert not isinstance(refusal.value, Unsupported)  # falling back during capture would hide the mistake
    assert "BGRADB" in str(refusal.value)
    assert len(cache) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert isinstance(find(cache, Epilog.BGRADB), FakePlan)


def test_a_matrix_that_is_neither_row_nor_column_major_is_refused():
    strided = torch.zeros(16, 64)[::2, ::2]
    with pytest.raises(Unsupported, match=r"strides \(128, 2\)"):
        find(PlanCache(), a=strided)


@pytest.mark.parametrize("epilog", [Epilog.DEFAULT, Epilog.BIAS, Epilog.GELU_AUX_BIAS, Epilog.BGRADB])
@pytest.mark.parametrize("offset", [0, 1])
def test_gemm_computes_whatever_the_alignment(epilog, offset):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size + offset, generator=g)[offset:].view(rows, -1) for size, rows in ((96, 8), (60, 12)))
    bias = torch.randn(8 + offset, generator=g)[offset:] if epilog in HAS_BIAS else None
    actual = plans.gemm(epilog, a, b, bias=bias)
    expected = epilogs.gemm(epilog, a, b, bias=bias)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)  # the same fp32 kernel; a copy may take another path in the BLAS
    assert FakePlan.made == [(epilog, (8, 12), (12, 5), torch.float32, None, True)]


def test_an_absent_bias_is_one_of_zeros_made_once():
    a, b = torch.randn(8, 12), torch.randn(12, 5)
    for _ in range(2):
        torch.testing.assert_close(plans.gemm(Epilog.BIAS, a, b).d, (b.T @ a.T).T)
    ((key, zeros),) = plans._zeros.items()
    assert key == (8, torch.float32, CPU)
    assert not zeros.any()


@pytest.mark.parametrize("bytes_off", [0, 2, 4, 8, 12, 16, 32, 48])
def test_only_misaligned_tensors_are_copied(bytes_off):
    base = matrix(1, 64, torch.bfloat16)[0]
    t = base[bytes_off // 2 :]
    result = plans.aligned(t)
    assert (result is t) == (bytes_off % 16 == 0)
    assert result.data_ptr() % 16 == 0
    assert torch.equal(result, t)


ALL = {torch.bfloat16, torch.float16, torch.float32}
TAKES = {
    "COMPUTE_32F": ALL,
    "COMPUTE_32F_PEDANTIC": ALL,
    "COMPUTE_32F_FAST_TF32": {torch.float32},
    "COMPUTE_32F_FAST_16BF": {torch.float32},
    "COMPUTE_32F_FAST_16F": {torch.float32},  # much teaching material says fp16; nvmath refuses that
    "COMPUTE_16F": {torch.float16},
    None: {*ALL, torch.float64},  # the usual one; whether the dtype is possible at all is asked elsewhere
}


@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(TAKES, [*sorted(ALL, key=str), torch.float64])))
def test_compute_types_and_the_dtypes_they_take(name, dtype):
    if dtype in TAKES[name]:
        assert plans.check_compute_type(name, dtype) is None
        return
    with pytest.raises(Unsupported) as refusal:
        plans.check_compute_type(name, dtype)
    message = str(refusal.value)
    assert f"{name} does not take {str(dtype).removeprefix('torch.')} tensors" in message
    assert all(other in message for other in TAKES if other)  # the whole table, to choose another from


def test_compute_types_are_those_of_the_config():
    from fusedmlp.config import COMPUTE_TYPES

    assert set(COMPUTE_TYPES) == set(plans.COMPUTE_TYPES) == set(TAKES) - {None}


def test_the_reason_on_this_machine():
    assert "needs a CUDA device" in plans.why_unavailable(CPU)
    assert "on cpu" in plans.why_unavailable(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_no_cublaslt_without_a_gpu():
    if plans.cublaslt_version() is None:
        assert "cuBLASLt" in plans.why_unavailable(torch.device("cuda"))
    else:  # the library may be installed where no GPU is
        assert plans.why_unavailable(torch.device("cuda")) is None


# ---------------------------------------------------------------------------------------------------------------------
# recipes: one engine for a whole pass


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The nvmath engine believes that it can run; ``plans.gemm`` records its epilogs and refuses some."""
    ran: list[Epilog] = []
    refuse: set[Epilog] = set()

    def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
        ran.append(epilog)
        if epilog in refuse:
            raise Unsupported(f"{epilog} is not for this problem")
        return epilogs.gemm(epilog, a, b, bias=bias, aux=aux)

    monkeypatch.setattr(plans, "why_unavailable", lambda device: None)
    monkeypatch.setattr(plans, "gemm", gemm)
    return ran, refuse


NVMATH = Options(engine="nvmath")
REFERENCE = Options(engine="reference")


def passes(activation, options):
    """Forward, inference and backward on the same inputs, as one flat list of tensors."""
    case = make_case((6,), activation=activation)
    x, w1, b1, w2, b2 = case.tensors
    kept = recipes.forward(x, w1, b1, w2, b2, activation, options)
    y = recipes.inference(x, w1, b1, w2, b2, activation, options)
    grads = recipes.backward(case.dy, x, kept.h, kept.aux, w1, w2, Needs(*[True] * 5), activation, options)
    return [kept.y, y, *grads]


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_recipe_is_the_one_that_is_described(activation, pretend_gpu):
    ran, _ = pretend_gpu
    for actual, expected in zip(passes(activation, NVMATH), passes(activation, REFERENCE), strict=True):
        assert torch.equal(actual, expected)  # the fake engine is the reference engine
    words = recipes.describe(activation)
    assert ran == words["forward"] + words["inference"] + words["backward"]
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_refused_second_gemm_falls_back_for_the_whole_forward(activation, pretend_gpu, monkeypatch, caplog):
    ran, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    reference: list[Epilog] = []
    real = epilogs.gemm
    case = make_case((6,), activation=activation)
    expected = recipes.forward(*case.tensors, activation, REFERENCE)
    monkeypatch.setattr(epilogs, "gemm", lambda e, *a, **k: (reference.append(e), real(e, *a, **k))[1])
    described = recipes.describe(activation)["forward"]
    with caplog.at_level(logging.WARNING, logger="fusedmlp"):
        first = recipes.forward(*case.tensors, activation, NVMATH)
        assert ran == described
        assert reference == [described[0], *described]  # the fake's own first GEMM, then the whole recipe once more
        second = recipes.forward(*case.tensors, activation, NVMATH)
    assert ran == described  # the refused recipe is not begun again
    for actual in (first, second):
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "BIAS is not for this problem" in caplog.text
    assert recipes.fallback_reasons() == {"BIAS is not for this problem": 2}


def test_another_problem_is_tried_again(pretend_gpu):
    ran, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    for tokens in (6, 7, 6):
        recipes.inference(*make_case((tokens,)).tensors, "gelu", NVMATH)
    assert ran == [Epilog.GELU_BIAS, Epilog.BIAS] * 2
    refuse.clear()
    recipes.inference(*make_case((8,)).tensors, "gelu", NVMATH)
    assert ran == [Epilog.GELU_BIAS, Epilog.BIAS] * 3
    assert sum(recipes.fallback_reasons().values()) == 3


@pytest.mark.parametrize("refused", [Epilog.BGRADB, Epilog.DGELU, Epilog.DEFAULT])
def test_a_refusal_in_the_backward_pass_gives_right_gradients(refused, pretend_gpu):
    """A failed BGRADB must never leave a bias gradient that nobody wrote."""
    _, refuse = pretend_gpu
    refuse.add(refused)
    for actual, expected in zip(passes("gelu", NVMATH), passes("gelu", REFERENCE), strict=True):
        assert relative_error(actual, expected) == 0  # the reference engine on both sides
    assert sum(recipes.fallback_reasons().values()) == 1


def test_on_unsupported_error_raises_every_time(pretend_gpu):
    _, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    strict = Options(engine="nvmath", on_unsupported="error")
    for _ in range(2):
        with pytest.raises(Unsupported, match="fused MLP forward: BIAS is not for this problem"):
            recipes.forward(*make_case((6,)).tensors, "gelu", strict)
    assert recipes.fallback_reasons() == {}


def test_an_unexpected_error_is_no_fallback(pretend_gpu, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(plans, "gemm", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recipes.forward(*make_case((6,)).tensors, "gelu", NVMATH)
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize(
    ("tokens", "dtype", "compute_type", "reason"),
    [
        (0, torch.float32, None, "there are no tokens"),
        (6, torch.float64, None, "takes bfloat16, float16, float32, not float64"),
        (6, torch.bfloat16, "COMPUTE_16F", "COMPUTE_16F does not take bfloat16"),
        (6, torch.float16, "COMPUTE_32F_FAST_16F", "COMPUTE_32F_FAST_16F does not take float16"),
    ],
)
def test_known_constraints_are_named_before_any_gemm(tokens, dtype, compute_type, reason, pretend_gpu):
    ran, _ = pretend_gpu
    case = make_case((tokens,), dtype=dtype)
    options = Options(engine="nvmath", compute_type=compute_type)
    assert recipes.inference(*case.tensors, "gelu", options).shape == (tokens, 24)
    assert ran == []
    (message,) = recipes.fallback_reasons()
    assert reason in message
    with pytest.raises(Unsupported, match="fused MLP inference: "):
        recipes.inference(*case.tensors, "gelu", Options("nvmath", "error", "measured", compute_type))


def test_options_reach_the_plans(pretend_gpu, monkeypatch):
    seen = []

    def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
        seen.append((compute_type, tune))
        return epilogs.gemm(epilog, a, b, bias=bias, aux=aux)

    monkeypatch.setattr(plans, "gemm", gemm)
    for search, compute_type in (("measured", None), ("heuristic", "COMPUTE_32F_FAST_TF32")):
        options = Options("nvmath", "fallback", search, compute_type)
        recipes.inference(*make_case((6,)).tensors, "gelu", options)
    assert seen == [(None, True)] * 2 + [("COMPUTE_32F_FAST_TF32", False)] * 2


@pytest.mark.parametrize(
    ("available", "engine", "expected"),
    [
        (True, "auto", ("nvmath", None)),
        (True, "nvmath", ("nvmath", None)),
        (True, "reference", ("reference", None)),
        (False, "auto", ("reference", None)),
        (False, "nvmath", ("reference", "needs a CUDA device")),
        (False, "reference", ("reference", None)),
    ],
)
def test_engine_for(available, engine, expected, monkeypatch):
    if available:
        monkeypatch.setattr(plans, "why_unavailable", lambda device: None)
    name, reason = recipes.engine_for(CPU, Options(engine=engine))
    assert name == expected[0]
    assert (reason is None) if expected[1] is None else (expected[1] in reason)
