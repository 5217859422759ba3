"""Interleaved timing: several ways to compute one thing, measured so that drift of the machine hits them all alike.

* On a GPU each arm is captured in a CUDA graph, and replays are timed with events: no launch gaps, no host time. On a
  CPU there are no graphs; calls are timed with ``perf_counter``.
* The arms take turns. Their order changes every round, by a scheme in which each arm follows each other one equally
  often, because a turn also feels the heat and the caches that the one before it left.
* The time of an arm is the median over rounds. A ratio of two arms is the median of the rounds' ratios, with a 95%
  interval from bootstrapping over rounds.
* Results are checked before anything is timed, on what the captured graph wrote into poisoned memory: a wrong arm is
  left out, and said to be wrong.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WARM_UP_CALLS = (
    3  # compilation, autotuning and library handles; the third call shows that the second left nothing to do
)
WARM_UP_ROUNDS = 2
MAX_CALLS = 10_000  # in one turn
RESAMPLES = 2000
SLOW_S = 5.0  # preparations that take longer are worth a line

log = logging.getLogger(__name__)

Step = Callable[[], tuple[Tensor, ...]]
"""One computation; it returns its results."""


class Unavailable(RuntimeError):
    """An arm that cannot take part here; the message says why."""


class Wrong(RuntimeError):
    """An arm whose results are wrong; the message says by how much."""


class Interval(NamedTuple):
    """A ratio and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(slots=True)
class Outcome:
    """What a contest gave."""

    times: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds a call, for each arm and round."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why an arm was not timed."""
    wrong: list[str] = field(default_factory=list)
    """Those of :attr:`left_out` whose results were wrong."""
    prepare_s: dict[str, float] = field(default_factory=dict)
    """Seconds until an arm was ready: compiling, autotuning, capturing."""

    def us(self) -> dict[str, float]:
        """The median time of each arm, microseconds."""
        return {arm: median(times) for arm, times in self.times.items()}

    def ratio(self, arm: str, over: str, seed: int = 0) -> Interval:
        """Time of ``arm`` over time of ``over``."""
        return ratio_of(self.times[arm], self.times[over], seed)


def ratio_of(times: list[float], over: list[float], seed: int = 0) -> Interval:
    """The median of the rounds' ratios ``times / over``, with a bootstrap interval that depends on ``seed`` alone."""
    ratios = np.array(times) / np.array(over)
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return Interval(float(np.median(ratios)), float(low), float(high))


def contest(
    arms: Mapping[str, Callable[[], Step]],
    check: Callable[[str, tuple[Tensor, ...]], None],
    device: torch.device,
    rounds: int,
    block_ms: float,
    host: bool = False,
) -> Outcome:
    """Build, check and time ``arms``.

    Args:
        arms: for each name, what builds its step. It may raise; :class:`Unavailable` is the polite way.
        check: called with the name and the results of each arm; raises :class:`Wrong` when they are.
        device: where the steps compute.
        rounds, block_ms: as in :class:`fusedmlp.config.BenchConfig`.
        host: call the steps as they are, and take the host's time.
    """
    outcome = Outcome()
    ready: dict[str, Callable[[], object]] = {}
    for name, build in arms.items():
        start = time.perf_counter()
        try:
            run, outputs = prepare(build(), device, capture=device.type == "cuda" and not host)
            check(name, outputs)
            ready[name] = run
        except (Unavailable, Wrong) as reason:
            outcome.left_out[name] = f"wrong: {reason}" if isinstance(reason, Wrong) else str(reason)
            if isinstance(reason, Wrong):
                outcome.wrong.append(name)
        except Exception as error:  # any library may be behind an arm; its failure must not end the others' contest
            lines = str(error).strip().splitlines() or [""]
            outcome.left_out[name] = f"failed: {type(error).__name__}: {lines[0][:300]}"
        outputs = ()
        outcome.prepare_s[name] = seconds = time.perf_counter() - start
        if name in outcome.wrong or outcome.left_out.get(name, "").startswith("failed"):
            log.warning("  %s %s", name, outcome.left_out[name])
        elif seconds > SLOW_S:
            log.info("  %s was ready after %.0f s", name, seconds)
    outcome.times = interleave(ready, device, rounds, block_ms, host)
    return outcome


