"""The benchmarks: who is timed and who is not, fair turns, and what is left on disk; on a CPU, at toy sizes."""

import json
import math
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import ROOT, compose_config

from fusedmlp import bench, bench_gemm, bench_mlp, epilogs, gemms, mlp_arms, plans, timing
from fusedmlp.bench_gemm import GEMMS, claim
from fusedmlp.bench_report import Table
from fusedmlp.config import BENCH_ARMS, BenchConfig
from fusedmlp.launch import RunFailed
from fusedmlp.mlp_arms import ARMS, Problem
from fusedmlp.recipes import Options
from fusedmlp.schema import ConfigError
from fusedmlp.timing import Unavailable, Wrong

CPU = torch.device("cpu")
SMALL = "device=cpu widths=[32] tokens=16 rounds=3 block_ms=0.2 dtypes=[fp32] mlp.plan_store=null".split()
QUICK = "arms=[fused,eager,addmm_activation,gemm_floor,apex]"  # without torch.compile


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gemm, "MIN_TIMER_S", 1e-4)

    def make(*overrides: str) -> BenchConfig:
        return compose_config([*SMALL, QUICK, f"run_dir={tmp_path}", *overrides], "bench", BenchConfig)

    return make


def problem(**changed) -> Problem:
    given = {"tokens": 16, "width": 32, "activation": "gelu", "dtype": torch.float32, "training": True}
    return Problem(**{**given, **changed}, device=CPU, seed=0, options=Options())


def rows_of(path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


# ---------------------------------------------------------------------------------------------------------------------
# Timing


@pytest.mark.parametrize("arms", range(1, 10))
def test_each_arm_follows_each_other_one_equally_often(arms):
    rounds = [timing.order(arms, number) for number in range(2 * arms)]
    assert all(sorted(r) == list(range(arms)) for r in rounds)
    follows = Counter(pair for r in rounds for pair in pairwise(r))
    assert len(follows) == arms * (arms - 1)
    assert len(set(follows.values())) <= 1
    assert all(Counter(r[i] for r in rounds) == dict.fromkeys(range(arms), 2) for i in range(arms))


def test_a_ratio_is_taken_within_rounds():
    drift = [1.0, 2.0, 4.0, 8.0]
    assert timing.ratio_of([3 * d for d in drift], drift) == (3, 3, 3)
    ratio = timing.ratio_of([1.0, 1.1, 0.9, 1.3, 1.0], [1.0] * 5, seed=1)
    assert ratio == timing.ratio_of([1.0, 1.1, 0.9, 1.3, 1.0], [1.0] * 5, seed=1)
    assert 0.9 <= ratio.low <= ratio.value == 1.0 <= ratio.high <= 1.3


def test_turns_are_of_equal_length_and_all_rounds_count():
    calls = Counter()

    def run(name: str, loops: int) -> None:
        calls[name] += 1
        sum(range(loops))

    times = timing.interleave({"a": partial(run, "a", 100), "b": partial(run, "b", 20_000)}, CPU, 5, 2.0)
    assert [len(t) for t in times.values()] == [5, 5]
    assert min(times["b"]) > min(times["a"])
    assert calls["a"] > calls["b"] > 5


def test_a_contest_times_only_who_is_right(caplog):
    def unavailable():
        raise Unavailable("no such thing here")

    def broken():
        raise ZeroDivisionError("oh\nno")

    def check(name, results):
        timing.require(("y",), [timing.relative_error(results[0], torch.ones(3))], [1e-6])

    arms = {
        "right": lambda: lambda: (torch.ones(3),),
        "wrong": lambda: lambda: (torch.tensor([1, 1, 1.5]),),
        "unwritten": lambda: lambda: (torch.full((3,), math.nan),),
        "absent": unavailable,
        "broken": broken,
    }
    for host in (False, True):
        outcome = timing.contest(arms, check, CPU, 2, 0.1, host=host)
        assert list(outcome.times) == list(outcome.us()) == ["right"]
        assert outcome.wrong == ["wrong", "unwritten"]
        assert outcome.left_out == {
            "wrong": "wrong: relative error against float64 y: 2.9e-01 > 1.0e-06",
            "unwritten": "wrong: relative error against float64 y: inf > 1.0e-06",
            "absent": "no such thing here",
            "broken": "failed: ZeroDivisionError: oh",
        }
        assert set(outcome.prepare_s) == set(arms)


def test_an_empty_contest_is_no_error():
    assert timing.contest({}, lambda *_: None, CPU, 2, 0.1).us() == {}


def test_relative_errors():
    ones = torch.ones(2, 2)
    assert timing.relative_error(ones, ones) == 0
    assert timing.relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert timing.relative_error(torch.full((2, 2), 1e-3), torch.zeros(2, 2)) == pytest.approx(2e-3)
    assert timing.relative_error(ones[0], ones) == math.inf
    assert timing.relative_errors((ones,), (ones, ones)) == [math.inf] * 2
    with pytest.raises(Wrong, match=r"b: 2\.0e\+00 > 1"):
        timing.require(("a", "b"), [0.0, 2.0], [1.0, 1.0])
    with pytest.raises(Wrong):
        timing.require(("a",), [math.nan], [1.0])


# ---------------------------------------------------------------------------------------------------------------------
# The arms of the MLP


def test_config_and_arms_agree():
    assert tuple(ARMS) == BENCH_ARMS


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_and_eager_are_right(training, activation, dtype):
    p = problem(training=training, activation=activation, dtype=dtype)
    for arm in ("fused", "eager"):
        assert len(p.errors(arm, ARMS[arm](p)())) == (6 if training else 1)


def test_a_step_has_the_gradients_of_autograd():
    p = problem()
    y, *grads = ARMS["fused"](p)()
    again = p.eager(p.x)
    again.backward(p.dy)
    torch.testing.assert_close(y, again.detach())
    assert not y.requires_grad
    for grad, t in zip(grads, [p.x, *p.eager.parameters()], strict=True):
        torch.testing.assert_close(grad, t.grad)


@pytest.mark.parametrize("result", range(6))
def test_every_result_is_checked(result):
    p = problem()
    results = [r.clone() for r in ARMS["eager"](p)()]
    results[result].view(-1)[0] += 1
    with pytest.raises(Wrong, match=f"{mlp_arms.RESULTS[result]}: "):
        p.errors("fused", tuple(results))


def test_an_arm_with_a_norm_is_compared_with_a_norm():
    p = problem()
    plain, norm = p.right(False), p.right(True)
    assert not torch.equal(plain[0][0], norm[0][0])
    assert p.errors("transformer_engine", tuple(t.float() for t in norm[0]))
    with pytest.raises(Wrong):
        p.errors("transformer_engine", tuple(t.float() for t in plain[0]))


@pytest.mark.parametrize(("training", "gemms"), [(True, 6), (False, 2)])
def test_the_floor_is_the_gemms_and_nothing_else(training, gemms):
    p = problem(training=training)
    step = ARMS["gemm_floor"](p)
    with torch.profiler.profile() as profile:
        outputs = step()
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["aten::mm"] == gemms
    assert set(counts) <= {"aten::mm", "aten::t", "aten::transpose", "aten::as_strided", "aten::resolve_conj"}
    assert p.flops == sum(2 * 16 * 32 * 128 for _ in outputs)


@pytest.mark.parametrize("training", [True, False])
def test_the_floor_multiplies_what_the_mlp_does(training):
    p = problem(training=training)
    outputs, (y, *grads) = ARMS["gemm_floor"](p)(), ARMS["eager"](p)()
    torch.testing.assert_close(outputs[1] + p.eager.fc2.bias.detach(), y)
    if training:
        for output, grad in zip([outputs[5], outputs[4], outputs[2]], [grads[0], grads[1], grads[3]], strict=True):
            torch.testing.assert_close(output, grad)


def test_addmm_activation_takes_part_where_it_computes_the_same():
    with pytest.raises(Unavailable, match="no backward"):
        ARMS["addmm_activation"](problem())
    with pytest.raises(Unavailable, match="not the tanh form on cpu"):
        ARMS["addmm_activation"](problem(training=False))
    p = problem(training=False, activation="relu")
    p.errors("addmm_activation", ARMS["addmm_activation"](p)())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_form_of_gelu_is_told_apart_in_any_dtype(dtype, monkeypatch):
    p = problem(training=False, dtype=dtype)
    for form, expected in (("tanh", True), ("none", False)):

        def fake(bias, a, b, use_gelu, form=form):
            return torch.nn.functional.gelu(torch.addmm(bias, a, b), approximate=form)

        monkeypatch.setattr(torch, "_addmm_activation", fake)
        assert mlp_arms._gelu_is_tanh(p) is expected


@pytest.mark.parametrize("arm", ["transformer_engine", "flash_attn", "apex"])
def test_peers_are_optional(arm, monkeypatch):
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        ARMS[arm](problem())
    p = problem()
    p.device = torch.device("cuda")
    with pytest.raises(Unavailable, match="cannot be imported: ModuleNotFoundError"):
        ARMS[arm](p)


def test_imprecise_compute_types_have_a_limit_of_their_own():
    p = problem()
    assert max(p.limits([1e-7])) < 1e-6
    p.options = Options(compute_type="COMPUTE_32F_FAST_TF32")
    assert p.limits([1e-7]) == pytest.approx([1e-2], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# What is left on disk


def test_all_benchmarks_run_on_a_cpu(small, tmp_path, capsys):
    bench.run(small())
    printed = capsys.readouterr().out
    for name in ("gemm", "mlp", "precision", "host"):
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["rows"]
        assert record["command"].startswith("python -m fusedmlp.bench")
        assert record["environment"]["torch"] == torch.__version__
        assert record["config"]["widths"] == [32]
        assert "Wall clock" in record["method"]
        text = (tmp_path / f"{name}.md").read_text()
        assert record["title"] in printed
        assert text.startswith(f"# {record['title']}\n")
        assert f"]({name}.png)" in text
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    mlp = json.loads((tmp_path / "mlp.json").read_text())
    assert mlp["engine"] == "reference"
    assert {(r["pass"], r["activation"]) for r in mlp["rows"]} == {
        (p, a) for p in ("training", "inference") for a in ("gelu", "relu")
    }
    training = next(r for r in mlp["rows"] if r["pass"] == "training")
    assert set(training["us"]) == {"fused", "eager", "gemm_floor"}
    assert set(training["left_out"]) == {"addmm_activation", "apex"}
    value, low, high = training["speedup_of_fused_over"]["eager"]
    assert 0 < low <= value <= high
    assert training["fastest_torch"] == "eager"
    assert {m["widths"] for m in mlp["geometric_means"]} == {"<= 1600", "all"}
    assert "apex: needs a CUDA device (every case)" in (tmp_path / "mlp.md").read_text()
    assert "nothing about fused epilogs" in (tmp_path / "mlp.md").read_text()
    gemm = json.loads((tmp_path / "gemm.json").read_text())["rows"]
    assert all("needs a CUDA device" in r["left_out"]["epilog_tuned"] for r in gemm)
    assert "epilog_tuned: the nvmath engine needs a CUDA device" in printed


def test_names(small, tmp_path):
    for overrides in (["bench=host"], ["bench=host", "name=mine"]):
        bench.run(small(*overrides, "passes=[inference]", "activations=[relu]", "rounds=1"))
    assert {p.name for p in tmp_path.glob("*.json")} == {"host.json", "mine.json"}


def test_torch_compile_takes_part_and_is_compiled_for_each_width(small, tmp_path):
    given = "bench=mlp arms=[fused,compile] widths=[32,48] activations=[relu] passes=[inference]".split()
    bench.run(small(*given))
    assert [set(r["us"]) for r in rows_of(tmp_path / "mlp.json")] == [{"fused", "compile"}] * 2


def test_a_wrong_arm_is_not_timed_and_ends_in_status_1(small, tmp_path, monkeypatch):
    def garbage(p):
        return lambda: tuple(torch.full_like(r, math.nan) for r in ARMS["eager"](p)())

    monkeypatch.setitem(ARMS, "fused", garbage)
    with pytest.raises(RunFailed, match=r"mlp training 32 gelu fp32: fused: wrong: .* y: inf"):
        bench.run(small("bench=mlp", "passes=[training]", "activations=[gelu]"))
    (row,) = rows_of(tmp_path / "mlp.json")
    assert "fused" not in row["us"]
    assert row["wrong"] == ["fused"]
    assert row["speedup_of_fused_over"] == {}
    assert "fused: wrong" in (tmp_path / "mlp.md").read_text()
    assert (tmp_path / "mlp.png").exists()


def test_a_failure_of_our_own_is_status_1_and_of_a_peer_is_not(small, monkeypatch):
    def broken(p):
        raise RuntimeError("boom")

    given = ("bench=mlp", "passes=[inference]", "activations=[relu]")
    monkeypatch.setitem(ARMS, "apex", broken)
    bench.run(small(*given))
    monkeypatch.setitem(ARMS, "fused", broken)
    with pytest.raises(RunFailed, match="fused: failed: RuntimeError: boom"):
        bench.run(small(*given))


def test_a_killed_run_keeps_what_it_has_finished(small, tmp_path, monkeypatch):
    real, calls = bench_mlp._measure, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(bench_mlp, "_measure", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(small("bench=mlp"))
    assert len(rows_of(tmp_path / "mlp.json")) == 2


def test_fallbacks_are_named(small, tmp_path, monkeypatch):
    counts = iter([{}, {"too wide": 3}, {"too wide": 3}])
    monkeypatch.setattr(bench_mlp, "fallback_reasons", lambda: next(counts))
    bench.run(small("bench=mlp", "passes=[inference]", "activations=[relu]"))
    assert rows_of(tmp_path / "mlp.json")[0]["fallbacks"] == ["too wide"]
    assert "torch operations took their place: too wide" in (tmp_path / "mlp.md").read_text()


def test_means_are_over_the_same_cases():
    def row(width, **over):
        return {
            "pass": "training",
            "dtype": "bf16",
            "activation": "gelu",
            "width": width,
            "fastest_torch": min(over, key=over.get),
            "speedup_of_fused_over": {arm: timing.Interval(v, v, v) for arm, v in over.items()},
        }

    found = bench_mlp.means([row(768, eager=2.0, compile=1.5), row(1600, eager=8.0), row(2048, eager=4.0)])
    by = {(m["activation"], m["widths"]): m for m in found}
    assert by["gelu", "<= 1600"]["cases"] == 2
    assert by["gelu", "<= 1600"]["speedup_of_fused_over"]["eager"] == pytest.approx(4)
    assert by["all", "all"]["speedup_of_fused_over"]["eager"] == pytest.approx(4)
    assert by["all", "all"]["speedup_of_fused_over"]["fastest_torch"] == pytest.approx(48 ** (1 / 3))
    assert "compile" not in by["all", "all"]["speedup_of_fused_over"]


def test_a_table_is_markdown():
    text = Table("", ["a", "long head"], [["1", "2"], ["three", ""]]).text()
    assert text.splitlines() == [
        "| a     | long head |",
        "|-------|-----------|",
        "| 1     | 2         |",
        "| three |           |",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Epilogs and compute types, with the textbook in the place of cuBLASLt


@pytest.fixture
def pretend(monkeypatch):
    """nvmath on the CPU: ``pretend(change)`` computes what the textbook says, changed by a function."""

    def install(change=lambda epilog, result: result):
        def gemm(epilog, a, b, *, bias=None, aux=None, compute_type=None, tune=True):
            return change(epilog, epilogs.gemm(epilog, a, b, bias=bias, aux=aux))

        monkeypatch.setattr(plans, "why_unavailable", lambda device: None)
        monkeypatch.setattr(gemms, "gemm", gemm)

    return install


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_epilogs_are_measured_against_separate_kernels(small, tmp_path, pretend, dtype):
    pretend()
    bench.run(small("bench=gemm", f"dtypes=[{dtype}]"))
    rows = rows_of(tmp_path / "gemm.json")
    assert len(rows) == sum(map(len, GEMMS.values()))
    for row in rows:
        assert set(row["us"]) == set(row["timer_us"]) == {"plain", "separate", "epilog_first", "epilog_tuned"}
        assert row["speedup_pct"] == pytest.approx(100 * (row["speedup_over_separate"][0] - 1))
        assert row["share_of_claim"] == pytest.approx([row["speedup_pct"] / 20, row["speedup_pct"] / 50])


def test_an_unwritten_bias_gradient_is_found(small, pretend):
    pretend(lambda e, r: r if r.bgrad is None else r._replace(bgrad=torch.zeros_like(r.bgrad)))
    with pytest.raises(RunFailed, match=r"gemm dW2 BGRADB 32 fp32: epilog_first: wrong: .*bias gradient: 1\.0e\+00"):
        bench.run(small("bench=gemm"))


def test_a_refusal_is_no_failure(small, tmp_path, pretend):
    def refuse(epilog, result):
        if epilog == "BGRADB":
            raise plans.Unsupported("not on this GPU")
        return result

    pretend(refuse)
    bench.run(small("bench=gemm"))
    row = rows_of(tmp_path / "gemm.json")[-1]
    assert row["left_out"] == dict.fromkeys(["epilog_first", "epilog_tuned"], "not on this GPU")
    assert row["speedup_pct"] is None


def test_compute_types(small, tmp_path, pretend):
    pretend()
    bench.run(small("bench=precision"))
    rows = {r["dtype"]: r for r in rows_of(tmp_path / "precision.json")}
    assert {d: set(r["relative_error"]) - {"torch"} for d, r in rows.items()} == {
        "fp32": {
            "COMPUTE_32F",
            "COMPUTE_32F_PEDANTIC",
            "COMPUTE_32F_FAST_TF32",
            "COMPUTE_32F_FAST_16BF",
            "COMPUTE_32F_FAST_16F",
        },
        "fp16": {"COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_16F"},
        "bf16": {"COMPUTE_32F", "COMPUTE_32F_PEDANTIC"},
    }
    assert rows["fp32"]["relative_error"]["COMPUTE_32F"] < 1e-6 < rows["bf16"]["relative_error"]["COMPUTE_32F"]


def test_an_inexact_compute_type_is_wrong(small, pretend):
    pretend(lambda e, r: r._replace(d=r.d * 1.1))
    with pytest.raises(RunFailed, match=r"precision 32 fp32: COMPUTE_32F: wrong: .* D: 1\.0e-01 > 1\.0e-05"):
        bench.run(small("bench=precision"))


@pytest.mark.parametrize(
    ("pct", "words"),
    [(None, "–"), (-3.0, "none of it"), (5.0, "25% of the lower end"), (20.0, "within"), (51.0, "above")],
)
def test_the_claim(pct, words):
    assert claim({"speedup_pct": pct}) == words


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("bench=gem", "bench='gem' is not one of gemm, mlp, precision, host, all; did you mean gemm?"),
        ("arms=[fused,max-autotun]", "did you mean max-autotune?"),
        ("arms=[]", "arms is empty; give at least one"),
        ("widths=[]", "widths is empty"),
        ("widths=[8,0]", "widths holds 0, which must be >= 1"),
        ("widths=[8,8]", "widths holds an item twice"),
        ("dtypes=[bf61]", "dtypes='bf61' is not one of"),
        ("tokens=0", "tokens=0 must be >= 1"),
        ("block_ms=0", "block_ms=0.0 must be > 0"),
        ("name=a/b", "no file name"),
        ("mlp=torch", "it is the arm eager"),
    ],
)
def test_bad_configs_are_refused(override, said):
    with pytest.raises(ConfigError) as caught:
        compose_config([override], "bench", BenchConfig)
    assert said in str(caught.value)


def test_the_defaults_of_yaml_and_code_agree():
    assert compose_config([], "bench", BenchConfig) == BenchConfig()


def test_a_compute_type_must_fit_all_dtypes(small):
    with pytest.raises(ConfigError, match="does not take bfloat16"):
        bench.run(small("dtypes=[fp32,bf16]", "mlp.compute_type=COMPUTE_32F_FAST_TF32"))


def test_the_command(tmp_path):
    arguments = [*SMALL, "bench=host", "passes=[inference]", "rounds=1", "name=tiny"]
    command = [sys.executable, "-m", "fusedmlp.bench", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "fused / torch" in done.stdout
    (record,) = tmp_path.glob("runs/*/tiny.json")
    assert "bench=host" in json.loads(record.read_text())["command"]
    assert "results in" in done.stderr


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}
