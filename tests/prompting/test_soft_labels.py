"""The file that `label` writes teaches a student: its probabilities, not its labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compress
from compress.config.choices import CandidateRecipes
from compress.errors import TeacherError
from compress.prompting.usage import LimitError
from compress.teachers import prompted as teaching
from tests import tiny
from tests.prompting.endpoint_server import Reply
from tests.prompting.language_models import FakeLanguageModel
from tests.prompting.test_teacher import PROMPT, QUICK
from tests.prompting.test_votes import chat
from tests.unshipped import Trained

pytestmark = pytest.mark.usefixtures("hastened")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """The labels are drawn at random: whoever learned from them would learn nothing."""
    tiny.reviews(tmp_path / "data")
    train = (tmp_path / "data" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    wrong = np.random.default_rng(0).permutation(["negative", "positive"] * (len(train) // 2)).tolist()
    lines = []
    for row, label in zip(train, wrong, strict=True):
        text, own = row.split("\t")
        shares = {name: 0.9 if name == own else 0.1 for name in ("negative", "positive")}
        lines.append({"text": text, "label": label, "probabilities": shares})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    held = [{**line, "label": max(line["probabilities"], key=line["probabilities"].get)} for line in lines[:40]]
    held = [{**line, "text": f"{line['text']} the"} for line in held]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held), encoding="utf-8")
    return {
        "teacher": tiny.checkpoint(tmp_path / "student"), "recipe": "prompted",
        "data": f"train={tmp_path / 'train.jsonl'},validation={tmp_path / 'dev.jsonl'}",
        "out": tmp_path / "run", "precision": "fp32", "overrides": [*QUICK, "student.init=teacher"],
    }  # fmt: skip


def test_a_student_learns_the_probabilities(given: dict[str, Any], tmp_path: Path) -> None:
    bundle = tiny.call(compress.distill, **given)
    found = [each.label for each in bundle.predict(["a good film", "a bad film"])]
    assert found == ["positive", "negative"]
    report = json.loads((bundle.path / "report.json").read_text(encoding="utf-8"))
    teacher = next(row for row in report["rows"] if row["name"].startswith("the scores in"))
    assert teacher["score"]["accuracy"] == 1.0
    assert not (tmp_path / "run" / "teacher").exists(), "nothing is fine-tuned"


def test_a_prompt_as_well_is_refused(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "open_language_model", lambda *_, **__: FakeLanguageModel({}, (-1.0, -2.0)))
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    student = f"student.init={given['teacher']}"
    both = given | {"prompt": str(tmp_path / "prompt.yaml"), "overrides": [*QUICK, student]}
    with pytest.raises(TeacherError, match="has the answers of a teacher, and"):
        tiny.call(compress.distill, **both)


def test_the_recipe_for_them_is_chosen(given: dict[str, Any]) -> None:
    candidates = CandidateRecipes.load("auto")
    for scored, name in ((True, "prompted"), (False, "prune-taylor")):
        recipe, _ = candidates.decide(kind="classification", family="bert", prompted=False, scored=scored)
        assert recipe.name == name
        assert not scored or recipe.student.init == "teacher"
    plan = {name: value for name, value in given.items() if name not in {"out", "recipe"}}
    forecast = tiny.call(compress.forecast, **plan | {"overrides": QUICK})
    assert forecast.title.startswith("prompted: the scores in")


def test_an_endpoint_teaches_within_its_limits(
    given: dict[str, Any], serve: Any, unmeasured: None, tmp_path: Path
) -> None:
    """A run that a limit has stopped is resumed, and pays for no answer twice."""

    def reply(_: int, __: str, body: dict[str, Any]) -> Reply:
        return chat("Good" if "good" in body["messages"][0]["content"] else "bad", usage={"prompt_tokens": 9})

    server = serve(reply)
    endpoint = {"url": server.url, "model": "m", "mode": "answer", "max_calls": 100}
    (tmp_path / "endpoint.yaml").write_text(json.dumps(endpoint), encoding="utf-8")
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    given |= {
        "teacher": str(tmp_path / "endpoint.yaml"), "prompt": str(tmp_path / "prompt.yaml"),
        "data": str(tmp_path / "data"), "overrides": [*QUICK, f"student.init={given['teacher']}"],
    }  # fmt: skip
    with pytest.raises(LimitError, match="max_calls, 100"):
        tiny.call(compress.distill, **given)
    assert len(server.seen) == 100
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given, resume=True)
    asked = [body["messages"][0]["content"] for _, body, _ in server.seen]
    assert len(asked) == len(set(asked))
