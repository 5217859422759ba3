"""Races without a GPU: how a winner is found, what every candidate computes, and what recipes make of the outcome.

The clock is a fake one; candidates compute with the textbook's GEMM (:func:`fusedmlp.epilogs.gemm`) on the CPU.
"""

import gc
import itertools
import json
import logging
import math
import threading
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlp_cases import make_case, relative_error

from fusedmlp import epilogs, gemms, kernels, plans, race, recipes, stages
from fusedmlp.plans import Unsupported
from fusedmlp.recipes import Needs, Options
from fusedmlp.store import PlanStore, Race

CPU = torch.device("cpu")
ALL = Needs(*[True] * 5)

# ---------------------------------------------------------------------------------------------------------------------
# The race itself, with a fake clock


@pytest.fixture
def clock(monkeypatch):
    """``clock.seconds[name]`` is what a candidate takes: a number, or a list that measurements go through."""

    class Clock:
        def __init__(self):
            self.seconds = {}
            self.calls = []  # (name, repeats) of each measurement

        def timed(self, run, repeats):
            name = run()
            self.calls.append((name, repeats))
            t = self.seconds[name]
            return t.pop(0) if isinstance(t, list) else t

        def hold(self, **seconds):
            self.seconds = seconds
            return race.hold({name: (lambda name=name: name) for name in seconds}, CPU)

    made = Clock()
    monkeypatch.setattr(race, "_timed", made.timed)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_the_fastest_wins_wherever_it_stands(order, clock):
    times = {"a": 100e-6, "b": 50e-6, "c": 80e-6}
    outcome = clock.hold(**{name: times[name] for name in order})
    assert outcome == Race("b", {name: round(times[name] * 1e6, 2) for name in order})
    assert list(outcome.times_us) == list(order)


def test_the_median_decides_and_not_an_outlier(clock):
    rounds = race.ROUNDS
    few = (rounds - 1) // 2
    slow_start = [1.0] + [1.0] * few + [10e-6] * (rounds - few)  # the first is the estimate
    lucky = [1.0] + [1e-9] * few + [20e-6] * (rounds - few)
    outcome = clock.hold(lucky=lucky, steady=slow_start)
    assert outcome == Race("steady", {"lucky": 20.0, "steady": 10.0})


@pytest.mark.parametrize(("gain", "wins"), [(-0.5, False), (0.0, False), (0.009, False), (0.011, True), (0.5, True)])
def test_a_challenger_must_win_by_a_margin(gain, wins, clock):
    assert race.MARGIN == 0.01
    outcome = clock.hold(first=100e-6, second=100e-6 * (1 - gain))
    assert outcome.winner == ("second" if wins else "first")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=6))
def test_the_winner_is_within_the_margin_of_the_fastest(seconds):
    """And none that stands before it is as fast, but for the margin."""
    with pytest.MonkeyPatch.context() as patch:
        times = dict(zip("abcdef", seconds, strict=False))
        patch.setattr(race, "measure", lambda runners, device: {name: times[name] for name in runners})
        winner = race.hold({name: (lambda: None) for name in times}, CPU).winner
    assert times[winner] * (1 - race.MARGIN) <= min(seconds) * (1 + 1e-9)
    earlier = list(times)[: list(times).index(winner)]
    assert all(times[winner] < times[name] for name in earlier)


def refusing(name):
    def run():
        raise Unsupported(f"{name} is refused")

    return run


def test_refusals_drop_out(clock):
    clock.seconds = {"b": 2e-6, "d": 1e-6}
    runs = {"a": refusing("a"), "b": lambda: "b", "c": refusing("c"), "d": lambda: "d"}
    assert race.hold(runs, CPU) == Race("d", {"b": 2.0, "d": 1.0})
    runners, refusals = race.warm_up(runs)
    assert list(runners) == ["b", "d"]
    assert refusals == {"a": "a is refused", "c": "c is refused"}


def test_all_refused_is_the_first_refusal(clock):
    with pytest.raises(Unsupported, match=r"^b is refused$"):
        race.hold({"b": refusing("b"), "a": refusing("a")}, CPU)
    assert clock.calls == []


def test_nobody_in_the_race_is_unsupported(clock):
    with pytest.raises(Unsupported):
        race.hold({}, CPU)


def test_an_error_that_is_no_refusal_ends_the_race(clock):
    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access") as error:
        race.hold({"a": lambda: "a", "b": broken}, CPU)
    assert not isinstance(error.value, Unsupported)


