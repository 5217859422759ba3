"""SIGINT and SIGTERM during training: finish the step, save, and leave with the status that shells expect."""

import signal
from types import FrameType, TracebackType


class GracefulStop:
    """While this context is open, the first SIGINT or SIGTERM sets :attr:`received`; a second one acts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "GracefulStop":
        for s in (signal.SIGINT, signal.SIGTERM):
            self._before[s] = signal.signal(s, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)  # type: ignore[arg-type]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    @property
    def exit_status(self) -> int:
        """130 for SIGINT, 143 for SIGTERM."""
        assert self.received is not None
        return 128 + self.received
