# SPDX-License-Identifier: Apache-2.0
"""Which candidates of a search are compiled, with what effort, and in which order.

Candidates are compiled in the order of their expected times as traced, in stages:

1. The first stage has the most promising: ``enough`` of them, or ``FEW`` if that is more, and of
   several forms of parallelism the best ``OF_EACH_FORM`` of each. What takes more than ``within``
   times the least expected time of all candidates, with room or without, is not among them.
   ``within=None`` compiles all candidates.
2. Where fewer than ``enough`` of what was compiled fit, the next candidates are compiled, whatever
   their time: as many as are missing, or ``_NEXT`` if that is more. This goes on until enough fit,
   or nothing is left.
3. The *finalists*, the best as compiled, are compiled with full effort, which alone shows the
   memory that the program will need. One that does not fit then gives way to the next best of
   what is compiled; no further candidates are.

The first ``finalists`` candidates have full effort in the stages above already, so that the best
as traced are not compiled twice; the others have the faster effort ``"screen"`` there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardax.plan.compile.cache import cache_folder
from shardax.plan.compile.pool import LocalEvaluator, PoolEvaluator
from shardax.plan.errors import PlanInterrupted
from shardax.plan.hardware.targets import Target
from shardax.plan.records import LayoutReport, Plan, rank
from shardax.plan.report.progress import SearchProgress
from shardax.plan.searching.steps import (
    ComparedStep,
    TimedCandidate,
    most_promising_first,
    notes_of_steps,
)

FEW = 2  # so many candidates are in the first stage at least, if as many are near the least time
OF_EACH_FORM = 1  # of pipelines, split sequences and others, are compiled with the first
_NEXT = 2  # so many are compiled at least where too few fit
_MOST_ROUNDS = 3  # finalists are compiled at most so many times as often as there are finalists
NO_ROOM = "its arguments and gradients alone need more than a device's memory"


class StagedSearch:
    """The stages of a search, with the reports so far."""

    def __init__(
        self,
        target: Target,
        top: int | None,
        finalists: int,
        steps: Sequence[ComparedStep],
        cache: object,
        evaluator: LocalEvaluator | PoolEvaluator,
        bar: SearchProgress,
    ) -> None:
        self._target = target
        self._top = top
        self._finalist_count = finalists
        self._enough = max(top or 1, finalists)  # so many layouts must fit
        self._steps = steps
        self._candidates = most_promising_first(steps, target)
        self._by_name = {candidate.layout.name: candidate for candidate in self._candidates}
        seconds = [candidate.seconds_per_example for candidate in self._candidates]
        self._least_seconds = min(seconds, default=1.0) or 1.0
        self._cache = cache
        self._evaluator = evaluator
        self._bar = bar

        self._reports: dict[str, LayoutReport] = {}  # of what was compiled, by the layout's name
        self._left_out: list[LayoutReport] = []
        # The names of layouts compiled with full effort, fitting or not.
        self._finalists: set[str] = set()

    def compile_promising(self, within: float | None) -> None:
        """Compiles the most promising candidates, and others until enough fit."""
        waiting = self._candidates
        stage = self._first_stage(within)
        while stage:
            taken = set(stage)
            waiting = [candidate for candidate in waiting if candidate not in taken]

            at_once = max(0, self._finalist_count - len(self._finalists))
            self._compile_finalists(stage[:at_once])
            self._compile(stage[at_once:], "screen", "screening")

            missing = self._enough - self._fitting()
            stage = waiting[: max(missing, _NEXT)] if missing > 0 else []
        self._left_out = [self._omission(candidate) for candidate in waiting]

    def confirm(self) -> None:
        """Compiles the best layouts with full effort, until the best ``finalists`` all were."""
        left = self._finalist_count * _MOST_ROUNDS
        while left > 0:
            ranked = sorted(self._reports.values(), key=rank)
            fitting = [report.layout.name for report in ranked if report.outcome == "fits"]
            best = fitting[: self._finalist_count]
            chosen = [self._by_name[name] for name in best if name not in self._finalists][:left]
            if not chosen:
                return

            # With full effort one may not fit any more, and then another is among the best.
            self._compile_finalists(chosen)
            left -= len(chosen)

    def plan(self, *notes: str) -> Plan:
        """Returns the plan of what was compiled, ranked by ``records.rank``, with notes."""
        reports = sorted(self._reports.values(), key=rank)[: self._top]
        if self._top is None:
            reports += self._left_out
            reports += [report for step in self._steps for report in step.listed.rejected]

        why_whole = dict.fromkeys(note for step in self._steps for note in step.space.notes)
        all_notes = [
            *notes,
            *notes_of_steps(self._steps, self._target),
            *self._counts(),
            *self._distance(),
            *why_whole,
        ]
        return Plan(self._target.text, tuple(reports), tuple(all_notes))

    def interrupted(self) -> PlanInterrupted:
        """Returns the error of an interrupted search, with its progress."""
        done = f"{self._bar.done} of {self._bar.total} layouts"
        again = (
            f"What was compiled is kept in {cache_folder(self._cache)}: the same call goes on from "
            "there."
            if self._cache is not None
            else "With cache='default' a search goes on where it was."
        )
        error = PlanInterrupted(f"The search was interrupted after {done}. {again}")
        error.plan = self.plan(f"interrupted after {done}")
        return error

    def _share(self, candidate: TimedCandidate) -> float:
        """Returns a candidate's expected time of an example, over the least of all candidates."""
        return candidate.seconds_per_example / self._least_seconds

    def _first_stage(self, within: float | None) -> list[TimedCandidate]:
        if within is None or len(self._candidates) <= FEW:
            return self._candidates

        near = [each for each in self._candidates if self._share(each) <= within]
        chosen = [*near[: max(FEW, self._enough)], *_best_of_forms(near)]
        return list(dict.fromkeys(chosen or self._candidates[:1]))

    def _fitting(self) -> int:
        return sum(report.outcome == "fits" for report in self._reports.values())

    def _compile_finalists(self, candidates: Sequence[TimedCandidate]) -> None:
        self._finalists.update(candidate.layout.name for candidate in candidates)
        self._compile(candidates, "full", "finalists")

    def _compile(self, candidates: Sequence[TimedCandidate], effort: str, stage_text: str) -> None:
        """Compiles candidates, step by step, and keeps the reports."""
        if not candidates:
            return
        self._bar.expect(len(candidates), stage_text)

        # Evaluators have one step at a time, and taking another is slow.
        for step in self._steps:
            layouts = [candidate.layout for candidate in candidates if candidate.step is step]
            if layouts:
                self._evaluator.take(step.inputs)
            for outcome in self._evaluator.evaluate(layouts, effort, begun=self._bar.begin):
                report = dataclasses.replace(outcome.report, examples=step.examples)
                self._reports[report.layout.name] = report
                self._bar.end(outcome.report, outcome.cached)

    def _omission(self, candidate: TimedCandidate) -> LayoutReport:
        """Returns the report of a candidate that was not compiled."""
        reason = (
            f"not compiled: as traced it takes {self._share(candidate):.2f} times as long as the "
            "most promising candidate; within=None compiles all"
        )
        if not candidate.fits:
            reason = f"not compiled: {NO_ROOM}; within=None compiles all"
        return LayoutReport(candidate.layout, "rejected", reason, expected=candidate.time)

    def _counts(self) -> list[str]:
        """Counts what was compiled by outcome, and what was left out."""
        outcomes = sorted(report.outcome for report in self._reports.values())
        if not outcomes:
            return []

        counts = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
        note = f"compiled: {', '.join(counts)}"
        if self._left_out:
            note += f"; left out by expected time: {len(self._left_out)}"
        return [note]

    def _distance(self) -> list[str]:
        """Compares times of traced and compiled steps."""
        ratios = [
            self._by_name[name].time.seconds / report.expected.seconds
            for name, report in self._reports.items()
            if report.expected is not None and report.outcome == "fits"
        ]
        if not ratios:
            return []
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return [f"expected times before compiling: {spread} of those of the compiled programs"]


def _best_of_forms(candidates: Sequence[TimedCandidate]) -> list[TimedCandidate]:
    """Returns the most promising candidates of each of several forms."""
    by_form: dict[frozenset[str], list[TimedCandidate]] = {}
    for candidate in candidates:
        by_form.setdefault(candidate.form, []).append(candidate)

    if len(by_form) < 2:
        return []
    return [candidate for of_form in by_form.values() for candidate in of_form[:OF_EACH_FORM]]