def test_each_runs_twice_before_the_clock_does():
    """The first run plans or compiles; the second shows that nothing is left to be made."""
    counts = Counter()
    race.warm_up({name: (lambda name=name: counts.update([name])) for name in "abc"})
    assert counts == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("count", range(1, race.ROUNDS + 1))
def test_each_candidate_gets_each_position(count, clock):
    names = "abcdefghij"[:count]
    clock.hold(**dict.fromkeys(names, 1e-6))
    order = [name for name, _ in clock.calls[count:]]  # after the estimates
    rounds = [order[i : i + count] for i in range(0, len(order), count)]
    assert len(rounds) == race.ROUNDS
    assert all(sorted(r) == sorted(names) for r in rounds)
    for name in names:
        positions = Counter(r.index(name) for r in rounds)
        assert set(positions) == set(range(count))
        assert max(positions.values()) - min(positions.values()) <= 1


@pytest.mark.parametrize("count", [8, 13])
def test_many_candidates_stand_elsewhere_in_each_round(count, clock):
    names = "abcdefghijklmnop"[:count]
    clock.hold(**dict.fromkeys(names, 1e-6))
    order = [name for name, _ in clock.calls[count:]]
    rounds = [order[i : i + count] for i in range(0, len(order), count)]
    assert all(len({r.index(name) for r in rounds}) == race.ROUNDS for name in names)


@pytest.mark.parametrize(
    ("seconds", "repeats"),
    [(0.0, 10), (1e-9, 10), (30e-6, 10), (60e-6, 5), (100e-6, 3), (290e-6, 1), (1e-3, 1), (2.0, 1)],
)
def test_short_ones_are_repeated_within_bounds(seconds, repeats, clock):
    assert (race.TARGET_S, race.MAX_REPEATS) == (300e-6, 10)
    clock.hold(only=seconds)
    assert clock.calls == [("only", 1)] + [("only", repeats)] * race.ROUNDS


def test_a_measurement_is_of_the_repeats_behind_a_sleep(monkeypatch):
    """What is between the events is what is counted, and the GPU sleeps, for a bounded time, before the first."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 6.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles))
    assert race._timed(lambda: log.append("run"), 3) == pytest.approx(2e-3)
    warm, cycles, *rest = log
    assert warm == "run"
    assert isinstance(cycles, int)
    assert 50e-6 * race.SLEEP_CYCLES_PER_S <= cycles <= 0.02 * race.SLEEP_CYCLES_PER_S
    assert rest == ["event", "run", "run", "run", "event", "wait"]


# ---------------------------------------------------------------------------------------------------------------------
# The candidates


GELU = ("DGELU", "DEFAULT+gelu_backward", "mm+gelu_backward")
RELU = ("DEFAULT+threshold", "mm+threshold")
BOTH = ("BGRADB", "DEFAULT+sum", "mm+sum")


@pytest.mark.parametrize(
    ("activation", "keep", "exact", "names"),
    [
        ("gelu", True, False, ["GELU_AUX_BIAS", "BIAS+gelu", "linear+gelu"]),
        ("gelu", False, False, ["GELU_BIAS", "addmm_activation", "BIAS+gelu", "linear+gelu"]),
        ("gelu", True, True, ["BIAS+gelu", "linear+gelu"]),
        ("gelu", False, True, ["BIAS+gelu", "linear+gelu"]),
        *(
            ("relu", keep, exact, ["RELU_BIAS", "addmm_activation", "BIAS+relu", "linear+relu"])
            for keep in (True, False)
            for exact in (True, False)
        ),
    ],
)
def test_the_candidates_of_fc1(activation, keep, exact, names):
    assert list(stages.fc1(epilogs.gemm, activation, keep=keep, exact=exact)) == names


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_candidates_of_hidden(activation, exact, has_kernel, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: has_kernel)
    first = RELU if activation == "relu" else GELU[exact:]

    def names(need_w, need_b):
        return list(stages.hidden(epilogs.gemm, activation, need_w, need_b, exact=exact))

    riding = ["DEFAULT+kernel"] * has_kernel + ["DGELU_BGRAD"] * (activation == "gelu" and not exact)
    assert names(False, False) == list(first)
    assert names(True, False) == [f"{a},{b}" for a in first for b in ("DEFAULT", "mm")]
    assert names(False, True) == [f"{a},sum" for a in first] + riding
    pairs = [f"{a},{b}" for a in first for b in BOTH]
    assert names(True, True) == pairs + [f"{a},{b}" for b in ("DEFAULT", "mm") for a in riding]


def test_the_other_candidates():
    gemm = epilogs.gemm
    assert list(stages.fc2(gemm)) == ["BIAS", "linear"]
    assert list(stages.dgrad1(gemm)) == ["DEFAULT", "mm"]
    assert tuple(stages.wgrad(gemm, True, True)) == BOTH
    assert list(stages.wgrad(gemm, True, False)) == ["DEFAULT", "mm"]
    assert list(stages.wgrad(gemm, False, True)) == ["sum"]


IS_TORCH = {
    "linear": True,
    "mm": True,
    "sum": True,
    "": True,
    "mm+sum": True,
    "linear+gelu": True,
    "linear+relu": True,
    "addmm_activation": True,
    "mm+gelu_backward": True,
    "mm+gelu_backward,mm+sum": True,
    "mm+threshold,sum": True,
    "DEFAULT": False,
    "BIAS": False,
    "BGRADB": False,
    "DEFAULT+sum": False,
    "BIAS+gelu": False,
    "GELU_AUX_BIAS": False,
    "RELU_BIAS": False,
    "DGELU": False,
    "DGELU,mm+sum": False,
    "mm+threshold,BGRADB": False,
    "mm+gelu_backward,DEFAULT": False,
    "DGELU_BGRAD,mm": False,
    "DEFAULT+kernel": False,
    "DEFAULT+kernel,mm": False,
    "DEFAULT+kernel,DEFAULT": False,
}


@pytest.mark.parametrize("name", IS_TORCH)
def test_which_candidates_are_torchs_own(name):
    assert stages.is_torch(name) is IS_TORCH[name]


def test_every_name_says_truly_whether_it_is_torchs_own(monkeypatch):
    """A candidate that is said to be torch's own never calls the GEMM that is planned here, and the others do."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "activation_gradient", kernel_on_cpu)
    for problem in PROBLEMS:
        for activation in ("gelu", "relu"):
            p = Problem(problem, activation)
            for stage, menu, tensors, _ in p.menus():
                called = []

                def gemm(*args, called=called, **kwargs):
                    called.append(1)
                    return epilogs.gemm(*args, **kwargs)

                for name, run in menu(gemm).items():
                    called.clear()
                    run(*tensors)
                    assert bool(called) is not stages.is_torch(name), (stage, name)


