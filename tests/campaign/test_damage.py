"""Damaged files of runs, caches and bundles: what they lead to is what it was, or one sentence that names the file."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import process, works
from tests.campaign.accidents import Dies
from tests.campaign.cases import WHOLE, Record, draw, one_of_each, record, sample
from tests.campaign.reference import Reference
from tests.campaign.works import AFTER, WORKS


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def one_bit(path: Path) -> None:
    content, chance = bytearray(path.read_bytes()), draw("bit", path.name)
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


DAMAGES: Sequence[Callable[[Path], None]] = (cut, empty, gone, one_bit)


@dataclass(frozen=True)
class Subject:
    """Something to damage.

    work       what is done with it then
    dies       where the work was killed before: its folder and its caches are damaged; None: it had ended, and begins
               anew in another folder with its damaged caches
    most       files of it that are damaged in the whole campaign, 0: all
    """

    work: str
    dies: Dies | None = None
    most: int = 0


SUBJECTS = {
    "run": Subject("distill", Dies("prediction", 14)),
    "run, early": Subject("distill", Dies("intermediate", 9), most=12),
    "search": Subject("search", Dies("supernet", 9), most=4),
    "caches": Subject("distill"),
    "corpus": Subject("pretrain"),
    "answers": Subject("label"),
}
MODELS = ("model.onnx", "model_quantized.onnx", "tokenizer.json", "manifest.json")


def chosen(files: Sequence[Path], most: int, *of: object) -> list[Path]:
    """All files, `most` of them, or in the sample one."""
    count = min(most or len(files), len(files)) if WHOLE else 1
    return draw("damage", *of).sample(list(files), count)


CASES = [(name, damage) for name in SUBJECTS for damage in DAMAGES]


QUICK = ("run", "caches", "corpus", "answers")


@pytest.mark.parametrize(
    ("name", "damage"), one_of_each([case for case in CASES if WHOLE or case[0] in QUICK], lambda case: case[0])
)
def test_damaged_works(
    reference: Reference, tmp_path: Path, name: str, damage: Callable[[Path], None], record_property: Record
) -> None:
    subject = SUBJECTS[name]
    whole, work, begun = (
        reference.whole(subject.work),
        WORKS[subject.work],
        reference.stopped(subject.work, subject.dies),
    )
    files = [path.relative_to(begun) for path in sorted(begun.rglob("*")) if path.is_file() and path.name != ".lock"]
    faults, tried = {}, chosen(files, subject.most, name, damage.__name__)
    for file in tried:
        shutil.copytree(begun, tmp_path / "begun")
        out, home = tmp_path / "begun" / "out", tmp_path / "begun" / "home"
        damage(tmp_path / "begun" / file)
        words = work.arguments(reference.given, out, repeated=subject.dies is not None)
        ended = process.run(words, home=home, before=work.before)
        if ended.code == 0:
            found, unused = works.results(out), file.relative_to(file.parts[0]).as_posix()
            keys = {*found, *whole.results} if subject.dies else found
            wrong = sorted(key for key in keys if found.get(key) != whole.results.get(key) and key != unused)
        else:
            wrong = [] if ended.sentence and named(file, ended.err) and file.parts[0] == "out" else [ended.err[-600:]]
        if wrong:
            faults[str(file)] = wrong
        shutil.rmtree(tmp_path / "begun")
    record(record_property, f"damaged: {name}", len(tried), faults)


@pytest.mark.parametrize("damage", sample(DAMAGES, 1))
def test_damaged_bundles(
    reference: Reference, tmp_path: Path, damage: Callable[[Path], None], record_property: Record
) -> None:
    before = Path(reference.given["bundle"])
    files = [path.relative_to(before) for path in sorted(before.rglob("*")) if path.is_file()]
    faults: dict[str, Any] = {}
    tried = chosen(files, 0, "bundle", damage.__name__)
    for file in tried:
        bundle, out = tmp_path / "bundle", tmp_path / "out"
        for what in ("predict", "report", draw(file, damage.__name__).choice([*AFTER][2:])):
            shutil.copytree(before, bundle)
            damage(bundle / file)
            words = AFTER[what].format(**reference.given | {"bundle": bundle}, out=out).split()
            ended = process.run(words, home=tmp_path / "home")
            if ended.code == 0:
                same = reference.after(what) == (works.plain(ended.out, bundle, out), works.results(out))
                fine = file.name not in MODELS if what == "bench" else same
            else:
                fine = ended.sentence and named(file, ended.err) and not out.exists()
            if not fine:
                faults[f"{what}: {file}"] = (ended.code, (ended.err or ended.out)[-600:])
            for folder in (bundle, out, tmp_path / "home"):
                shutil.rmtree(folder, ignore_errors=True)
    record(record_property, "damaged: bundle", 3 * len(tried), faults)


def named(file: Path, message: str) -> bool:
    """Whether the message names the file, or the folder of ours that it is a part of."""
    return file.name in message or str(file.parent) in message
