"""Disks that are full, that cannot be written, or that lose what was not flushed when the power goes."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command
from tests.campaign import process, works
from tests.campaign.accidents import Waits, Watch
from tests.campaign.cases import Record, draw, record, sample
from tests.campaign.reference import Reference
from tests.campaign.works import DISTILL, WORKS

FULL = [(name, number) for name in ("distill", "pretrain", "label", "trim", "export") for number in range(4)]
CUTS = [(name, number) for name, count in {"distill": 14, "pretrain": 5, "prune": 5, "label": 3, "trim": 3}.items()
        for number in range(count)]  # fmt: skip
READ_ONLY = {
    "predict": "predict {bundle} good",
    "report": "report {bundle}",
    "bench": "bench {bundle} --seq 8 --rounds 2 --runs 1",
    "caches": DISTILL.replace("{out}", "{elsewhere}"),
    "quantize": "quantize {bundle} --data {data} --max-drop 100",
    "export": "export {bundle} --precision fp16",
    "resume": DISTILL.replace("{out}", "{run}") + " --resume",
    "new": DISTILL.replace("{out}", "{disk}/new"),
    "label": "label --teacher {speaker} --prompt {prompt} --data {texts} --gate warn --out {disk}/all.jsonl",
}
WRITES = ("quantize", "export", "resume", "new", "label")


class Disk:
    """A small disk of its own, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")

    def resize(self, size: int) -> None:
        self._mount("-o", f"remount,size={size}")

    def lock(self) -> None:
        """Let nothing be written, not even by root."""
        self._mount("-o", "remount,ro")

    def used(self) -> int:
        return shutil.disk_usage(self.folder).used

    def _mount(self, *words: str) -> None:
        done = subprocess.run(["mount", *words, str(self.folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk can be mounted by root only: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    made = Disk(tmp_path / "disk")
    yield made
    subprocess.run(["umount", "--lazy", tmp_path / "disk"], check=True)


@pytest.mark.parametrize(("name", "number"), sample(FULL, 1, quick=[("label", 0), ("export", 0)]))
def test_a_full_disk(reference: Reference, disk: Disk, name: str, number: int, record_property: Record) -> None:
    """Of run and caches, at a random size; with room again the same command ends with the same bits."""
    record_property("campaign", f"full disk: {name}")
    whole, work, out, home = reference.whole(name), WORKS[name], disk.folder / "out", disk.folder / "home"
    reference.begin(name, out)
    begun = disk.used()
    needs = sum(path.stat().st_size for place in (whole.out, whole.home) for path in place.rglob("*") if path.is_file())
    disk.resize(begun + round(max(needs - begun, 50_000) * draw("full", name, number).uniform(0.1, 0.8)))
    ended = process.run(work.arguments(reference.given, out), home=home, before=work.before)
    assert ended.code == 0 or (ended.sentence and "No space left" in ended.err and str(disk.folder) in ended.err), ended
    if ended.code == 2:
        assert command.partial(out) == []
    disk.resize(2**26)
    ended = process.run(work.arguments(reference.given, out, repeated=True), home=home, before=work.before)
    assert ended.code == 0 or (ended.sentence and "exists" in ended.err), ended.err
    assert works.results(out) == whole.results


@pytest.mark.parametrize("what", sample([*READ_ONLY], 2, quick=["report", "export"]))
def test_a_disk_that_cannot_be_written(
    reference: Reference, disk: Disk, tmp_path: Path, what: str, record_property: Record
) -> None:
    """What only reads it works, with its caches there too; what must write to it says so."""
    record_property("campaign", "read-only disk")
    run, home = disk.folder / "run", disk.folder / "home"
    shutil.copytree(Path(reference.given["run"]), run)
    shutil.copytree(reference.whole("distill").home, home)
    given = reference.given | {"run": str(run), "bundle": str(run / "bundle"), "disk": str(disk.folder)}
    disk.lock()
    words = READ_ONLY[what].format(**given, elsewhere=tmp_path / "elsewhere").split()
    ended = process.run(words, home=tmp_path / "home" if what == "label" else home)
    if what in WRITES:
        assert ended.sentence, ended.err
        assert "read-only" in ended.err.lower()
        assert str(disk.folder) in ended.err
    else:
        assert ended.code == 0, ended.err


@pytest.mark.parametrize(("name", "number"), sample(CUTS, 1, quick=[case for case in CUTS if case[0] == "distill"]))
def test_a_power_cut(reference: Reference, tmp_path: Path, name: str, number: int, record_property: Record) -> None:
    """At a random event of its files; every file that was not flushed after its last change is then empty."""
    record_property("campaign", f"power cut: {name}")
    whole, work, out, home = reference.whole(name), WORKS[name], tmp_path / "out", tmp_path / "home"
    reference.begin(name, out)
    last = draw("cut", name, number).randint(1, whole.events)
    watch = Watch(tmp_path / "events", last=last, before=work.before)
    ended = process.run(work.arguments(reference.given, out), home=home, before=watch)
    assert ended.code == -signal.SIGKILL, ended.err
    flushed = {*watch.record.read_text().split("\n")}
    for path in [path for place in (out, home) for path in place.rglob("*") if path.is_file()]:
        known = path.stat()
        if f"{known.st_ino} {known.st_size} {known.st_mtime_ns}" not in flushed:
            path.write_bytes(b"")
    ended = process.run(work.arguments(reference.given, out, repeated=True), home=home, before=work.before)
    assert ended.code == 0 or (ended.sentence and "exists" in ended.err), ended.err
    assert works.results(out) == whole.results


def test_every_rename_is_of_flushed_files(reference: Reference, tmp_path: Path, record_property: Record) -> None:
    """As the kernel sees it, of a whole distillation: with the calls of libraries, which Python does not see."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace here")
    log, out, home = tmp_path / "calls", tmp_path / "out", tmp_path / "home"
    child = process.start(
        WORKS["distill"].arguments(reference.given, out),
        home=home,
        before=Waits(tmp_path / "go", WORKS["distill"].before),
    )
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    tracer = subprocess.Popen(["strace", "-f", "-y", "-e", calls, "-o", log, "-p", str(child.process.pid)])
    while tracer.poll() is None and "TracerPid:\t0" in Path(f"/proc/{child.process.pid}/status").read_text():
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ended = child.wait()
    if tracer.wait():
        pytest.skip("no process may be traced here")
    assert ended.code == 0, ended.err
    flushed: set[str] = set()
    renames, faults = 0, {}
    for line in log.read_text(errors="replace").splitlines():
        if found := re.search(r"f(?:data)?sync\(\d+<(.+?)>\)", line):
            flushed.add(found[1])
        elif (found := re.search(r'rename\w*\(.*?"(.+?)".*?"(.+?)"', line)) and found[1].startswith(str(tmp_path)):
            renames += 1
            if found[1] not in flushed and not re.search(r"\.partial/|\.(partial|retired)$", found[2]):
                faults[found[2]] = line
            flushed = {
                found[2] + each.removeprefix(found[1]) if each.startswith(found[1]) else each for each in flushed
            }
    assert renames > 10
    record(record_property, "flushed before renamed (strace)", renames, faults)
