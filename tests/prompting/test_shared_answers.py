"""The processes of a launch share the prompts of `label` and `distill --prompt`; each is asked once."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from compress.prompting.answers import Likelihood
from compress.prompting.http_model import Endpoint, RemoteModel, open_endpoint
from tests import children, tiny
from tests.prompting.language_models import FakeLanguageModel
from tests.prompting.test_label import PROMPT
from tests.prompting.test_teacher import KNOWS, QUICK

TEXTS = [f"a {word} film {number}" for number in range(20) for word in ("good", "bad")]


class LoggedModel(FakeLanguageModel):
    """A model that writes what it is asked to a file of its process, and may stay silent after some prompts."""

    def __init__(self, log: Path, silent: dict[int, int], askers: int | None) -> None:
        super().__init__(KNOWS, (-1.5, -1.0))
        self.rank = int(os.environ.get("RANK", "0"))
        self.log = log.with_name(f"{log.name}-{self.rank}")
        self.silent = silent
        self.most = askers

    def askers(self, processes: int) -> int:
        return self.most or processes

    def likelihoods(self, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[tuple[int, Likelihood]]:
        for number, (at, likelihood) in enumerate(super().likelihoods(prompts, answers)):
            if number == self.silent.get(self.rank):
                time.sleep(children.PATIENCE)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(prompts[at]) + "\n")
            yield at, likelihood


@dataclass(frozen=True)
class Answers:
    """Let a logged model answer, whatever the teacher is called."""

    log: Path
    silent: tuple[tuple[int, int], ...] = ()
    askers: int | None = None

    def __call__(self) -> None:
        import compress.commands.label
        import compress.models.checkpoints
        import compress.teachers.prompted

        compress.models.checkpoints.check = lambda *_, **__: None
        children.does_not_ship()
        model = LoggedModel(self.log, dict(self.silent), self.askers)
        for module in (compress.commands.label, compress.teachers.prompted):
            module.open_language_model = lambda *_, **__: model  # type: ignore[attr-defined]

    def asked(self, rank: int | str = "*") -> list[str]:
        """List the prompts that were asked so far, by a process or by all."""
        files = sorted(self.log.parent.glob(f"{self.log.name}-{rank}"))
        return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    (folder / "texts.txt").write_text("\n".join([*TEXTS, TEXTS[0]]) + "\n", encoding="utf-8")
    return ["label", "--teacher", "told", "--prompt", str(folder / "prompt.yaml"), "--data", str(folder / "texts.txt")]


@pytest.fixture
def alone(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What one process writes, with a cache of its own."""
    with monkeypatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-one"))
        assert children.run(given, tmp_path / "alone.jsonl", Answers(tmp_path / "alone")) == 0
    return (tmp_path / "alone.jsonl").read_bytes()


def finish(started: list[children.BaseProcess], out: Path) -> None:
    ended = [children.finish(child) for child in started]
    assert ended == [0] * len(started), children.said(out)


def launch(given: list[str], out: Path, answers: Answers, processes: int = 2) -> None:
    finish(children.start_together(given, out, answers, processes=processes), out)


def wait_for_prompts(answers: Answers, counts: list[int]) -> None:
    patience = time.monotonic() + children.PATIENCE
    while [len(answers.asked(rank)) for rank in range(len(counts))] != counts:
        assert time.monotonic() < patience
        time.sleep(0.02)


