"""A run's copy in Weights & Biases (W&B), behind one thread that training never waits for. The only door to wandb.

W&B's history can only be appended to, and its service writes to disk seconds later, so that a crash loses its newest
rows. A resumed run therefore asks which steps W&B holds, sends it the missing ones from metrics.jsonl, and leaves out
those that it already has. An offline run answers from its transaction log, which :func:`read_offline_run` reads.

wandb is imported inside functions: a disabled run never loads it, and an installation that cannot be imported is one
more W&B failure, not a failed training run.
"""

import html
import json
import logging
import os
import queue
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedmlp.config import TrackingConfig
from fusedmlp.files import write_atomic
from fusedmlp.schema import ConfigError

_logger = logging.getLogger(__name__)

MODES = ("disabled", "offline", "online")  # from least to most
REMEDY = "run `wandb login`, or set tracking.wandb=offline"
QUEUE_ROWS = 4096  # rows that may wait for W&B, some minutes of the fastest loop; memory stays bounded when W&B hangs
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = {"offline": 30.0, "online": 120.0}


def effective_mode(tracking: TrackingConfig) -> str:
    """The lesser of ``tracking.wandb`` and WANDB_MODE, in the order disabled < offline < online."""
    asked = os.environ.get("WANDB_MODE", "").lower().replace("dryrun", "offline")
    modes = [tracking.wandb, asked] if asked in MODES else [tracking.wandb]
    return min(modes, key=MODES.index)


def check(tracking: TrackingConfig) -> None:
    """Refuse ``online`` without credentials; it asks neither the network nor the terminal, and takes about a second.

    Raises:
        ConfigError: with a one-line remedy.
    """
    if effective_mode(tracking) != "online":
        return
    try:
        import wandb

        found = wandb.login(prompt=False, verify=False)
    except Exception as error:  # a malformed key, an installation that does not import
        raise ConfigError(f"tracking.wandb=online: {_line(error)}; {REMEDY}") from error
    if not found:
        raise ConfigError(f"tracking.wandb=online, but no W&B API key is configured; {REMEDY}")


class WandbRun:
    """A W&B run behind one daemon thread: every call into wandb is made there, where it may raise or hang."""

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingConfig,
        mode: str,
        config: dict[str, Any],
        earlier: list[dict[str, Any]] | None,
    ) -> None:
        self.run_dir, self.tracking, self.mode, self.config, self.earlier = run_dir, tracking, mode, config, earlier
        self.run_id: str | None = None
        self.error: str | None = None
        self.dropped = 0
        self._queue: queue.Queue[tuple[dict[str, Any], Any]] = queue.Queue(maxsize=QUEUE_ROWS)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        try:
            import wandb  # noqa: F401  (in this thread: two that import it at the same time trip over its cycles)
        except Exception as error:
            self._fail(_line(error))
            return
        self._thread.start()
        if mode == "online" and earlier is None:
            # Who asks for online wants to hear of a wrong key or team now. A resumed run is under way: it goes on.
            self._started.wait(INIT_TIMEOUT_S + 5)
            if self.error is not None:
                raise ConfigError(f"tracking.wandb=online: {self.error}; {REMEDY}")

    def put(self, row: dict[str, Any], samples: dict[str, str]) -> None:
        """Hand over a row without ever waiting."""
        if self.error is not None:
            return
        try:
            self._queue.put_nowait((row, samples))
        except queue.Full:
            if self.dropped == 0:
                _logger.warning(
                    "W&B does not keep up: it loses rows from step %d on; metrics.jsonl does not", row["step"]
                )
            self.dropped += 1

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Wait for the thread, but no longer than FINISH_TIMEOUT_S."""
        limit = FINISH_TIMEOUT_S[self.mode]
        deadline = time.monotonic() + limit
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put((summary, exit_code), timeout=0.1)
                break
            except queue.Full:
                continue
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"no answer within {limit:g} s at the end of the run")
            _kill_service()
        if self.dropped:
            _logger.warning("W&B lacks %d rows of this run; metrics.jsonl has them", self.dropped)

    def state(self) -> dict[str, Any]:
        """What summary.json says of W&B."""
        return {"mode": self.mode, "run_id": self.run_id, "rows_dropped": self.dropped, "error": self.error}

    def _fail(self, problem: str) -> None:
        self.error = problem
        _logger.warning("W&B is off for the rest of this run (%s); metrics.jsonl and summary.json go on", problem)

    def _work(self) -> None:
        try:
            try:
                run, held = self._init()
                self._started.set()
                for row in self.earlier or []:
                    self._send(run, row, {}, held)
                self.earlier = None  # may be many
                while self.error is None:  # set by finish() when it has given up
                    row, extra = self._queue.get()
                    if isinstance(extra, int):  # the summary, with the exit code
                        run.summary.update(row)
                        run.finish(exit_code=extra)
                        return
                    self._send(run, row, extra, held)
            except Exception as error:
                self._fail(_line(error))
        finally:
            self._started.set()

    def _init(self) -> tuple[Any, set[int] | range]:
        """Start the W&B run; returns it with the steps that its history already holds."""
        if self.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports would go over the network
        import wandb

        self.run_id = _run_id(self.run_dir / "wandb")
        resumed = self.earlier is not None
        held: set[int] | range = set()
        if resumed and self.mode == "offline":
            held = {int(row.get("step", row["_step"])) for row in read_offline_run(self.run_dir / "wandb")["history"]}
        wanted = {
            "mode": self.mode,
            "silent": True,
            "console": "off",  # capturing would rewire stdout and keep a copy of everything printed
            "reinit": "create_new",  # two arms may be tracked in one process
            "init_timeout": INIT_TIMEOUT_S,
            "finish_timeout": FINISH_TIMEOUT_S[self.mode],
            "use_dot_wandb": False,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            # config and summary say what is worth knowing of the machine; host and user names are nobody's business,
            # and sampling CPU and GPU in the background would be measured along with the training
            "host": "local",
            "x_disable_stats": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": 1.0,  # seconds; the default, 15, is what a crash would cost
        }
        known = wandb.Settings.model_fields  # names that start with x_ come and go between releases
        run = wandb.init(
            dir=str(self.run_dir),
            project=self.tracking.project,
            entity=self.tracking.entity,
            group=self.tracking.group,
            name=self.tracking.name or self.run_dir.resolve().name,
            tags=list(self.tracking.tags),
            id=self.run_id,
            resume="allow",
            config=self.config,
            allow_val_change=True,  # a resumed run may have been given other values
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        if resumed and self.mode == "online":
            held = range(run.step)  # the server's word: it continues behind the last step that reached it
        return run, held

    def _send(self, run: Any, row: dict[str, Any], samples: dict[str, str], held: set[int] | range) -> None:
        if row["step"] in held:
            return
        values = {key: value for key, value in row.items() if value is not None}
        if samples:
            import wandb

            values |= {key: wandb.Html(f"<pre>{html.escape(text)}</pre>") for key, text in samples.items()}
        run.log(values, step=row["step"], commit=True)  # without commit, the row would wait for the next one


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _run_id(wandb_dir: Path) -> str:
    """The W&B run id of a run directory, made on first use, so that a resumed run is the same W&B run."""
    path = wandb_dir / "run_id"
    if not path.exists():
        wandb_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(path, secrets.token_hex(6) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _kill_service() -> None:
    """End a wandb service that does not answer: wandb's exit hook waits for it without limit, and so would Python."""
    try:
        from wandb.sdk import wandb_setup

        connection = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the exit hook
        connection._proc._process.kill()
    except Exception as error:  # not running, or another release keeps it elsewhere
        _logger.debug("wandb's service was not stopped: %s", _line(error))


