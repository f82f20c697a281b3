"""Bad input is refused in one paragraph before anything is trained, and fixing it is enough."""

import shutil
from pathlib import Path

import pytest

from tests import command, tiny
from tests.command import Shelf, accepted, refused
from tests.unshipped import Trained

pytestmark = pytest.mark.usefixtures("hastened")

MEGABYTE = "a good film " * 87_500


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--set stages.0.micro_batch=3", "stage intermediate: micro_batch 3 does not divide the 16 examples"),
        ("--text sentence", "train.tsv: no column 'sentence'. Known: label, text."),
        ("--metric acuracy", "no metric 'acuracy'. Did you mean 'accuracy'?"),
        ("--kind regression", "train.tsv"),
        ("--set stages.1.max_length=128", "has 64 positions: --set stages.1.max_length=64"),
    ],
)
def test_options(shelf: Shelf, tmp_path: Path, words: str, expected: str) -> None:
    out = tmp_path / "run"
    assert refused(command.run(*shelf.distill(out), *words.split()), out, expected)
    assert accepted(*shelf.distill(out))


def test_a_student_that_cannot_be_built(shelf: Shelf, tmp_path: Path) -> None:
    result = command.run(
        *shelf.distill(tmp_path / "run", "--set", "student.heads=3", "--set", "teacher.steps=1", "--gate", "warn")
    )
    assert refused(result, tmp_path / "run", "student: hidden 16 is not a multiple of heads 3")


HEAD, POSITIVE, NUMBERS = b"text\tlabel\n", b"a fine film\tpositive\n", b"a film\t0.5\nthe film\t0.75\nno film\tnan\n"


@pytest.mark.parametrize(
    ("train", "dev", "expected"),
    [
        (None, "a fine film\tneutral\n", "dev.tsv, row 42: the training split has no class 'neutral'"),
        (b"", None, "train.tsv is empty"),
        (HEAD + b"caf\xe9\tpositive\n", None, "train.tsv, line 2, byte 4: 0xe9 is not UTF-8"),
        (HEAD + POSITIVE * 9, HEAD + POSITIVE, "every training row has the class 'positive'"),
        (HEAD + NUMBERS * 3, HEAD + NUMBERS, "3 of 9 rows have no label (rows 4, 7, 10)"),
    ],
)  # fmt: skip
def test_data(shelf: Shelf, tmp_path: Path, train: str | bytes | None, dev: str | bytes | None, expected: str) -> None:
    """Text is appended to a good split, bytes replace it."""
    data, out = Path(shutil.copytree(shelf.data, tmp_path / "set")), tmp_path / "run"
    for name, content in (("train.tsv", train), ("dev.tsv", dev)):
        if content is not None:
            good = (data / name).read_bytes()
            (data / name).write_bytes(content if isinstance(content, bytes) else good + content.encode())
    words = shelf.distill(out, data=str(data))
    assert refused(command.run(*words), out, expected)
    shutil.copytree(shelf.data, data, dirs_exist_ok=True)
    assert accepted(*words)


def test_a_line_of_a_megabyte_is_a_text(shelf: Shelf, tmp_path: Path, unmeasured: None) -> None:
    data = Path(shutil.copytree(shelf.data, tmp_path / "set"))
    with (data / "train.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{MEGABYTE}\tpositive\n")
    with pytest.raises(Trained):
        command.run(*shelf.distill(tmp_path / "run", data=str(data)))
    bundle = tiny.bundle(tmp_path / "bundle")
    result = command.run("predict", str(bundle.path), "-", stdin=MEGABYTE)
    assert result.code == 0
    assert len(result.out.splitlines()) == 1


def test_output_directories_of_others_are_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    run, foreign, file = tmp_path / "run", tmp_path / "notes", tmp_path / "file"
    (foreign / "recipes").mkdir(parents=True)
    file.write_text("mine")
    words = shelf.distill(run, "--set", "teacher.steps=1", "--set", "stages.0.steps=1", "--set", "stages.1.steps=1")
    assert command.run(*words, "--gate", "warn").code == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for result, expected in (
        (command.run(*words), "run: already holds a run; --resume continues it, another --out starts a new one"),
        (
            command.run(*words, "--resume", "--seed", "3"),
            "run: is another run: seed was 0, now 3. Choose another --out",
        ),
        (command.run(*words, "--resume", "--minutes", "9"), "run: is another run: minutes was None, now 9.0"),
        (command.run(*shelf.distill(run, "--resume")), "run: is another run: the recipe differs"),
        (command.run(*shelf.distill(foreign)), "notes: is not empty and not a run of compress; choose another --out"),
        (command.run(*shelf.distill(file)), "file: is a file; --out must name a directory"),
        (command.run(*shelf.distill(file / "run")), "file/run: cannot be made (Not a directory)"),
    ):
        assert refused(result, foreign, expected)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [path.name for path in foreign.iterdir()] == ["recipes"]
