"""The model card: the hub's front matter, the rows it is given, and nothing that breaks the page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.card import escape, export_card, model_card, proof_line, revise
from compress.exporters.interface import Port
from compress.exporters.manifest import Manifest
from compress.exporters.snippets import Snippet
from tests import tiny
from tests.reporting.test_evidence import HERE

PAIR = Task("classification", ("premise", "hypothesis"), "label", ("a|b", "<script>"), "f1")
ROWS = ({"model": "teacher", "f1": 0.91234567, "file": None}, {"model": "my|student\n", "f1": 0.9, "file": "4 MB"})


def card(task: Task = PAIR, **fields: Any) -> str:
    manifest = Manifest(task=task, max_length=64, model_type="bert", parameters=14_350_248, versions={}, files={})
    return model_card({"name": "Tiny *one*", **fields}, manifest)


def test_front_matter_is_yaml_that_the_hub_reads() -> None:
    page = card(base_model="org/teacher: x", language=["en", "ko"])
    front = yaml.safe_load(page.split("---\n")[1])
    assert front["base_model"] == "org/teacher: x"
    assert (front["library_name"], front["pipeline_tag"], front["language"]) == (
        "transformers",
        "text-classification",
        ["en", "ko"],
    )
    assert not {"base_model", "language", "license"} & yaml.safe_load(card().split("---\n")[1]).keys()


RESULT = {"metric": "matthews", "value": 0.5, "low": 0.4, "high": 0.6, "rows": 872, "file": "int8"}


def test_the_hub_s_own_client_reads_the_results_with_their_intervals(tmp_path: Path) -> None:
    known = {"license": "mit", "data": "glue/cola", "dataset": "nyu-mll/glue", "config": "cola", "split": "validation"}
    (tmp_path / "README.md").write_text(card(results=[RESULT], language="en", base_model="o/t", **known))
    data: Any = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False).data
    assert (data.license, data.datasets, data.base_model, data.language) == ("mit", "nyu-mll/glue", "o/t", "en")
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_type, result.dataset_config) == (
        "text-classification",
        "nyu-mll/glue",
        "cola",
    )
    assert (result.metric_type, result.metric_value) == ("matthews_correlation", 0.5)
    assert result.metric_args == {"rows": 872, "interval_95": [0.4, 0.6]}


PROOF = replace(HERE, sha256="1", certified=True)


def test_certificates_of_a_file_made_anew_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    exact = RESULT | {"file": "fp32", "value": 0.6}
    page = card(
        results=[exact, RESULT], rows=ROWS, proofs=[proof_line(PROOF)], data="glue/cola", limits=["none *here*"]
    )
    made = tiny.bundle(tmp_path / "bundle", model=tiny.bert(2)).attach("README.md", page)
    made = made.attach_evidence(certificates=[PROOF])
    before = (made.path / "README.md").read_text(encoding="utf-8")
    assert (before.count("NOT certified"), before.count("an earlier")) == (0, 0)
    assert before.partition("---\n\n")[2] == page.partition("---\n\n")[2]

    made.attach_evidence(certificates=[replace(PROOF, sha256="2", after=0.25, certified=False)])
    after = (made.path / "README.md").read_text(encoding="utf-8")
    assert after.count("NOT certified") == after.count("0.2500 of this file") == 1
    assert "The scores and times above are of an earlier onnx/model\\_quantized.onnx." in after
    data: Any = ModelCard(after).data
    assert [each.metric_value for each in data.eval_results] == [0.6]
    for part in ("## Scores", "## Use", "## Limits"):
        assert after.count(part) == 1
    assert after.partition("## Use")[2] == page.partition("## Use")[2]


def test_a_card_without_a_certificate_gets_one_before_its_use() -> None:
    page = revise(card(rows=ROWS), [HERE], {})
    assert page.index("## Scores") < page.index("## Certificate\n\n- onnx/model") < page.index("\n\n## Use\n\n")


def test_a_card_of_files_made_anew_has_neither_certificates_nor_scores_for_the_hub() -> None:
    results = [RESULT, RESULT | {"file": "w8", "value": 0.6}]
    proved = card(results=results, rows=ROWS, proofs=[proof_line(PROOF)], data="glue/cola")
    page = revise(proved, (), {"int8": "onnx/model_quantized.onnx"})
    assert "certified" not in page
    assert "The scores and times above are of an earlier onnx/model\\_quantized.onnx." in page
    assert [each.metric_value for each in ModelCard(page).data.eval_results] == [0.6]
    plain = card(proofs=[proof_line(PROOF)])
    assert revise(plain, (), {"int8": "x"}).strip() == revise(card(), (), {}).strip() == card().strip()


def test_a_card_of_the_user_gets_certificates_wherever_its_sections_are() -> None:
    last = "---\nlicense: mit\n---\n# Mine\n\n## Certificate\n\n- old\n"
    none = "---\nlicense: mit\n---\n# Mine\n\nNothing else.\n"
    for card_of_user in (last, none):
        page = revise(card_of_user, [HERE], {})
        assert page.startswith("---\nlicense: mit\n---\n# Mine\n\n")
        assert page.rstrip().endswith(escape(proof_line(HERE)))
        assert page.count("## ") == 1
        assert "old" not in page
    assert revise(none, (), {}) == none


def test_a_licence_that_is_not_known_is_left_out_with_a_sentence() -> None:
    assert "No licence is given: the licence of my teacher is unknown." in card(teacher="my teacher")
    known = card(license="apache-2.0", base_model="o/t", data="intents")
    assert "apache-2.0: the licence of o/t" in known
    assert "No licence" not in known
    assert "https://huggingface.co/datasets/nyu-mll/glue" in card(data="glue/cola", dataset="nyu-mll/glue")
    assert "under an unknown licence" in card(data="mine")


@pytest.mark.parametrize("kind", ["classification", "tagging", "qa"])
def test_five_runtimes_are_shown(kind: Any) -> None:
    pair = kind == "qa"
    task = Task(kind, ("a", "b")[: 1 + pair], "c", () if pair else ("O", "B-x"), "f1")
    page = card(task, command="compress distill  --out 'a\nb'")
    for runtime in ("from transformers", "import onnxruntime", "from optimum", "@huggingface/transformers", "Bundle"):
        assert runtime in page
    assert "\n    compress distill --out 'a b'\n" in page
    shapes = {
        "qa": "`end_logits` (float32, texts x tokens)",
        "tagging": "texts x tokens x 2, in the order of the labels",
    }
    assert shapes.get(kind, "`logits` (float32, texts x 2, in the order of the labels above)") in page


def test_an_export_that_is_no_bundle_says_how_to_open_it() -> None:
    files = [{"file": "model_text.onnx", "precision": "int8", "bytes": 2_000_000, "note": "text in"}]
    record: dict[str, Any] = {"for": "text", "source": "x", "model_type": "bert", "max_length": 64, "files": files}
    record |= {"inputs": [Port("text", "string", ("batch_size",))], "outputs": [Port("score", "float32", (1, 2))]}
    record |= {"labels": ["a|b", "c"], "verdicts": ["fine"], "warnings": []}
    code = [Snippet("Python", "python", 'run(["label"])'), Snippet("Kotlin", "kotlin", "run()")]
    page = export_card(record, {"license": "mit"}, PAIR, code)
    front = yaml.safe_load(page.split("---\n")[1])
    assert (front["license"], front["library_name"]) == ("mit", "onnxruntime")
    assert front["tags"] == ["compress", "text", "onnx", "int8"]
    assert "| model\\_text.onnx | int8 | 2.0 | text in |" in page
    assert "| in | text | string | batch\\_size |\n| out | score | float32 | 1 x 2 |" in page
    assert "Labels, in the order of the outputs: a\\|b, c." in page
    assert '### Python\n\n```python\nrun(["label"])\n```\n\n### Kotlin\n\n```kotlin\nrun()\n```\n' in page
    files = [{"file": "a.xml", "precision": each, "bytes": 1} for each in ("w8", "fp16")]
    page = export_card(record | {"for": "openvino", "files": [*files, {"file": "x.json", "bytes": 1}]}, {}, PAIR, code)
    assert yaml.safe_load(page.split("---\n")[1])["tags"] == ["compress", "openvino", "w8", "fp16"]


def test_rows_are_a_table_and_no_rows_are_no_heading() -> None:
    lines = card(rows=ROWS).splitlines()
    start = lines.index("## Scores") + 2
    assert [line.strip() for line in lines[start : start + 4]] == [
        "| model | f1 | file |",
        "| --- | --- | --- |",
        "| teacher | 0.9123 | – |",
        "| my\\|student | 0.9 | 4 MB |",
    ]
    assert "Scores" not in card()


def test_text_from_outside_cannot_break_the_page() -> None:
    page = card(teacher="<img src=x>", data="a\n# b", limits=["[x](y)"])
    assert "# Tiny \\*one\\*\n" in page
    assert "- a\\|b\n- &lt;script&gt;\n" in page
    assert "taught by &lt;img src=x&gt;, on a \\# b." in page
    assert "- \\[x\\](y)\n" in page


def test_wrong_fields_are_named() -> None:
    with pytest.raises(BundleError, match=r"no field 'techer'\. Did you mean 'teacher'\?"):
        card(techer="x")
    with pytest.raises(BundleError, match=r"columns \['model'\]; expected \['model', 'f1', 'file'\]"):
        card(rows=[*ROWS, {"model": "x"}])
    with pytest.raises(BundleError, match="expected a name"):
        model_card({}, Manifest(task=PAIR, max_length=64, model_type="bert", versions={}, files={}))


@pytest.mark.parametrize("task", [PAIR, Task("embedding", ("text",), "similarity", (), "spearman", width=8)])
@pytest.mark.parametrize("own", [False, True])
def test_only_a_class_of_our_own_is_registered_first(task: Task, own: bool) -> None:
    """Other libraries load it after that import only, or not at all."""
    manifest = Manifest(
        task=task, max_length=64, model_type="static-embedding" if own else "bert", parameters=1, versions={}, files={}
    )
    page = model_card({"name": "it"}, manifest)
    torch_code = next(block for block in page.split("```python\n") if block.startswith(("from", "import compress")))
    assert torch_code.startswith("import compress.models.own_classes  #") == own
    assert ("from sentence_transformers import" in torch_code) == task.vectors
    for others in ("@huggingface/transformers", 'backend="onnx"' if task.vectors else "from optimum"):
        assert (others in page) != own