class Problem:
    """Random float64 tensors of one MLP and its stages by formula: no torch function that a candidate uses."""

    def __init__(self, sizes, activation, bias=True):
        tokens, width, hidden, out = sizes
        g = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.activation = activation
        self.x, self.w1, self.w2, self.dy = (
            draw(tokens, width),
            draw(hidden, width),
            draw(out, hidden),
            draw(tokens, out),
        )
        self.b1, self.b2 = (draw(hidden), draw(out)) if bias else (None, None)
        z = torch.einsum("ti,hi->th", self.x, self.w1) + (0 if self.b1 is None else self.b1)
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
        if activation == "gelu":
            self.h = z / 2 * (1 + tanh)
            slope = (1 + tanh) / 2 + z / 2 * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
            self.aux = torch.cat((z, z.new_zeros(tokens, -hidden % 8)), dim=1)
        else:
            self.h = z.clamp_min(0)
            slope = (z > 0).double()
            self.aux = z.new_empty((0, 0))
        self.z = z
        self.y = torch.einsum("th,oh->to", self.h, self.w2) + (0 if self.b2 is None else self.b2)
        self.dw2 = torch.einsum("to,th->oh", self.dy, self.h)
        self.db2 = torch.einsum("to->o", self.dy)
        self.dz = torch.einsum("to,oh->th", self.dy, self.w2) * slope
        self.dw1 = torch.einsum("th,ti->hi", self.dz, self.x)
        self.db1 = torch.einsum("th->h", self.dz)
        self.dx = torch.einsum("th,hi->ti", self.dz, self.w1)

    def menus(self):
        """(stage, gemm -> candidates, tensors, expected) for every combination of flags."""
        act, flags = self.activation, (True, False)
        for keep, exact in itertools.product(flags, flags):
            aux = self.aux if act == "gelu" and keep else None
            yield (
                f"fc1 keep={keep} exact={exact}",
                lambda gemm, keep=keep, exact=exact: stages.fc1(gemm, act, keep=keep, exact=exact),
                (self.x, self.w1, self.b1),
                (self.h, aux),
            )
        yield "fc2", stages.fc2, (self.h, self.w2, self.b2), (self.y,)
        for w, b in itertools.product(flags, flags):
            if w or b:
                yield (
                    f"wgrad2 w={w} b={b}",
                    lambda gemm, w=w, b=b: stages.wgrad(gemm, w, b),
                    (self.h, self.dy),
                    (self.dw2 if w else None, self.db2 if b else None),
                )
            for exact in flags:
                yield (
                    f"hidden w={w} b={b} exact={exact}",
                    lambda gemm, w=w, b=b, exact=exact: stages.hidden(gemm, act, w, b, exact=exact),
                    (self.dy, self.w2, self.h, self.aux, self.x),
                    (self.dz, self.dw1 if w else None, self.db1 if b else None),
                )
        yield "dgrad1", stages.dgrad1, (self.dz, self.w1), (self.dx,)