def test_two_processes_write_what_one_does_and_ask_each_prompt_once(
    given: list[str], alone: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    answers = Answers(tmp_path / "asked")
    launch(given, out, answers)
    assert out.read_bytes() == alone
    assert [len(answers.asked(rank)) for rank in range(2)] == [20, 20]
    assert set(Counter(answers.asked()).values()) == {1}
    assert children.said(out).count("41 texts:") == 1
    assert "40 prompts in" in children.said(out)


def test_the_prompts_of_an_endpoint_are_asked_by_one_process(given: list[str], alone: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answers = Answers(tmp_path / "asked", askers=1)
    launch(given, out, answers)
    assert out.read_bytes() == alone
    assert [len(answers.asked(rank)) for rank in range(2)] == [40, 0]


def test_an_endpoint_needs_its_key_in_the_process_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text("url: https://api.example.com/v1\nmodel: m\nkey: NOT_SET\n", encoding="utf-8")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert open_endpoint(str(file)).askers(8) == 1
    assert RemoteModel(Endpoint.load(str(file))).key is None


@pytest.mark.parametrize("then", [2, 1, 3])
def test_a_second_start_asks_only_what_is_missing(then: int, given: list[str], alone: bytes, tmp_path: Path) -> None:
    """After both processes were killed, one of them while it wrote a line."""
    out = tmp_path / "out.jsonl"
    answers = Answers(tmp_path / "asked", silent=((0, 5), (1, 7)))
    killed = children.start_together(given, out, answers, processes=2)
    wait_for_prompts(answers, [5, 7])
    for child in killed:
        child.kill()
        children.finish(child)
    assert not out.exists()
    (second,) = (tmp_path / "home" / "soft-labels").glob("*.1.jsonl")
    os.truncate(second, second.stat().st_size - 9)
    again = Answers(tmp_path / "again")
    launch(given, out, again, processes=then)
    assert out.read_bytes() == alone
    assert len(again.asked()) == 40 - 5 - 6
    assert set(again.asked()).isdisjoint(answers.asked(0))
    assert len(set(again.asked()) & set(answers.asked(1))) == 1
    if then == 1:
        assert f"{second}: line 7 of the cached answers is damaged" in children.said(out)


def test_the_others_say_that_a_process_was_killed(given: list[str], alone: bytes, tmp_path: Path) -> None:
    """Once they have asked their own prompts, which a second start finds."""
    out = tmp_path / "out.jsonl"
    answers = Answers(tmp_path / "asked", silent=((1, 3),))
    first, second = children.start_together(given, out, answers, processes=2)
    wait_for_prompts(answers, [20, 3])
    second.kill()
    assert children.finish(first) == 2
    assert children.finish(second) == -signal.SIGKILL
    assert "another process of this launch has ended" in children.said(out)
    assert not out.exists()
    again = Answers(tmp_path / "again")
    launch(given, out, again)
    assert out.read_bytes() == alone
    assert [len(again.asked(rank)) for rank in range(2)] == [9, 8]


def test_machines_that_share_nothing_keep_all_answers(given: list[str], alone: bytes, tmp_path: Path) -> None:
    """Only the first writes the file; a later launch of either asks nothing, and one without a cache receives it."""
    place = tmp_path / "given"
    machines = []
    for number in range(2):
        own = tmp_path / f"node{number}"
        shutil.copytree(place, own)
        words = [word.replace(str(place), str(own)) for word in given]
        machines.append(children.Node(words, own / "out.jsonl", own / "home"))
    answers = Answers(tmp_path / "asked")
    finish(children.start_nodes(machines, answers), machines[0].out)
    assert machines[0].out.read_bytes() == alone
    assert not machines[1].out.exists()
    assert [len(answers.asked(rank)) for rank in range(2)] == [20, 20]
    shutil.rmtree(machines[1].home)
    machines[0].out.unlink()
    finish(children.start_nodes(machines, answers), machines[0].out)
    assert machines[0].out.read_bytes() == alone
    for node in machines:
        environment = {"COMPRESS_HOME": str(node.home)}
        child = children.start(node.arguments, tmp_path / "later.jsonl", answers, environment=environment)
        finish([child], tmp_path / "later.jsonl")
        assert (tmp_path / "later.jsonl").read_bytes() == alone
        (tmp_path / "later.jsonl").unlink()
    assert len(answers.asked()) == 40, "nothing was asked again"


def test_machines_with_other_texts_are_refused(given: list[str], tmp_path: Path) -> None:
    texts = tmp_path / "given" / "texts.txt"
    (tmp_path / "other.txt").write_text(texts.read_text(encoding="utf-8").replace("film", "play"), encoding="utf-8")
    other = [word.replace(str(texts), str(tmp_path / "other.txt")) for word in given]
    answers = Answers(tmp_path / "asked")
    out = tmp_path / "out.jsonl"
    machines = [children.Node(words, out, tmp_path / "home") for words in (given, other)]
    assert [children.finish(child) for child in children.start_nodes(machines, answers)] == [2, 2]
    assert "the processes of this launch differ: data: " in children.said(out)
    assert answers.asked() == []


def test_a_distillation_shares_its_prompts(given: list[str], tmp_path: Path) -> None:
    """Of all its splits; the processes then train on the answers of both."""
    data = tiny.reviews(tmp_path / "data", train=40)
    student = tiny.checkpoint(tmp_path / "student")
    words = ["distill", "--teacher", "gpt2", *given[3:5], "--recipe", "prompted", "--data", data, "--precision", "fp32"]
    words += [f"--set={setting}" for setting in (*QUICK, f"student.init={student}", "stages.0.steps=2")]
    answers = Answers(tmp_path / "asked")
    launch(words, tmp_path / "run", answers)
    counts = [len(answers.asked(rank)) for rank in range(2)]
    assert set(Counter(answers.asked()).values()) == {1}
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 3, "at most one a split"
    assert (tmp_path / "run" / "stages" / "soft-labels" / "model").is_dir()
