"""A source's name is judged before anything is read: quickly, and with the sentence that reading would give."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.data import sources
from compress.data.corpus import load_corpus
from compress.data.load import load_task
from compress.data.sources import check, check_corpus
from compress.errors import DataError
from tests.data.conftest import Folder

NOBODY = 65534

GOOD = "text\tlabel\na fine film\tpos\na dull film\tneg\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.tsv", "no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("~/nowhere-at-all", "no such file or folder"),
        ("nowhere/", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("{here}/trian.tsv", "no such file or folder.*Did you mean"),
        ("~nobody-of-that-name/set", "no such folder"),
        ("what is this?", "is not a data source"),
        ("", "is not a data source"),
        (" ", "is not a data source"),
        ("a\0b.tsv", "is not a data source"),
        (f"{'a/' * 9}{'x' * 5000}.tsv", "cannot be read"),
        ("train=nowhere.tsv", "no such file"),
        ("train={here}/train.tsv,train={here}/train.tsv", "two files"),
        ("{here}/empty.tsv", "is empty"),
        ("train={here}/empty.tsv", "is empty"),
        ("{here}/pipe.tsv", "pipe, socket or device"),
        ("train={here}/train.tsv,test={here}/pipe.tsv", "pipe, socket or device"),
        ("train={here}", "is a folder"),
        ("/dev/zero", "pipe, socket or device"),
        ("{here}/loop.tsv", "no such file or folder|cannot be read"),
        ("{here}/none", "no training split; .* holds dev.tsv"),
        ("{here}/blank", "train.tsv is empty"),
        ("{here}/piped", "pipe, socket or device"),
    ],
)
def test_a_source_that_cannot_be_one(folder: Folder, source: str, message: str) -> None:
    here = Path(folder({"train.tsv": GOOD, "empty.tsv": ""}))
    for name, file in (("none", "dev.tsv"), ("blank", "train.tsv"), ("piped", "dev.tsv")):
        (here / name).mkdir()
        (here / name / file).write_text("" if file == "train.tsv" else GOOD)
    os.mkfifo(here / "pipe.tsv")
    os.mkfifo(here / "piped" / "train.tsv")
    (here / "loop.tsv").symlink_to(here / "loop.tsv")
    source = source.format(here=here)
    for read in (check, load_task):
        with pytest.raises(DataError, match=message):
            read(source)


def test_what_may_be_a_source_passes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "is_hub_reachable", lambda: True)
    here = folder({"train.tsv": GOOD})
    for source in (here, f"{here}/train.tsv", f"train={here}/train.tsv", "intents", "glue/sst2", "owner/name:part"):
        check(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "no such file or folder"),
        ("{here}/a.pdf", "not the name of a text file"),
        ("{here}/pipe.txt", "pipe, socket or device"),
        ("", "is not a data source"),
    ],
)
def test_a_corpus_that_cannot_be_one(folder: Folder, source: str, message: str) -> None:
    here = Path(folder({"a.pdf": "x"}))
    os.mkfifo(here / "pipe.txt")
    for read in (check_corpus, load_corpus):
        with pytest.raises(DataError, match=message):
            read(source.format(here=here))


def test_what_may_be_a_corpus_passes(folder: Folder) -> None:
    here = folder({"a.txt": "some text", "b.en": "x", "b.fr": "y"})
    for source in (here, f"{here}/a.txt", f"{here}/b", "pydoc", "owner/name"):
        check_corpus(source)


def test_the_check_imports_nothing_heavy() -> None:
    code = "import sys, compress.data.sources; print(*{'torch', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == ""


@contextmanager
def _as_nobody(folder: Path) -> Iterator[None]:
    """Act as a user without rights who can reach `folder`."""
    modes = {parent: parent.stat().st_mode for parent in folder.parents}
    for parent, mode in modes.items():
        parent.chmod(mode | 0o755)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes.items():
            parent.chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights for a moment")
def test_a_file_and_a_folder_of_somebody_else(folder: Folder) -> None:
    here = Path(folder({"train.tsv": GOOD}))
    (here / "train.tsv").chmod(0)
    for source in (str(here), f"{here}/train.tsv"):
        with _as_nobody(here), pytest.raises(DataError, match="Permission denied"):
            load_task(source)
    here.chmod(0)
    for read in (check, load_task, check_corpus, load_corpus):
        with _as_nobody(here), pytest.raises(DataError, match="Permission denied"):
            read(str(here))
