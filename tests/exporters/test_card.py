"""The model card: the hub's front matter, the rows it is given, and nothing that breaks the page."""

from typing import Any

import pytest
import yaml

from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.card import model_card
from compress.exporters.manifest import Manifest

PAIR = Task("classification", ("premise", "hypothesis"), "label", ("a|b", "<script>"), "f1")
ROWS = ({"model": "teacher", "f1": 0.91234567, "file": None}, {"model": "my|student\n", "f1": 0.9, "file": "4 MB"})


def card(task: Task = PAIR, **fields: Any) -> str:
    manifest = Manifest(task=task, max_length=64, model_type="bert", parameters=14_350_248, versions={}, files={})
    return model_card({"name": "Tiny *one*", **fields}, manifest)


def test_front_matter_is_yaml_that_the_hub_reads() -> None:
    page = card(base_model="org/teacher: x", language="en")
    front = yaml.safe_load(page.split("---\n")[1])
    assert front["base_model"] == "org/teacher: x"
    assert (front["library_name"], front["pipeline_tag"], front["language"]) == (
        "transformers",
        "text-classification",
        "en",
    )
    assert not {"base_model", "language", "license"} & yaml.safe_load(card().split("---\n")[1]).keys()


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