def read_offline_run(path: Path) -> dict[str, Any]:
    """What W&B transaction logs hold, finished or cut off in mid-write.

    Args:
        path: a ``.wandb`` file, the directory of one W&B run, or a ``wandb`` directory, whose logs are read in the
            order of their time stamps as one run.

    Returns:
        ``id``, ``name``, ``config`` (nested), ``history`` (rows, with W&B's own ``_step``, ``_timestamp`` and
        ``_runtime``), ``summary``, and ``exit`` (the exit code, None while running and after a crash).
    """
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {"id": None, "name": None, "config": {}, "history": [], "summary": {}, "exit": None}
    found = [path] if path.is_file() else [*path.glob("*.wandb"), *path.glob("*/*.wandb")]
    # resolved, since `latest-run` is a second way to one of them; run-DATE and offline-run-DATE sort by date
    for file in sorted({f.resolve() for f in found}, key=lambda f: f.parent.name.removeprefix("offline-")):
        run["exit"] = None
        for data in _log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run["id"], run["name"] = record.run.run_id, record.run.display_name
                _update(run["config"], record.run.config.update)
            elif kind == "config":
                _update(run["config"], record.config.update)
            elif kind == "summary":
                _update(run["summary"], record.summary.update)
            elif kind == "history":
                run["history"].append({"_step": record.history.step.num})
                _update(run["history"][-1], record.history.item)
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
    return run


def _update(target: dict[str, Any], items: Any) -> None:
    for item in items:
        *parents, last = item.nested_key or [item.key]
        node = target
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = json.loads(item.value_json)


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B transaction log, which wandb itself reads in Go only (``wandb leet inspect FILE``).

    It is LevelDB's log format behind a 7-byte header ``:W&B``: blocks of 32 KiB, in which a record is one full piece or
    a first, middle and last piece. A piece is CRC-32 of kind and payload (4 bytes), length (2), kind (1), payload.
    """
    block, full, first, middle, last = 2**15, 1, 2, 3, 4
    position = 7 if data[:4] == b":W&B" else len(data)
    parts: list[bytes] = []
    while position + 7 <= len(data):
        if block - position % block < 7:  # no room for a piece's header: the rest of the block is padding
            position += block - position % block
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        payload = data[position + 7 : position + 7 + length]
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(bytes([kind]))) != crc:
            parts, position = [], position + block - position % block  # damaged: the next block starts a piece again
            continue
        position += 7 + length
        if kind in (full, first):
            parts = [payload]
        elif parts and kind in (middle, last):
            parts.append(payload)
        if parts and kind in (full, last):
            yield b"".join(parts)
            parts = []
