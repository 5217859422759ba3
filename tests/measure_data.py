"""Measures the preparation of large text files: ``python tests/measure_data.py`` (minutes; 4 GB in the temp folder).

Writes docs/results/data_preparation.json. Each row is one fresh process, held to ``cores`` cores, that prepares a text
with a cold cache and reports its own peak resident memory. ``numbered`` is a single file: the Python standard library
over and over with a running number before every line, so that it does not repeat itself exactly. ``stdlib`` is the
default corpus as it is. Speed is also given per second of processor time, which other load on the machine affects
less; that time includes importing datasets and hashing the text for the cache, which ``encode_s`` does not.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from fusedmlp import prepare
from fusedmlp.config import DataConfig
from fusedmlp.corpus import documents
from fusedmlp.data import load_data

RESULT = Path(__file__).resolve().parent.parent / "docs/results/data_preparation.json"
CASES = [("bytes", 1000, 1), ("bpe", 100, 1), ("bpe", 1000, 1), ("bpe", 0, 1)]
"""(tokenizer, MB = 10^6 bytes of numbered text or 0 for the standard library, cores)"""


def write_text(path: Path, size: int) -> None:
    """Write exactly ``size`` bytes of numbered source lines."""
    written = number = 0
    with open(path, "wb") as file:
        while written < size:
            for _, block in documents(DataConfig()).blocks():
                for line in block.splitlines(keepends=True):
                    number += 1
                    numbered = b"%d %s" % (number, line)
                    written += file.write(numbered[: size - written])


def measure(tokenizer: str, path: str, cores: int) -> dict[str, object]:
    """Prepare ``path`` (or the standard library, for "stdlib") in this process; GiB are 2^30 bytes."""
    available = sorted(os.sched_getaffinity(0))
    assert len(available) >= cores, f"{cores} cores wanted, {len(available)} available"
    os.sched_setaffinity(0, available[:cores])
    learn, learn_s, learn_cpu_s = prepare._tokenizer, 0.0, 0.0

    def timed(*arguments):
        nonlocal learn_s, learn_cpu_s
        start, start_cpu = time.perf_counter(), time.process_time()
        result = learn(*arguments)
        learn_s, learn_cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        return result

    prepare._tokenizer = timed
    with tempfile.TemporaryDirectory() as cache:
        source = "stdlib" if path == "stdlib" else "files"
        config = DataConfig(source=source, files=[path], tokenizer=tokenizer, cache_dir=cache)
        start, start_cpu = time.perf_counter(), time.process_time()
        data = load_data(config, block_size=1024, seed=0)
        total_s, encode_cpu_s = time.perf_counter() - start, time.process_time() - start_cpu - learn_cpu_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        start = time.perf_counter()
        load_data(config, block_size=1024, seed=0)
        warm_s = time.perf_counter() - start
    mb = data.meta["bytes"] / 1e6
    encode_s = data.meta["seconds"] - learn_s
    return {
        "tokenizer": tokenizer,
        "text": "stdlib" if path == "stdlib" else "numbered",
        "text_mb": round(mb),
        "cores": cores,
        "total_s": round(total_s, 1),
        "learn_s": round(learn_s, 1),
        "encode_s": round(encode_s, 1),
        "encode_mb_per_s": round(mb / encode_s, 1),
        "encode_mb_per_cpu_s": round(mb / encode_cpu_s, 1),
        "bytes_per_token": round(data.bytes_per_token("train"), 2),
        "peak_rss_gib": round(peak / 2**20, 2),
        "warm_s": round(warm_s, 2),
    }


def main() -> None:
    """Run all cases, or the one that the arguments name (how the parent starts its children)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", nargs=3, metavar=("TOKENIZER", "PATH", "CORES"))
    case = parser.parse_args().case
    if case:
        print(json.dumps(measure(case[0], case[1], int(case[2]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokenizer, mb, cores in CASES:
            path = Path(folder) / f"{mb}.txt"
            if mb and not path.exists():
                write_text(path, mb * 10**6)
            command = [sys.executable, __file__, "--case", tokenizer, str(path) if mb else "stdlib", str(cores)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(output.splitlines()[-1]))
            print(rows[-1], flush=True)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    environment = {
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        **{name: version(name) for name in ("datasets", "tokenizers", "numpy", "torch", "pyarrow")},
        "date": date.today().isoformat(),
    }
    result = {"command": "python tests/measure_data.py", "environment": environment, "rows": rows}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