def release(device: torch.device) -> None:
    """Give back what a contest held: graphs, their memory, compiled code."""
    # Without this, torch.compile would take the next width for a dynamic one, and give up after eight of them.
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prepare(step: Step, device: torch.device, capture: bool) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """Warm ``step`` up and, if asked, capture it in a CUDA graph: what to run, and the results of one run."""
    if not capture:
        for _ in range(WARM_UP_CALLS):
            outputs = step()
        return step, outputs
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # as torch's notes on CUDA graphs ask: not on the default stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        for t in outputs:
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
    return Replay(graph, step), outputs


@dataclass(frozen=True)
class Replay:
    """Replays a graph, and keeps what it was captured from: its kernels point to the step's weights and inputs."""

    graph: torch.cuda.CUDAGraph
    step: Step

    def __call__(self) -> None:
        """One run."""
        self.graph.replay()


def interleave(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, block_ms: float, host: bool = False
) -> dict[str, list[float]]:
    """Microseconds a call of each of ``runs``, in each round.

    Args:
        runs: what to call, by name.
        device: where the calls compute.
        rounds: how often each takes its turn; some more go first, untimed.
        block_ms: length of a turn; short calls are repeated.
        host: measure the host's time until the calls return, not the device's until they are done.
    """
    turn = _host_turn if host or device.type != "cuda" else _device_turn
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    with _quiet():
        calls = {}
        for name, run in runs.items():
            us = min(turn(run, 3, device)() for _ in range(2))
            calls[name] = max(1, min(MAX_CALLS, math.ceil(block_ms * 1e3 / us)))
        for number in range(-WARM_UP_ROUNDS, rounds):
            readings = {names[i]: turn(runs[names[i]], calls[names[i]], device) for i in order(len(names), number)}
            for name, read in readings.items():
                if number >= 0:
                    times[name].append(read())
    return times


def order(arms: int, number: int) -> list[int]:
    """The order of the arms in a round: rows of a Williams square, where each arm follows each other equally often."""
    zigzag = [(i + 1) // 2 if i % 2 else arms - i // 2 for i in range(arms)]
    row = [(i + number) % arms for i in zigzag]
    return row[::-1] if arms and number // arms % 2 else row  # an odd number of arms takes both directions


def _device_turn(run: Callable[[], object], calls: int, device: torch.device) -> Callable[[], float]:
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()  # untimed: it meets the caches that the arm before left
        start.record()
        for _ in range(calls):
            run()
        end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    return read


def _host_turn(run: Callable[[], object], calls: int, device: torch.device) -> Callable[[], float]:
    run()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    _synchronize(device)
    return lambda: seconds * 1e6 / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection inside."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# Results


def relative_error(result: Tensor, reference: Tensor) -> float:
    """‖result − reference‖ / ‖reference‖ in float64; infinite for another shape, and for any NaN."""
    if result.shape != reference.shape:
        return math.inf
    norm = float(reference.double().norm())
    error = float((result.double() - reference.double()).norm()) / (norm or 1.0)
    return error if math.isfinite(error) else math.inf


def relative_errors(results: tuple[Tensor, ...], references: tuple[Tensor, ...]) -> list[float]:
    """:func:`relative_error` of each; a missing or surplus result is an error without bound."""
    if len(results) != len(references):
        return [math.inf] * len(references)
    return [relative_error(a, b) for a, b in zip(results, references, strict=True)]


def require(names: tuple[str, ...], errors: list[float], limits: list[float]) -> None:
    """Raise :class:`Wrong` for errors above their limits."""
    bad = [f"{n}: {e:.1e} > {m:.1e}" for n, e, m in zip(names, errors, limits, strict=True) if not e <= m]
    if bad:
        raise Wrong(f"relative error against float64 {', '.join(bad)}")
