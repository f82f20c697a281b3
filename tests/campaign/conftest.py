"""The campaign: a seeded sample of its cases in every run of the tests, all of them with COMPRESS_CAMPAIGN=whole."""

from collections import Counter
from typing import Any

import pytest

from tests.campaign import cases
from tests.campaign.reference import Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "campaign" in item.path.parts:
            item.add_marker(pytest.mark.campaign)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was tried, by kind: cases, and how they ended."""
    counts: Counter[tuple[str, str]] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(getattr(report, "user_properties", []))
            if "campaign" in found and (report.when == "call" or outcome != "passed"):
                cases_, faults = int(found.get("cases", 1)), int(found.get("faults", outcome == "failed"))
                counts[found["campaign"], "passed" if outcome == "failed" else outcome] += cases_ - faults
                counts[found["campaign"], "failed"] += faults
                for end, count in found.get("ends", {}).items():
                    ends[found["campaign"], end] += count
    if counts:
        terminalreporter.section(f"campaign, seed {cases.SEED}, {'whole' if cases.WHOLE else 'a sample'}")
        terminalreporter.write_line(f"{'':40}{'cases':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
        for kind in [*sorted({kind for kind, _ in counts}), "all"]:
            ended = Counter[str]()
            for (each, outcome), count in counts.items():
                if kind in (each, "all"):
                    ended["failed" if outcome == "error" else outcome] += count
            row = (sum(ended.values()), ended["passed"], ended["failed"], ended["skipped"])
            terminalreporter.write_line(f"{kind:40}" + "".join(f"{number:8,}" for number in row))
        for kind in dict.fromkeys(kind for kind, _ in ends):
            listed = [f"{count:,} {end}" for (of, end), count in sorted(ends.items()) if of == kind]
            terminalreporter.write_line(f"{kind}: {', '.join(listed)}")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.fill(tmp_path_factory.mktemp("campaign"))
