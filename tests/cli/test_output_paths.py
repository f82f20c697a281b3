"""Commands write through links, pipes and devices, and refuse by name, at once, what is no place for their output."""

import os
import stat
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from compress.config.options import StudyOptions
from compress.data import cache
from compress.exporters.artifact import Bundle
from tests import command, tiny
from tests.command import Shelf
from tests.test_outputs import circle, folder, listen, make_device

FILES = {
    "bench": "bench {bundle} --seq 8 --rounds 2 --runs 1 --out {place}",
    "gate, markdown": "gate {bundle} {bundle} --markdown {place}",
    "gate, junit": "gate {bundle} {bundle} --junit {place}",
    "report": "report {bundle} --html {place}",
    "predict": "predict {bundle} --input {rows} --output {place}",
    "label": "label --teacher {teacher} --prompt sentiment --data {data} --out {place}",
}
SUFFIXES = {"predict": ".csv", "label": ".jsonl"}
FOLDERS = {
    "export": "export {bundle} --for ort --out {place}",
    "trim": "trim {bundle} --data {data} --out {place}",
    "quantize": "quantize {bundle} --data {data} --out {place}",
    "demo": "demo {bundle} --out {place}",
    "distill": "distill --teacher {teacher} --data {data} --recipe {recipe} --out {place}",
    "prune": "prune {teacher} --data {data} --ffn 0.5 --out {place}",
    "search": "search --teacher {teacher} --data {data} --out {place}",
    "pretrain": "pretrain --teacher {teacher} --recipe tinybert-general --corpus pydoc --out {place}",
}


def file(path: Path) -> None:
    path.write_text("old")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def null(path: Path) -> None:
    make_device(path, stat.S_IFCHR, 1, 3)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, shelf: Shelf) -> dict[str, str]:
    home = tmp_path_factory.mktemp("output")
    (home / "rows.csv").write_text("sentence\na good film\n")
    bundle = tiny.bundle(home / "bundle")
    return {"bundle": str(bundle.path), "rows": str(home / "rows.csv"), **vars(shelf)}


def identity(place: Path) -> tuple[int, ...]:
    """What writing there would change; looking at it changes only when it was read."""
    found = place.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize("make", [folder, circle])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(
    tmp_path: Path, given: dict[str, str], name: str, make: Callable[[Path], None]
) -> None:
    place = tmp_path / f"place{SUFFIXES.get(name, '')}"
    make(place)
    before = identity(place)
    result = command.run(*FILES[name].format(**given, place=place).split())
    assert (result.code, result.out) == (2, "")
    assert "place" in result.err
    assert identity(place) == before
    assert [*tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("name", FILES)
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, given: dict[str, str], name: str) -> None:
    (tmp_path / "file").touch()
    for place in ("file/below", "x" * 300, "file/", "slash/"):
        result = command.run(*FILES[name].format(**given, place=f"{tmp_path}/{place}").split())
        if name in SUFFIXES and not place.endswith("/"):
            result = command.run(*FILES[name].format(**given, place=f"{tmp_path}/{place}{SUFFIXES[name]}").split())
        assert (result.code, result.out) == (2, ""), place
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "make"),
    [*product(FOLDERS, (file, circle)), *product(("export",), (pipe, null, listen))],
)
def test_what_is_no_folder_is_refused(
    tmp_path: Path, given: dict[str, str], name: str, make: Callable[[Path], None]
) -> None:
    place = tmp_path / "place"
    make(place)
    before = identity(place)
    result = command.run(*FOLDERS[name].format(**given, place=place).split())
    assert result.code == 2
    assert "place" in result.err
    assert "Traceback" not in result.err
    assert identity(place) == before
    assert [*tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("name", FOLDERS)
def test_names_that_no_folder_can_have_are_refused(tmp_path: Path, given: dict[str, str], name: str) -> None:
    (tmp_path / "file").touch()
    for place in ("file/below", "x" * 300):
        result = command.run(*FOLDERS[name].format(**given, place=f"{tmp_path}/{place}").split())
        assert result.code == 2, place
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["report", "predict"])
def test_a_pipe_and_a_link_get_what_a_file_gets(tmp_path: Path, given: dict[str, str], name: str) -> None:
    suffix = SUFFIXES.get(name, ".html")
    places = [tmp_path / kind / f"out{suffix}" for kind in ("plain", "pipe", "link")]
    for place in places:
        place.parent.mkdir()
    plain, fifo, link = places
    os.mkfifo(fifo)
    link.symlink_to(f"target{suffix}")
    got = list[bytes]()
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    for place in places:
        assert command.run(*FILES[name].format(**given, place=place).split()).code == 0
    reader.join(10)
    contents = (plain.read_bytes(), got[0], link.read_bytes())
    assert contents[0]
    assert contents == (contents[0],) * 3
    assert (stat.S_ISFIFO(fifo.stat().st_mode), link.is_symlink()) == (True, True)


@pytest.mark.parametrize("name", ["report"])
def test_a_device_stays_a_device(tmp_path: Path, given: dict[str, str], name: str) -> None:
    null(tmp_path / "null")
    assert command.run(*FILES[name].format(**given, place=tmp_path / "null").split()).code == 0
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)


def test_an_input_is_not_overwritten(given: dict[str, str]) -> None:
    bundle = Bundle.load(given["bundle"])
    model = bundle.files()["int8"]
    before = model.read_bytes()
    page = bundle.path / "manifest.json"
    commands = (
        f"bench {model} --out {model}",
        f"bench {bundle.path} --out {model}",
        f"report {bundle.path} --html {model}",
        f"gate {bundle.path} {bundle.path} --markdown {page}",
    )
    for words in commands:
        result = command.run(*words.split())
        assert (result.code, "is also an input" in result.err) == (2, True), words
    assert model.read_bytes() == before


def test_a_home_folder_that_the_shell_left(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command.run("report", given["bundle"], "--html=~/page.html").code == 0
    assert (tmp_path / "page.html").is_file()


def test_a_home_folder_in_an_option_that_also_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COMPRESS_HOME", "~/caches")
    assert cache.home() == tmp_path / "caches"
    assert StudyOptions(storage="~/study.db").storage == str(tmp_path / "study.db")
    out = ("--out", str(tmp_path / "out"))
    for words in (
        ("search", "--teacher", "minilm", "--data", "intents", "--space=~/absent.yaml", *out),
        ("label", "--teacher", "gpt2", "--data", "intents", "--prompt=~/absent.yaml", *out),
        ("label", "--teacher=~/absent.yaml", "--data", "intents", "--prompt", "sentiment", *out),
    ):
        told = command.run(*words)
        assert told.code == 2 and str(tmp_path / "absent.yaml") in told.err.replace("\n", ""), told.err
