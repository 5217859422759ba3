"""What a benchmark leaves: NAME.json after every case, NAME.md and a printed table at the end."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fusedmlp.files import write_atomic

OWN_ARMS = ("fused", "epilog", "COMPUTE")  # how the names begin of what this project computes


class Table(NamedTuple):
    """A table of words, as it is printed and as Markdown shows it."""

    caption: str
    head: list[str]
    lines: list[list[str]]

    def text(self) -> str:
        """Markdown, with columns aligned so that it reads well as it is."""
        cells = [self.head, *self.lines]
        widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(self.head))]
        drawn = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
        drawn.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        return "\n".join(drawn)


def us(value: float | None) -> str:
    """Microseconds in four digits."""
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def interval(value: tuple[float, float, float] | None, form: str = ".3f") -> str:
    """A ratio with its interval."""
    return "–" if value is None else f"{value[0]:{form}} ({value[1]:{form}}–{value[2]:{form}})"


@dataclass(slots=True)
class Report:
    """One benchmark's results, on their way to files."""

    title: str
    stem: Path
    """Directory and name of the files, without their suffixes."""
    config: dict[str, Any]
    environment: dict[str, Any]
    method: str
    notes: list[str]
    tables: Callable[[list[dict[str, Any]]], list[Table]]
    extra: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """What the JSON holds besides, from the rows."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Keep ``row``, on disk too: a killed run keeps what it has finished."""
        self.rows.append(row)
        self._write_json()

    def wrong(self) -> list[str]:
        """A line for each arm of ours or others' whose results were wrong, and for each failure of our own."""
        return [
            f"{_case(row)}: {arm}: {reason}"
            for row in self.rows
            for arm, reason in row["left_out"].items()
            if arm in row["wrong"] or (arm.startswith(OWN_ARMS) and reason.startswith("failed"))
        ]

    def _write_json(self) -> None:
        record = {
            "command": _command(),
            "environment": self.environment,
            "title": self.title,
            "method": self.method,
            "notes": self.notes,
            "config": self.config,
            **self.extra(self.rows),
            "rows": self.rows,
        }
        write_atomic(self.stem.with_name(self.stem.name + ".json"), json.dumps(record, indent=1, default=str) + "\n")

    def finish(self) -> str:
        """Write NAME.md; returns the tables as text."""
        self._write_json()
        tables = self.tables(self.rows)
        e = self.environment
        where = f"{e['gpu']} (driver {e['driver']}, cuBLASLt {e['cublaslt']})" if e["gpu"] else f"{e['cpu']}, no GPU"
        parts = [
            f"# {self.title}",
            f"    {_command()}",
            f"On {where}; torch {e['torch']}, nvmath-python {e['nvmath']}, Triton {e['triton']}; commit {e['commit']}; "
            f"{e['date']}.",
            self.method,
            *self.notes,
            *(f"**{t.caption}**\n\n{t.text()}" for t in tables),
        ]
        absent = self._left_out()
        if absent:
            parts.append("**Not measured**\n\n" + "\n".join(f"- {line}" for line in absent))
        parts.append(f"![{self.title}]({self.stem.name}.png)")
        write_atomic(self.stem.with_name(self.stem.name + ".md"), "\n\n".join(parts) + "\n")
        lines = [f"{self.title}\n", *self.notes, ""]
        for t in tables:
            lines += [t.caption, t.text(), ""]
        return "\n".join([*lines, *(f"not measured: {line}" for line in absent)])

    def _left_out(self) -> list[str]:
        """Each arm with each reason once, and where."""
        cases: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for arm, reason in row["left_out"].items():
                cases.setdefault((arm, reason), []).append(_case(row))
            for reason in row.get("fallbacks", ()):
                cases.setdefault(("fused epilogs", f"torch operations took their place: {reason}"), []).append(
                    _case(row)
                )
        return [
            f"{arm}: {reason} ({'every case' if len(where) == len(self.rows) else '; '.join(where)})"
            for (arm, reason), where in cases.items()
        ]


def _case(row: dict[str, Any]) -> str:
    return " ".join(str(row[k]) for k in ("pass", "gemm", "epilog", "width", "activation", "dtype") if k in row)


def _command() -> str:
    arguments = [a for a in sys.argv[1:] if not a.startswith("run_dir=")]  # where the files went says nothing
    return shlex.join(["python", "-m", "fusedmlp.bench", *arguments])
