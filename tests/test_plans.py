"""Plans and the choice of engine without a GPU: what identifies a problem, what is remembered, what is given up.

A :class:`FakePlan` stands where cuBLASLt would be asked; everything around it is the real code.
"""

import gc
import itertools
import logging
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from mlp_cases import make_case, relative_error

from fusedmlp import epilogs, gemms, plans, race, recipes, stages
from fusedmlp.epilogs import HAS_BIAS, Epilog
from fusedmlp.gemms import PlanCache
from fusedmlp.plans import PlanStats, Unsupported
from fusedmlp.recipes import Needs, Options
from fusedmlp.store import ALGORITHM_BYTES, Algorithm, PlanStore

CPU = torch.device("cpu")
BF16 = torch.bfloat16
store_of = gemms.store_of  # the real one


class FakePlan:
    """Plans nothing and computes with the textbook; the class attributes steer and record."""

    made: list[tuple]
    stored: list[Algorithm | None]  # what each was given to start from
    refuse: set[Epilog]
    accept: bool  # stored algorithms
    seconds: float

    def __init__(self, epilog, a, b, bias, aux, compute_type, tune, stored=None):
        FakePlan.stored.append(stored)
        FakePlan.made.append((epilog, tuple(a.shape), tuple(b.shape), a.dtype, compute_type, tune))
        time.sleep(FakePlan.seconds)
        if epilog in FakePlan.refuse:
            raise Unsupported(f"{epilog} is refused by the fake")
        self.epilog = epilog
        fresh = Algorithm(len(FakePlan.made).to_bytes(ALGORITHM_BYTES, "little"), 4096)
        self.algorithm = stored if stored is not None and FakePlan.accept else fresh

    def run(self, a, b, bias, aux):
        return epilogs.gemm(self.epilog, a, b, bias=bias, aux=aux)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    FakePlan.made, FakePlan.stored, FakePlan.refuse, FakePlan.accept, FakePlan.seconds = [], [], set(), True, 0.0
    kept = PlanStore(None, {})
    monkeypatch.setattr(gemms, "store_of", lambda device: kept)
    monkeypatch.setattr(plans, "Plan", FakePlan)
    monkeypatch.setattr(gemms, "cache", PlanCache())
    monkeypatch.setattr(plans, "stats", PlanStats())
    monkeypatch.setattr(gemms, "_zeros", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recipes.forget()
    recipes._gemm.cache_clear()  # it holds a gemms.gemm
    yield FakePlan
    recipes.forget()
    recipes._gemm.cache_clear()


@pytest.fixture
def store() -> PlanStore:
    """The store that stands in for the file of the GPU."""
    return gemms.store_of(CPU)


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
        find(gemms.cache)
    find(gemms.cache, tune=False)
    row = plans.stats_row()
    assert (row["plans"], row["plan_misses"], row["plan_hits"]) == (2, 2, 2)


@pytest.mark.parametrize("other", [32, 48])
def test_a_pointer_elsewhere_gets_what_suits_its_alignment(other, store):
    """48 is aligned as 16 is, and so shares its algorithm; 32 is aligned better, and is searched for itself."""
    buffer = torch.zeros(1024, dtype=torch.uint8)
    start = -buffer.data_ptr() % 256
    a, b = (buffer[start + o : start + o + 512].view(torch.float32).view(8, 16) for o in (16, other))
    cache = PlanCache()
    first, second = find(cache, a=a), find(cache, a=b)
    assert len(store.algorithms) == (1 if other == 48 else 2)
    assert (second.algorithm is first.algorithm) == (other == 48)


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


# ---------------------------------------------------------------------------------------------------------------------
# What the store is asked, and told


def test_a_tuned_algorithm_is_stored_and_found_again(store):
    plan = find(PlanCache())
    assert list(store.algorithms.values()) == [plan.algorithm]
    again = find(PlanCache())  # another process, for what the cache knows
    assert again.algorithm is plan.algorithm
    assert FakePlan.stored == [None, plan.algorithm]


def test_a_stored_algorithm_is_not_stored_again(store, monkeypatch):
    find(PlanCache())
    monkeypatch.setattr(store, "add_algorithm", None)
    find(PlanCache())


def test_a_stored_algorithm_that_is_refused_is_replaced(tmp_path, monkeypatch):
    """In the file, too: or every process would search again for ever."""
    found = []
    for accept in (True, False, True):
        kept = PlanStore(tmp_path / "plans.json", {})
        monkeypatch.setattr(gemms, "store_of", lambda device, kept=kept: kept)
        FakePlan.accept = accept
        found.append(find(PlanCache()).algorithm)
        kept.save()
        assert list(kept.algorithms.values()) == [found[-1]]
    old, new, again = found
    assert new != old
    assert again == new


def test_the_heuristic_neither_reads_nor_writes_the_store(store):
    find(PlanCache(), tune=False)
    assert store.algorithms == {}
    find(PlanCache())
    find(PlanCache(), tune=False)
    assert FakePlan.stored == [None, None, None]
    assert len(store.algorithms) == 1


def test_a_refusal_is_not_stored(store):
    FakePlan.refuse = {Epilog.DEFAULT}
    with pytest.raises(Unsupported):
        find(PlanCache())
    assert store.algorithms == {}


def test_all_variations_are_distinct_in_the_store(store):
    cache = PlanCache()
    find(cache)
    for what, variation in VARIATIONS.items():
        if what != "tuning":
            find(cache, **variation)
    assert len(store.algorithms) == len(VARIATIONS)
    assert len({a.data for a in store.algorithms.values()}) == len(VARIATIONS)


def test_a_name_in_the_store_is_one_line_that_says_it_all(store):
    find(PlanCache(), Epilog.BGRADB, a=matrix(8, 16, ld=24, alignment=16), compute_type="COMPUTE_32F_PEDANTIC")
    (name,) = store.algorithms
    assert name == "BGRADB 8x16r24@16 16x4c16@256 float32 COMPUTE_32F_PEDANTIC"


def columns(count):
    return [matrix(16, n, column_major=True) for n in range(1, count + 1)]


def test_only_so_many_token_counts_are_tuned(store):
    """Autotuning takes long, and a sampler meets hundreds of lengths."""
    cache = PlanCache()
    many = columns(gemms.MAX_TUNED + 5)
    for b in many:
        find(cache, b=b)
    tuned = [tune for *_, tune in FakePlan.made]
    assert tuned == [True] * gemms.MAX_TUNED + [False] * 5
    assert len(store.algorithms) == gemms.MAX_TUNED
    find(cache, Epilog.BGRADB)  # others are tuned all the same
    find(cache, a=matrix(9, 16))
    assert [tune for *_, tune in FakePlan.made[-2:]] == [True, True]
    for b in many:
        find(cache, b=b)
    assert len(FakePlan.made) == len(many) + 2
    cache.clear()
    find(cache, b=many[-1])
    assert FakePlan.made[-1][-1] is True


def test_a_second_run_tunes_nothing_more_and_so_repeats_the_first():
    many = columns(gemms.MAX_TUNED + 5)
    runs = []
    for _ in range(2):
        cache = PlanCache()
        runs.append([find(cache, b=b) for b in many])
    first, second = ([tune for *_, tune in FakePlan.made[i : i + len(many)]] for i in (0, len(many)))
    assert second[gemms.MAX_TUNED :] == first[gemms.MAX_TUNED :] == [False] * 5
    for a, b in zip(*runs, strict=True):
        assert a.algorithm == b.algorithm or runs[0].index(a) >= gemms.MAX_TUNED  # the heuristic's is not kept


@pytest.fixture
def fresh_stores(monkeypatch):
    monkeypatch.setattr(gemms, "_stores", {})
    monkeypatch.setattr(gemms, "_store_path", [None])


def test_the_store_is_in_memory_unless_told_otherwise(fresh_stores, tmp_path):
    gemms.use_store(None)
    kept = store_of(CPU)
    assert kept.path is None
    assert store_of(CPU) is kept
    gemms.use_store(str(tmp_path / "mine.json"))
    other = store_of(CPU)
    assert other is not kept
    assert other.path == tmp_path / "mine.json"
    assert set(other.fingerprint) == {"gpu", "sm_count", "driver", "cublaslt", "nvmath", "torch", "triton"}
    other.add_algorithm("a", Algorithm(bytes(ALGORITHM_BYTES), 0))
    other.save()
    gemms.use_store(str(tmp_path / "mine.json"))
    assert store_of(CPU) is not other
    assert store_of(CPU).algorithms == other.algorithms  # the fingerprint survives JSON


def test_the_automatic_store_is_named_for_the_gpu(fresh_stores, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    real = gemms.describe
    monkeypatch.setattr(gemms, "describe", lambda *a, **k: real(*a, **k) | {"gpu": "NVIDIA H200 NVL"})
    gemms.use_store("auto")
    kept = store_of(CPU)
    assert kept.path == tmp_path / "plans" / "NVIDIA_H200_NVL.json"
    assert kept.fingerprint["gpu"] == "NVIDIA H200 NVL"


def test_a_home_directory_is_expanded(fresh_stores, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    gemms.use_store("~/plans.json")
    assert store_of(CPU).path == tmp_path / "plans.json"


# ---------------------------------------------------------------------------------------------------------------------
# gemm


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
    actual = gemms.gemm(epilog, a, b, bias=bias)
    expected = epilogs.gemm(epilog, a, b, bias=bias)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)  # the same fp32 kernel; a copy may take another path in the BLAS
    assert FakePlan.made == [(epilog, (8, 12), (12, 5), torch.float32, None, True)]


def test_an_absent_bias_is_one_of_zeros_made_once():
    a, b = torch.randn(8, 12), torch.randn(12, 5)
    for _ in range(2):
        torch.testing.assert_close(gemms.gemm(Epilog.BIAS, a, b).d, (b.T @ a.T).T)
    ((key, zeros),) = gemms._zeros.items()
    assert key == (8, torch.float32, CPU)
    assert not zeros.any()


@pytest.mark.parametrize("bytes_off", [0, 2, 4, 8, 12, 16, 32, 48])
def test_only_misaligned_tensors_are_copied(bytes_off):
    base = matrix(1, 64, torch.bfloat16)[0]
    t = base[bytes_off // 2 :]
    result = gemms.aligned(t)
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
    """The nvmath engine believes that it can run; ``gemms.gemm`` records its epilogs and refuses some.

    In a race all are as fast as each other, so that the first listed wins, which is the textbook's recipe.
    """
    ran: list[Epilog] = []
    refuse: set[Epilog] = set()

    def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
        ran.append(epilog)
        if epilog in refuse:
            raise Unsupported(f"{epilog} is not for this problem")
        return epilogs.gemm(epilog, a, b, bias=bias, aux=aux)

    monkeypatch.setattr(plans, "why_unavailable", lambda device: None)
    monkeypatch.setattr(gemms, "gemm", gemm)
    monkeypatch.setattr(race, "measure", lambda runners, device: dict.fromkeys(runners, 1e-3))
    return ran, refuse


NVMATH = Options(engine="nvmath")
REFERENCE = Options(engine="reference")
ALL_NEEDS = Needs(*[True] * 5)
SEARCHES = ["measured", "heuristic"]


def passes(activation, options, dtype=BF16, needs=ALL_NEEDS):
    """Forward, inference and backward on the same inputs, as one flat list of tensors."""
    case = make_case((6,), activation=activation, dtype=dtype)
    x, w1, b1, w2, b2 = case.tensors
    kept = recipes.forward(x, w1, b1, w2, b2, activation, options)
    y = recipes.inference(x, w1, b1, w2, b2, activation, options)
    grads = recipes.backward(case.dy, x, kept.h, kept.aux, w1, w2, needs, activation, options)
    return [kept.y, y, *grads]


E = Epilog
TEXTBOOK = {
    ("gelu", BF16): [E.GELU_AUX_BIAS, E.BIAS, E.GELU_BIAS, E.BIAS, E.BGRADB, E.DGELU, E.BGRADB, E.DEFAULT],
    # The epilogs' tanh is not good enough for fp32.
    ("gelu", torch.float32): [E.BIAS, E.BIAS, E.BIAS, E.BIAS, E.BGRADB, E.DEFAULT, E.BGRADB, E.DEFAULT],
    ("relu", BF16): [E.RELU_BIAS, E.BIAS, E.RELU_BIAS, E.BIAS, E.BGRADB, E.DEFAULT, E.BGRADB, E.DEFAULT],
    ("relu", torch.float32): [E.RELU_BIAS, E.BIAS, E.RELU_BIAS, E.BIAS, E.BGRADB, E.DEFAULT, E.BGRADB, E.DEFAULT],
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("activation", "dtype"), TEXTBOOK)
def test_the_recipe_is_the_textbooks_where_nothing_is_faster(activation, dtype, search, pretend_gpu):
    ran, _ = pretend_gpu
    options = Options("nvmath", search=search)
    expected = passes(activation, REFERENCE, dtype)
    assert ran == []
    for _ in range(2):  # while choosing and afterwards
        ran.clear()
        for a, e in zip(passes(activation, options, dtype), expected, strict=True):
            assert torch.equal(a, e)  # the fake engine is the reference engine
    assert ran == TEXTBOOK[activation, dtype]  # one GEMM for each, and none for choosing
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_refused_second_gemm_falls_back_for_the_whole_forward(activation, search, pretend_gpu, monkeypatch, caplog):
    """fc2 has no other epilog than BIAS, and torch's linear alone is not what was asked for."""
    ran, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    options = Options("nvmath", search=search)
    case = make_case((6,), activation=activation, dtype=BF16)
    expected = recipes.forward(*case.tensors, activation, REFERENCE)
    with caplog.at_level(logging.WARNING, logger="fusedmlp"):
        first = recipes.forward(*case.tensors, activation, options)
        assert ran[-1] is Epilog.BIAS
        ran.clear()
        reference: list[Epilog] = []
        real = epilogs.gemm
        monkeypatch.setattr(epilogs, "gemm", lambda e, *a, **k: (reference.append(e), real(e, *a, **k))[1])
        second = recipes.forward(*case.tensors, activation, options)
    assert ran == []  # the refused recipe is not begun again, nor raced
    assert reference == TEXTBOOK[activation, BF16][:2]
    for actual in (first, second):
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "BIAS is not for this problem" in caplog.text
    assert recipes.fallback_reasons() == {"BIAS is not for this problem": 2}


def test_a_pass_that_fell_back_may_be_captured(pretend_gpu, monkeypatch):
    """It is known that the reference engine computes it, and that needs no race."""
    _, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    case = make_case((6,), dtype=BF16)
    expected = recipes.inference(*case.tensors, "gelu", NVMATH)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(recipes.inference(*case.tensors, "gelu", NVMATH), expected)


def test_another_problem_is_tried_again(pretend_gpu):
    ran, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    for tokens, tried in ((6, True), (7, True), (6, False)):
        ran.clear()
        recipes.inference(*make_case((tokens,), dtype=BF16).tensors, "gelu", NVMATH)
        assert bool(ran) is tried, tokens
    refuse.clear()
    recipes.inference(*make_case((8,), dtype=BF16).tensors, "gelu", NVMATH)
    assert sum(recipes.fallback_reasons().values()) == 3


BACKWARD = [Epilog.BGRADB, Epilog.DEFAULT, Epilog.DGELU, Epilog.DGELU_BGRAD]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("refused", [set(r) for n in range(5) for r in itertools.combinations(BACKWARD, n)], ids=str)
def test_a_refusal_in_the_backward_pass_gives_right_gradients(refused, need_x, search, pretend_gpu):
    """A stage has other candidates; a failed BGRADB must never leave a bias gradient that nobody wrote."""
    _, refuse = pretend_gpu
    refuse |= refused
    needs = Needs(need_x, True, True, True, True)
    expected = passes("gelu", REFERENCE, needs=needs)
    actual = passes("gelu", Options("nvmath", search=search), needs=needs)
    lost = {Epilog.BGRADB, Epilog.DEFAULT} <= refused or (need_x and Epilog.DEFAULT in refused)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            limit = 0 if lost else 4 * torch.finfo(BF16).eps  # the reference engine on both sides, or another order
            assert relative_error(a, e) <= limit
    assert sum(recipes.fallback_reasons().values()) == lost
    chosen = [r["winner"] for r in recipes.report() if "backward" in r["problem"]]
    if not lost:
        assert all(not any(r == part for r in refused for part in w.replace(",", "+").split("+")) for w in chosen)
        assert not all(map(stages.is_torch, chosen))


def test_on_unsupported_error_raises_every_time(pretend_gpu):
    ran, refuse = pretend_gpu
    refuse.add(Epilog.BIAS)
    strict = Options(engine="nvmath", on_unsupported="error")
    for _ in range(2):
        ran.clear()
        with pytest.raises(Unsupported, match=r"fused MLP .*forward: BIAS is not for this problem"):
            recipes.forward(*make_case((6,), dtype=BF16).tensors, "gelu", strict)
    assert ran == []  # the second time it is known
    assert recipes.fallback_reasons() == {}


@pytest.mark.parametrize("search", SEARCHES)
def test_an_unexpected_error_is_no_fallback(search, pretend_gpu, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gemms, "gemm", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recipes.forward(*make_case((6,)).tensors, "gelu", Options("nvmath", search=search))
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
    with pytest.raises(Unsupported, match=r"fused MLP .*inference: "):
        recipes.inference(*case.tensors, "gelu", Options("nvmath", "error", "measured", compute_type))


def test_options_reach_the_plans(pretend_gpu, monkeypatch):
    seen = []

    def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
        seen.append((compute_type, tune))
        return epilogs.gemm(epilog, a, b, bias=bias, aux=aux)

    monkeypatch.setattr(gemms, "gemm", gemm)
    for search, compute_type in (("measured", None), ("heuristic", "COMPUTE_32F_FAST_TF32")):
        options = Options("nvmath", "fallback", search, compute_type)
        seen.clear()
        recipes.inference(*make_case((6,)).tensors, "gelu", options)
        assert len(seen) >= 2
        assert set(seen) == {(compute_type, search == "measured")}


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
