"""Hofstätter et al. 2020."""

from typing import Any

from tests.papers.case import Case
from tests.papers.listnet import QUERY, RELEVANCE, STUDENT, TEACHER


def margins(student: Any, teacher: Any, preferred: Any) -> float:
    found = []
    for i, row in enumerate(preferred):
        for j, prefers in enumerate(row):
            if prefers:
                mine, theirs = (each[i][0] - each[j][0] for each in (student, teacher))
                found.append((mine - theirs) ** 2)
    return sum(found) / len(found)


PREFERRED = ((QUERY[:, None] == QUERY) & (RELEVANCE > RELEVANCE.T)).long()
CASES = {"margins": Case(STUDENT, TEACHER, PREFERRED, margins, query=QUERY)}