def kernel_on_cpu(dh, saved, activation):
    """What :func:`kernels.activation_gradient` promises, overwriting included."""
    if activation == "relu":
        dh.copy_(torch.where(saved > 0, dh, 0))
    else:
        dh.copy_(torch.ops.aten.gelu_backward(dh, saved[:, : dh.shape[1]], approximate="tanh"))
    return dh, dh.sum(0)


PROBLEMS = [(6, 5, 16, 7), (9, 8, 20, 8), (1, 3, 1, 2), (1, 1, 9, 1)]  # tokens, in, hidden, out; some pad GELU's aux


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
@pytest.mark.parametrize("kernel", ["as it is", "by torch"])
def test_every_candidate_computes_its_stage(kernel, sizes, activation, bias, monkeypatch):
    """``by torch``: the kernel's place is taken by what it promises, so that its candidates' wiring is run anywhere."""
    if kernel == "by torch":
        monkeypatch.setattr(kernels, "available", lambda: True)
        monkeypatch.setattr(kernels, "activation_gradient", kernel_on_cpu)
    p = Problem(sizes, activation, bias)
    tried = set()
    for stage, menu, tensors, expected in p.menus():
        for name, run in menu(epilogs.gemm).items():
            if "kernel" in name and kernel == "as it is":
                continue  # it needs a GPU
            before = [None if t is None else t.clone() for t in tensors]
            actual = run(*tensors)
            where = f"{stage}: {name}"
            for t, old in zip(tensors, before, strict=True):
                assert t is None or torch.equal(t, old), f"{where} changed an input"
            if stage.startswith(("fc2", "dgrad1")):
                actual = (actual,)
            want = expected
            if name == "addmm_activation" and activation == "gelu":
                # On the CPU this one has the GELU with erf; on a GPU the one with tanh (tests/test_gpu_candidates.py).
                want = (p.z / 2 * (1 + torch.erf(p.z / math.sqrt(2))), None)
            for a, e in zip(actual, want, strict=True):
                assert (a is None) == (e is None), where
                if a is None:
                    continue
                assert a.shape == e.shape, where
                assert a.dtype == torch.float64, where
                assert a.is_contiguous(), where
                # 1e-12 of the largest element: sums of at most 20 terms that cancel
                assert (a - e).abs().max() <= 1e-12 * max(1.0, e.abs().max().item()), where
            given = {t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()}
            out = [a.untyped_storage().data_ptr() for a in actual if a is not None]
            assert not given & set(out), f"{where} gives an input back"
            assert len(set(out)) == len(out), f"{where}: outputs share memory"
            tried.add(where)
    assert any("kernel" in where for where in tried) == (kernel == "by torch")
    assert len(tried) > 25


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_candidates_pass_nan_on(activation, monkeypatch):
    """A diverged run must look like one, whichever candidate won."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "activation_gradient", kernel_on_cpu)
    p = Problem((6, 5, 16, 7), activation)
    p.dy[2, 3] = math.nan
    for need_w, need_b in itertools.product([True, False], repeat=2):
        for name, run in stages.hidden(epilogs.gemm, activation, need_w, need_b, exact=False).items():
            dz, dw, db = run(p.dy, p.w2, p.h, p.aux, p.x)
            inside = dz[2] if activation == "gelu" else dz[2][p.h[2] > 0]
            assert inside.isnan().all(), name
            assert dw is None or dw.isnan().any(), name
            assert db is None or db.isnan().any(), name


# ---------------------------------------------------------------------------------------------------------------------
# Recipes: when a race is held, and what becomes of its outcome


MEASURED = Options("nvmath", "error", "measured")
HEURISTIC = Options("nvmath", "error", "heuristic")
BF16 = torch.bfloat16


class Pretence:
    """The knobs and the records of the fixture ``gpu``."""

    def __init__(self):
        self.store = PlanStore(None, {})
        self.fast: str | None = None  # candidates with this in their name win, else the first one does
        self.raced: list[tuple[str, ...]] = []  # the candidates of every race that was held
        self.ran: list[str] = []  # epilogs
        self.refuse: set[str] = set()
        self.capturing = False


@pytest.fixture
def gpu(monkeypatch):
    """A GPU to believe in: the nvmath engine runs, on the textbook's GEMM and with invented times."""
    p = Pretence()

    def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
        p.ran.append(epilog)
        if epilog in p.refuse:
            raise Unsupported(f"{epilog} is not for this problem")
        return epilogs.gemm(epilog, a, b, bias=bias, aux=aux)

    def measure(runners, device):
        return {name: 10e-6 if p.fast and p.fast in name else (20 + i) * 1e-6 for i, name in enumerate(runners)}

    real = race.hold

    def hold(runs, device):
        p.raced.append(tuple(runs))
        return real(runs, device)

    monkeypatch.setattr(plans, "why_unavailable", lambda device: None)
    monkeypatch.setattr(gemms, "gemm", gemm)
    monkeypatch.setattr(gemms, "store_of", lambda device: p.store)
    monkeypatch.setattr(race, "measure", measure)
    monkeypatch.setattr(race, "hold", hold)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: p.capturing)
    recipes._gemm.cache_clear()
    recipes.forget()
    yield p
    recipes._gemm.cache_clear()  # they hold the fake
    recipes.forget()


