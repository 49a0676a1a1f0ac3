"""The measurements of a run, one JSON line each, written when it is made: a run that was stopped can be resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.race.figures import Figures, Row, medians


class Measurement(NamedTuple):
    """One scenario for one peer in one round."""

    round: int
    scenario: str
    setting: dict[str, Any]
    peer: str
    figures: Figures
    error: str
    """Why there are no figures."""
    seconds: float
    """How long measuring took."""
    load: float
    """The machine's load after it."""


class Journal:
    """A file whose first line says what is run; each other one is a measurement."""

    def __init__(self, path: Path, run: dict[str, Any], *, resume: bool) -> None:
        self.path, self.found = path, list[Measurement]()
        if resume:
            self.found = _read(path, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        _ = path.write_text("".join(f"{json.dumps(line)}\n" for line in (run, *self.found)))

    def add(self, measurement: Measurement) -> None:
        """Keep it, in the file too."""
        self.found.append(measurement)
        with self.path.open("a") as file:
            _ = file.write(json.dumps(measurement) + "\n")

    def of(self, scenario: str, setting: dict[str, Any], peer: str) -> list[Measurement]:
        """Those of one row of the results, by round."""
        return [each for each in self.found if each[1:4] == (scenario, setting, peer)]

    def row(self, scenario: str, setting: dict[str, Any], peer: str) -> Row:
        """Medians over the rounds; without figures if a round failed, as the others may have suffered too."""
        each = self.of(scenario, setting, peer)
        error = next((one.error for one in each if one.error), "")
        found = {} if error or not each else medians([one.figures for one in each])
        figures = {name: value for name, value in found.items() if not math.isnan(value)}
        return Row(scenario, peer, setting, figures, len(each), error)


def _read(path: Path, run: dict[str, Any]) -> list[Measurement]:
    """What the file has of this run; a line that was being written when the run was stopped is left out."""
    if not path.exists():
        raise ValueError(f"there is no run to resume: {path} does not exist")
    head, *lines = path.read_text().splitlines(keepends=True)
    if json.loads(head) != run:
        raise ValueError(f"the run in {path} is another one: {head.strip()}")
    complete: Sequence[str] = [line for line in lines if line.endswith("\n")]
    return [Measurement(*json.loads(line)) for line in complete]
