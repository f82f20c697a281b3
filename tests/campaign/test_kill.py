"""Commands that are killed, wherever, continue to the same bits: at a moment, or before an event of their files."""

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import command
from tests.campaign import process, works
from tests.campaign.accidents import Watch
from tests.campaign.cases import Record, draw, sample
from tests.campaign.reference import Reference
from tests.campaign.works import WORKS

KILLS = {
    "distill": 28, "ship": 10, "pretrain": 14, "prune": 14, "search": 8, "label": 8, "quantize": 6, "export": 4,
    "export-ort": 3, "trim": 5,
}  # fmt: skip
CASES = [(name, number) for name, count in KILLS.items() for number in range(count)]
QUICK = [("distill", 3), ("label", 0), ("export", 1)]


@pytest.mark.parametrize(("name", "number"), sample(CASES, 3, quick=QUICK))
def test_killed(reference: Reference, tmp_path: Path, name: str, number: int, record_property: Record) -> None:
    """Every second one at an event; a quarter are killed again when they continue."""
    record_property("campaign", f"killed: {name}")
    whole, work, out, home = reference.whole(name), WORKS[name], tmp_path / "out", tmp_path / "home"
    chance, share = draw("kill", name, number), 1.0
    while True:
        reference.begin(name, out)
        words, moment = work.arguments(reference.given, out), chance.uniform(0, share)
        if killed(words, home, work, whole.events if number % 2 else 0, moment, whole.seconds):
            break
        share /= 2  # it was faster than the reference
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    words = work.arguments(reference.given, out, repeated=True)
    if chance.random() < 0.25:
        killed(words, home, work, whole.events // 2 if number % 2 else 0, chance.random() / 2, whole.seconds)
    ended = process.run(words, home=home, before=work.before)
    assert ended.code == 0 or (ended.sentence and "exists" in ended.err), ended.err
    assert works.results(out) == whole.results
    assert command.partial(out) == []
    assert command.partial(home) == []


def killed(words: list[str], home: Path, work: works.Work, events: int, moment: float, seconds: float) -> bool:
    """Run until a share of the events, or of the seconds where there are none; whether it had not ended before."""
    if events:
        watch = Watch(home.with_name("events"), last=max(1, round(moment * events)), before=work.before)
        watch.record.unlink(missing_ok=True)
        return process.run(words, home=home, before=watch).code == -signal.SIGKILL
    child = process.start(words, home=home, before=work.before)
    time.sleep(moment * seconds)
    child.process.kill()
    return child.wait().code == -signal.SIGKILL