def passes(options, tokens=6, activation="gelu", dtype=BF16, needs=ALL, width=24):
    """Forward, inference and backward on the same inputs, as one flat list."""
    case = make_case((tokens,), width, activation=activation, dtype=dtype)
    x, w1, b1, w2, b2 = case.tensors
    kept = recipes.forward(x, w1, b1, w2, b2, activation, options)
    y = recipes.inference(x, w1, b1, w2, b2, activation, options)
    return [kept.y, y, *recipes.backward(case.dy, x, kept.h, kept.aux, w1, w2, needs, activation, options)]


STAGES = ["forward fc1", "forward fc2", "inference fc1", "inference fc2"]
STAGES += ["backward wgrad2", "backward hidden", "backward dgrad1"]


def label(problem):
    """The pass and the stage that a problem's name tells."""
    words = problem.split()
    return next(" ".join(pair) for pair in itertools.pairwise(words) if " ".join(pair) in STAGES)


def winners():
    """Pass and stage -> winner."""
    return {label(r["problem"]): r["winner"] for r in recipes.report()}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_race_is_held_once_for_each_problem_and_stage(activation, gpu):
    for _ in range(3):
        passes(MEASURED, activation=activation)
        assert len(gpu.raced) == len(STAGES)
    passes(MEASURED, tokens=7, activation=activation)
    assert len(gpu.raced) == 2 * len(STAGES)
    passes(MEASURED, activation=activation)
    assert len(gpu.raced) == 2 * len(STAGES)
    assert [label(key) for key in gpu.store.races][: len(STAGES)] == STAGES
    assert recipes.fallback_reasons() == {}


def test_threads_race_a_problem_once(gpu):
    count = 6
    start, errors = threading.Barrier(count), []

    def work():
        start.wait()
        try:
            passes(MEASURED)
        except Exception as error:  # a thread's error would be lost otherwise
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(gpu.raced) == len(STAGES)


@pytest.mark.parametrize("fast", [None, "BGRADB", "sum", "DGELU", "DEFAULT", "linear", "mm", "addmm", "gelu_backward"])
@pytest.mark.parametrize(("activation", "dtype"), [("gelu", BF16), ("relu", BF16), ("gelu", torch.float32)])
def test_whoever_wins_the_results_are_right(fast, activation, dtype, gpu):
    gpu.fast = fast
    expected = passes(Options("reference"), activation=activation, dtype=dtype)
    for _ in range(2):  # while racing and afterwards
        actual = passes(MEASURED, activation=activation, dtype=dtype)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if fast == "addmm" and activation == "gelu" and i == 1 and dtype is BF16:
                continue  # the CPU's has another GELU
            assert a.is_contiguous()
            assert relative_error(a, e) <= 4 * torch.finfo(dtype).eps
    for race_ in gpu.store.races.values():
        if fast and any(fast in name for name in race_.times_us):
            assert fast in race_.winner


def test_only_what_is_asked_for_is_raced(gpu):
    case = make_case((6,), dtype=BF16)
    x, w1, b1, w2, b2 = case.tensors
    kept = recipes.forward(x, w1, b1, w2, b2, "gelu", MEASURED)
    for needs in itertools.product([True, False], repeat=5):
        gpu.raced.clear()
        recipes.forget()
        gpu.store.races.clear()
        needs = Needs(*needs)
        grads = recipes.backward(case.dy, x, kept.h, kept.aux, w1, w2, needs, "gelu", MEASURED)
        assert [g is not None for g in grads] == list(needs)
        through = needs.x or needs.w1 or needs.b1
        assert len(gpu.raced) == (needs.w2 or needs.b2) + through + needs.x


