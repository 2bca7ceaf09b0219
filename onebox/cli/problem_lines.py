"""A checkpoint's problems as lines of text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebox.checkpoint.bind import Problem

__all__ = ["problem_lines"]

SHOWN_PER_KIND = 6


def problem_lines(problems: "tuple[Problem, ...]") -> list[str]:
    """A few problems of each kind, then the number of others: 700 missing tensors have one cause."""
    lines: list[str] = []
    kinds: dict[tuple[str, bool], list[Problem]] = {}
    for problem in problems:
        kinds.setdefault((problem.kind.value, problem.is_fatal), []).append(problem)
    for (kind, is_fatal), members in kinds.items():
        label = "problem" if is_fatal else "note"
        lines += [f"{label}: {problem.message}" for problem in members[:SHOWN_PER_KIND]]
        if len(members) > SHOWN_PER_KIND:
            lines.append(f"{label}: ... and {len(members) - SHOWN_PER_KIND:,} more {kind} (--json lists all).")
    return lines
