"""Commands that are ended by SIGTERM, as a cluster or a container does it, say how to go on, and continue to the same
bits."""

import shutil
import time
from pathlib import Path

import pytest

from tests import command
from tests.campaign import process, works
from tests.campaign.cases import Record, draw, sample
from tests.campaign.reference import Reference
from tests.campaign.works import WORKS

CASES = [(name, number) for name in WORKS for number in range(3)]
QUICK = [("label", 0)]
HINTS = {
    "label": "Answers are saved. Run the same command again to continue.",
    "quantize": "The bundle was not changed.",
    "export": "Nothing was changed. Run the same command again.",
    "trim": "Nothing was written. Run the same command again.",
}


@pytest.mark.parametrize(("name", "number"), sample(CASES, 1, quick=QUICK))
def test_terminated(reference: Reference, tmp_path: Path, name: str, number: int, record_property: Record) -> None:
    record_property("campaign", f"terminated: {name}")
    whole, work, out, home = reference.whole(name), WORKS[name], tmp_path / "out", tmp_path / "home"
    chance, share = draw("terminate", name, number), 1.0
    while True:
        reference.begin(name, out)
        words = work.arguments(reference.given, out)
        child = process.start(words, home=home, before=work.before)
        time.sleep(chance.uniform(0.1, max(0.2, share)) * whole.seconds)
        child.process.terminate()
        ended = child.wait()
        if ended.code != 0:
            break
        share /= 2  # it was faster than the reference
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert ended.code == 143, ended.err
    assert "Traceback" not in ended.err
    hint = HINTS.get(name)
    if hint is None and "--resume" in work.again + work.words:
        hint = "Continue with: compress "
    assert f"interrupted. {hint or ''}" in ended.err
    ended = process.run(work.arguments(reference.given, out, repeated=True), home=home, before=work.before)
    assert ended.code == 0 or (ended.sentence and "exists" in ended.err), ended.err
    assert works.results(out) == whole.results
    assert command.partial(out) == []
    assert command.partial(home) == []