def test_the_rule_never_races(gpu, monkeypatch):
    def never(*args):
        raise AssertionError("a race was held")

    monkeypatch.setattr(race, "hold", never)
    monkeypatch.setattr(race, "measure", never)
    gpu.store.add_race("forward", Race("x", {}))
    before = dict(gpu.store.races)
    expected = passes(Options("reference"))
    for a, e in zip(passes(HEURISTIC), expected, strict=True):
        assert torch.equal(a, e)  # the rule's first choice is the textbook
    assert gpu.store.races == before  # a rule is no finding
    assert all(r["times_us"] == {} for r in recipes.report())
    assert winners() == {
        "forward fc1": "GELU_AUX_BIAS",
        "forward fc2": "BIAS",
        "inference fc1": "GELU_BIAS",
        "inference fc2": "BIAS",
        "backward wgrad2": "BGRADB",
        "backward hidden": "DGELU,BGRADB",
        "backward dgrad1": "DEFAULT",
    }


@pytest.mark.parametrize(("width", "names"), [(1024, ("BGRADB", "BGRADB")), (1032, ("DEFAULT+sum", "DEFAULT+sum"))])
def test_the_rule_puts_the_bias_gradient_on_narrow_gemms_only(width, names, gpu):
    passes(HEURISTIC, width=width, activation="relu")
    found = winners()
    assert found["backward wgrad2"] == names[0]
    assert found["backward hidden"] == f"DEFAULT+threshold,{names[1]}"


def test_the_rule_does_not_follow_a_stored_race(gpu):
    gpu.fast = "sum"
    passes(MEASURED)
    recipes.forget()
    passes(HEURISTIC)
    assert winners()["backward wgrad2"] == "BGRADB"


def test_the_rule_takes_the_next_when_the_first_is_refused(gpu):
    gpu.refuse = {"GELU_AUX_BIAS", "BGRADB", "DGELU"}
    passes(HEURISTIC)
    found = winners()
    assert found["forward fc1"] == "BIAS+gelu"
    assert found["backward wgrad2"] == "DEFAULT+sum"
    assert found["backward hidden"] == "DEFAULT+gelu_backward,DEFAULT+sum"


def test_the_rule_knows_when_nothing_is_left(gpu):
    gpu.refuse = {"BIAS"}
    with pytest.raises(Unsupported, match=r"fused MLP .*forward: BIAS is not for this problem"):
        passes(HEURISTIC)


def test_a_stored_race_is_not_held_again(gpu, tmp_path):
    path = tmp_path / "plans.json"
    gpu.store = PlanStore(path, {})
    gpu.fast = "sum"
    first, chosen = passes(MEASURED), winners()
    assert len(gpu.raced) == len(STAGES)
    gpu.fast = None  # another race would end otherwise
    recipes.forget()
    gpu.store = PlanStore(path, {})
    again = passes(MEASURED)
    assert len(gpu.raced) == len(STAGES)
    assert winners() == chosen
    assert chosen["backward wgrad2"] == "DEFAULT+sum"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_stored_winner_that_no_longer_exists_is_raced_again(gpu, tmp_path):
    path = tmp_path / "plans.json"
    gpu.store = PlanStore(path, {})
    passes(MEASURED)
    (key,) = [k for k in gpu.store.races if label(k) == "backward wgrad2"]
    text = json.loads(path.read_text())
    text["races"][key]["winner"] = "__import__"
    path.write_text(json.dumps(text))
    for held in (1, 0):  # once; the next process finds the new winner
        gpu.raced.clear()
        recipes.forget()
        gpu.store = PlanStore(path, {})
        passes(MEASURED)
        assert len(gpu.raced) == held
        assert winners()["backward wgrad2"] == "BGRADB"


