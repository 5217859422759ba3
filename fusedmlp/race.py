"""Races: run every candidate on the real tensors, interleaved, and keep the fastest.

Which recipe wins depends on GPU, shape, dtype and library version, so nothing here is a table. What is timed is the
device: a sleeping kernel holds the GPU back while the host queues the work, so that host time does not show (under CUDA
graphs it will not, and in eager mode all candidates share it). Order rotates from round to round, and the median over
rounds decides, so that a drift of the clocks hits all alike.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fusedmlp.plans import Unsupported
from fusedmlp.store import Race

log = logging.getLogger(__name__)

ROUNDS = 7
TARGET_S = 300e-6  # device time of one measurement: several repeats of what is short
MAX_REPEATS = 10
MARGIN = 0.01  # a challenger must beat the earlier-listed candidate by this, or noise would choose
SLEEP_CYCLES_PER_S = 2.0e9  # at the highest clock; at a lower one the GPU sleeps a little longer


def hold(candidates: dict[str, Callable[[], Any]], device: torch.device) -> Race:
    """Race ``candidates`` (name -> thunk) on ``device``; earlier-listed ones win ties.

    Raises:
        Unsupported: no candidate runs; the message is the first refusal.
    """
    runners, refusals = warm_up(candidates)
    if not runners:
        raise Unsupported(next(iter(refusals.values()), "there is no way to compute it"))
    times = measure(runners, device)
    winner = next(iter(times))
    for name, t in times.items():
        if t < times[winner] * (1 - MARGIN):
            winner = name
    return Race(winner, {k: round(v * 1e6, 2) for k, v in times.items()})


def warm_up(candidates: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Run each candidate twice, which plans and compiles: those that run, and why the others do not."""
    runners, refusals = {}, {}
    for name, run in candidates.items():
        try:
            run()
            run()
            runners[name] = run
        except Unsupported as refusal:
            refusals[name] = str(refusal)
    return runners, refusals


def measure(runners: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median device seconds of each."""
    with torch.cuda.device(device):
        repeats = {}
        for name, run in runners.items():
            repeats[name] = max(1, min(MAX_REPEATS, round(TARGET_S / max(_timed(run, 1), 1e-6))))
        times: dict[str, list[float]] = {name: [] for name in runners}
        order = list(runners)
        for _ in range(ROUNDS):
            order = order[1:] + order[:1]
            for name in order:
                times[name].append(_timed(runners[name], repeats[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def _timed(run: Callable[[], Any], repeats: int) -> float:
    """Device seconds of one call, over ``repeats`` calls queued behind a sleeping kernel."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    queued = time.perf_counter()
    run()
    host_s = time.perf_counter() - queued
    torch.cuda._sleep(int(min(0.02, 1.5 * repeats * host_s + 50e-6) * SLEEP_CYCLES_PER_S))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats
