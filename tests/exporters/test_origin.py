"""What a checkpoint's own card says of it is taken over; what nobody says is left out."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.data.sources import hub_id
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import load_source
from compress.models.checkpoints import describe_origin
from tests import tiny

CARD = "---\nlicense: mit\nlanguage: de\nbase_model: owner/base\n---\n# A model\n"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (CARD, {"license": "mit", "language": "de", "base_model": "owner/base"}),
        ("---\nlicense: [a, b]\nlanguage:\n- en\n- fr\n---\n", {"license": ["a", "b"], "language": ["en", "fr"]}),
        ("---\nlicense: other\nlicense_name: x\nlicense_link: 7\n---\n", {"license": "other", "license_name": "x"}),
        ("# no front matter", {}),
        ("---\n- a list\n---\n", {}),
        ("---\nlicense: {\n---\n", {}),
    ],
)
def test_a_folder_s_own_card_is_read(tmp_path: Path, text: str, known: dict[str, Any]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert describe_origin(str(tmp_path), tmp_path) == known


def test_a_model_of_the_hub_is_its_own_base(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD, encoding="utf-8")
    assert describe_origin("bert-base", tmp_path)["base_model"] == "google-bert/bert-base-uncased"
    assert describe_origin("owner/model", tmp_path)["base_model"] == "owner/model"
    assert describe_origin("minilm", tmp_path / "none") == {"base_model": "sentence-transformers/all-MiniLM-L6-v2"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("glue/sst2", ("nyu-mll/glue", "sst2")),
        ("owner/data:part", ("owner/data", "part")),
        ("owner/data", ("owner/data", "")),
        ("intents", None),
        ("a.tsv + b.tsv", None),
    ],
)
def test_data_of_the_hub_are_named_as_the_hub_does(name: str, found: tuple[str, str] | None) -> None:
    assert hub_id(name) == found


def test_an_exported_checkpoint_keeps_its_licence(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "model", tiny.bert())
    (tmp_path / "model" / "README.md").write_text(CARD, encoding="utf-8")
    source = load_source(folder)
    assert not isinstance(source, Bundle)
    bundle = source.write(tmp_path / "bundle")
    front = yaml.safe_load((bundle.path / "README.md").read_text().split("---\n")[1])
    assert (front["license"], front["base_model"], front["language"]) == ("mit", "owner/base", "de")
    assert front["pipeline_tag"] == "text-classification"


def test_lists_and_names_of_licences_are_kept(tmp_path: Path) -> None:
    """Merged models have several bases, and a licence that the hub does not list has a name of its own."""
    folder = tiny.checkpoint(tmp_path / "model", tiny.bert())
    card = "---\nlicense: [mit, other]\nlicense_name: our-own\nlicense_link: LICENSE\nbase_model: [o/one, o/two]\n---\n"
    (tmp_path / "model" / "README.md").write_text(card, encoding="utf-8")
    source = load_source(folder)
    assert not isinstance(source, Bundle)
    page = (source.write(tmp_path / "bundle").path / "README.md").read_text()
    front = yaml.safe_load(page.split("---\n")[1])
    assert (front["license"], front["license_name"], front["license_link"]) == (["mit", "other"], "our-own", "LICENSE")
    assert front["base_model"] == ["o/one", "o/two"]
    assert "our-own: the licence of o/one, o/two, by its own card." in page