def test_other_candidates_are_another_race(gpu, monkeypatch):
    """A race without the kernel says nothing about one with it."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    passes(MEASURED)
    gpu.raced.clear()
    recipes.forget()
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "activation_gradient", kernel_on_cpu)
    gpu.fast = "kernel"
    expected = passes(Options("reference"))
    actual = passes(MEASURED)
    assert len(gpu.raced) == 1
    assert winners()["backward hidden"] == "DEFAULT+kernel,DEFAULT"
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) <= 2e-2


def test_what_makes_another_problem(gpu):
    case = make_case((6,), dtype=BF16)
    x, w1, b1, w2, b2 = case.tensors

    def held(function):
        gpu.raced.clear()
        function()
        return len(gpu.raced)

    def infer(x=x, w1=w1, b1=b1, w2=w2, b2=b2, activation="gelu", options=MEASURED):
        recipes.inference(x, w1, b1, w2, b2, activation, options)

    assert held(infer) == 2
    assert held(infer) == 0
    assert held(lambda: infer(b1=None)) == 1  # fc2 is the same as before, and the store knows it
    assert held(lambda: infer(b2=None)) == 1
    assert held(lambda: infer(activation="relu")) >= 1
    assert held(lambda: infer(x=x[:5].clone())) == 2
    assert held(lambda: infer(*(t.half() for t in case.tensors))) == 2
    assert held(lambda: infer(options=Options("nvmath", "fallback", "measured"))) == 0
    assert held(lambda: recipes.forward(*case.tensors, "gelu", MEASURED)) == 2


def test_racing_is_refused_during_graph_capture_and_known_recipes_are_not(gpu):
    expected = passes(MEASURED)
    gpu.capturing = True
    assert all(torch.equal(a, e) for a, e in zip(passes(MEASURED), expected, strict=True))
    for options in (MEASURED, HEURISTIC, Options("nvmath", "fallback", "measured")):
        with pytest.raises(RuntimeError, match="before capturing") as refusal:
            passes(options, tokens=7)
        assert not isinstance(refusal.value, Unsupported)  # falling back during capture would hide the mistake
        assert "forward pass" in str(refusal.value)
    assert recipes.fallback_reasons() == {}
    gpu.capturing = False
    passes(MEASURED, tokens=7)
    gpu.capturing = True
    passes(MEASURED, tokens=7)


def test_a_stage_that_was_not_met_yet_is_refused_during_capture(gpu):
    case = make_case((6,), dtype=BF16)
    x, w1, b1, w2, b2 = case.tensors
    kept = recipes.forward(x, w1, b1, w2, b2, "gelu", MEASURED)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"backward pass.*before capturing"):
        recipes.backward(case.dy, x, kept.h, kept.aux, w1, w2, ALL, "gelu", MEASURED)


def test_the_last_problem_is_known_however_many_came_before(gpu, monkeypatch):
    """The tables are bounded, but what has just been run can be captured, all of its passes."""
    monkeypatch.setattr(recipes, "MAX_PROBLEMS", 5)
    for tokens in range(1, 9):
        passes(MEASURED, tokens=tokens)
        assert len(recipes._choices) <= 5
        gpu.capturing = True
        passes(MEASURED, tokens=tokens)
        gpu.capturing = False


def test_the_report_lists_winners_and_times(gpu):
    gpu.fast = "sum"
    passes(MEASURED, activation="relu")
    report = recipes.report()
    assert [label(r["problem"]) for r in report] == STAGES
    for r in report:
        assert set(r) == {"problem", "winner", "times_us"}
        assert r["winner"] in r["times_us"]
        assert len(r["times_us"]) >= 2
        assert "bfloat16" in r["problem"]
    (wgrad,) = [r for r in report if "wgrad2" in r["problem"]]
    assert wgrad["winner"] == "DEFAULT+sum"
    assert wgrad["times_us"] == {"BGRADB": 20.0, "DEFAULT+sum": 10.0, "mm+sum": 10.0}
    assert "6x40 6x24" in wgrad["problem"]  # h and dy
    assert json.loads(json.dumps(report)) == report  # goes into summary.json


def test_the_report_keeps_problems_apart_that_differ_in_candidates_only(gpu):
    """The same shapes with and without bias gradient are two races."""
    passes(MEASURED)
    passes(MEASURED, needs=Needs(True, True, False, True, False))
    found = [r["winner"] for r in recipes.report() if "wgrad2" in r["problem"]]
    assert sorted(found) == ["BGRADB", "DEFAULT"]


def test_races_are_logged(gpu, caplog):
    with caplog.at_level(logging.INFO, logger="fusedmlp"):
        passes(MEASURED)
        passes(MEASURED)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("raced ")]
    assert len(lines) == len(STAGES)
    assert any("BGRADB 20, DEFAULT+sum 21, mm+sum 22 us" in line for line in lines)


def test_forget_forgets(gpu):
    gpu.refuse = {"BIAS"}
    recipes.inference(*make_case((3,), dtype=BF16).tensors, "gelu", Options("nvmath", "fallback", "measured"))
    assert recipes.fallback_reasons()
    gpu.refuse = set()
    passes(MEASURED)
    recipes.forget()
    assert recipes.report() == []
    assert recipes.fallback_reasons() == {}
    assert not recipes._choices
    assert not recipes._refused
    gpu.raced.clear()
    passes(MEASURED)
    assert gpu.raced == []  # the store remembers
    assert len(recipes.report()) == len(STAGES)
    recipes.forget()
    gpu.store = PlanStore(None, {})
    passes(MEASURED)
    assert len(gpu.raced) == len(STAGES)


TORCH_GEMMS = {"mm", "linear", "addmm_activation"}


def parts(name):
    return set(name.replace(",", "+").split("+"))


@pytest.mark.parametrize("search", ["measured", "heuristic"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(
    ("compute_type", "dtype", "comparable"),
    [
        (None, BF16, True),
        (None, torch.float32, True),
        ("COMPUTE_32F", BF16, True),
        ("COMPUTE_32F_PEDANTIC", torch.float32, False),
        ("COMPUTE_32F_PEDANTIC", BF16, False),
        ("COMPUTE_32F_FAST_TF32", torch.float32, False),
        ("COMPUTE_32F_FAST_16BF", torch.float32, False),
        ("COMPUTE_32F_FAST_16F", torch.float32, False),
        ("COMPUTE_16F", torch.float16, False),
    ],
)
def test_torchs_gemms_take_part_only_where_they_compute_alike(
    compute_type, dtype, comparable, activation, search, gpu, monkeypatch
):
    """Neither alone nor as half of a pair: the compute type is a promise about every GEMM."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "activation_gradient", kernel_on_cpu)
    options = Options("nvmath", "error", search, compute_type)
    assert recipes.torch_is_comparable(dtype, options) is comparable
    expected = passes(Options("reference"), activation=activation, dtype=dtype)
    for a, e in zip(passes(options, activation=activation, dtype=dtype), expected, strict=True):
        assert relative_error(a, e) <= 8 * torch.finfo(dtype).eps
    names = {name for names in gpu.raced for name in names} | {r["winner"] for r in recipes.report()}
    assert len(winners()) == len(STAGES)
    if search == "measured":
        assert any(map(stages.is_torch, names)) == comparable
        assert any(parts(name) & TORCH_GEMMS for name in names) == comparable
    elif not comparable:
        assert not any(parts(name) & TORCH_GEMMS for name in names)
    exact = dtype is torch.float32 and compute_type in (None, "COMPUTE_32F_PEDANTIC")
    if activation == "gelu" and search == "measured":
        assert any("GELU" in name for name in names) is not exact


@pytest.mark.parametrize("search", ["measured", "heuristic"])
@pytest.mark.parametrize("compute_type", [None, "COMPUTE_32F_FAST_TF32", "COMPUTE_32F_PEDANTIC"])
def test_any_set_of_gradients_with_any_compute_type(compute_type, search, gpu):
    """A bias gradient alone is a sum, which has no compute type."""
    options = Options("nvmath", "error", search, compute_type)
    expected = dict(zip(Needs._fields, passes(Options("reference"), dtype=torch.float32)[2:], strict=True))
    for needs in itertools.product([True, False], repeat=5):
        got = passes(options, dtype=torch.float32, needs=Needs(*needs))[2:]
        for need, a, e in zip(needs, got, expected.values(), strict=True):
            assert (a is not None) == need
            assert a is None or relative_error(a, e) <= 1e-5


def test_a_store_that_cannot_be_written_costs_nothing_but_a_warning(gpu, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    gpu.store = PlanStore(tmp_path / "file" / "plans.json", {})
    expected = passes(Options("reference"))
    for tokens in (6, 7, 6):
        actual = passes(MEASURED, tokens=tokens)
        if tokens == 6:
            assert all(relative_error(a, e) <= 2e-2 for a, e in zip(actual, expected, strict=True))
    assert len(gpu.raced) == 2 * len(STAGES)
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_choices_keep_no_tensor_alive(gpu):
    case = make_case((6,), dtype=BF16)
    alive = weakref.ref(case.x)
    recipes.forward(*case.tensors, "gelu", MEASURED)
    gpu.refuse = {"BIAS"}
    recipes.forward(*case.tensors, "relu", Options("nvmath", "fallback", "measured"))
    assert recipes.fallback_reasons()
    del case
    gc.collect()
    assert alive() is None


def test_a_refusal_after_the_race_falls_back_for_good(gpu, caplog):
    """A misaligned tensor, say, for which cuBLASLt has nothing."""
    options = Options("nvmath", "fallback", "measured")
    expected = passes(options)
    gpu.refuse = {"BIAS"}
    for _ in range(2):
        assert all(torch.equal(a, e) for a, e in zip(passes(options), expected, strict=True))
    assert recipes.fallback_reasons() == {"BIAS is not for this problem": 4}  # forward and inference, twice
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
