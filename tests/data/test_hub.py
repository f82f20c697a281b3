"""The hub: read from its local cache, as `datasets` itself lays it out; an honest error when there is neither."""

import json
import socket
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from compress.data import load_task, sources
from compress.errors import DataError

SST2 = Features(
    {"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"]), "idx": Value("int32")}
)


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def split(labels: list[int]) -> Dataset:
    rows = {"sentence": [f"sentence {n}" for n in range(len(labels))], "label": labels, "idx": list(range(len(labels)))}
    return Dataset.from_dict(rows, SST2)


def repository(folder: Path, splits: dict[str, Dataset]) -> str:
    """A data set repository on disk, as one clones it from the hub."""
    for name, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return str(folder)


@pytest.fixture
def cached(tmp_path: Path, hub_cache: Path) -> None:
    """nyu-mll/glue, sst2, in the hub's cache, under the path and the names that a download would have given it."""
    splits = DatasetDict(train=split([0, 1, 1, -1]), validation=split([1, 0]), test=split([-1, -1]))
    datasets.load_dataset(repository(tmp_path / "glue", dict(splits)), "default")
    (made,) = (path.parent for path in hub_cache.rglob("dataset_info.json"))
    home = hub_cache / "nyu-mll___glue" / "sst2" / "0.0.0" / "hash"
    home.parent.mkdir(parents=True)
    made.rename(home)
    info = home / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"config_name": "sst2"}))


@pytest.mark.usefixtures("cached")
def test_glue_from_the_cache() -> None:
    data = load_task("glue/sst2")
    assert data.name == "glue/sst2"
    assert (data.task.text, data.task.label, data.task.labels) == (("sentence",), "label", ("negative", "positive"))
    assert data.train.to_list()[1] == {"text": "sentence 1", "label": 1}
    assert (len(data.train), len(data.validation), data.test) == (3, 2, None)
    assert data.notes[:3] == (
        "the hub cannot be reached: glue/sst2 comes from the local cache",
        "sst2 [train]: left out 1 rows that the source marks as unlabelled",
        "skipped sst2 [test]: it has no labels",
    )


def test_a_repository_on_disk_gives_typed_splits(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "labels": datasets.List(ClassLabel(names=["joy", "fear"]))})
    rows = Dataset.from_dict({"text": ["some text", "more text"], "labels": [[1, 0], []]}, features)
    splits, _ = sources.load_hub_splits(repository(tmp_path / "emotions", {"train": rows, "validation": rows}))
    (batch,) = splits["train"].read(("text", "labels"))
    assert splits["train"].classes == {"labels": ("joy", "fear")}
    assert batch.to_pylist() == [{"text": "some text", "labels": ["fear", "joy"]}, {"text": "more text", "labels": []}]


@pytest.mark.parametrize("source", ["glue/sst2", "owner/name", "owner/name:part", "name"])
def test_unreachable_hub_without_cache(source: str) -> None:
    with pytest.raises(
        DataError, match=rf"^{source}: no such file.*the hub cannot be reached.*a folder .*'intents'.*HF_HOME"
    ):
        load_task(source)


@pytest.mark.parametrize("cached", ["owner___my_reviews", "datasets--owner--MyReviews"])
def test_a_cached_set_is_not_refused_without_the_hub(
    cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="the hub cannot be reached"):
        sources.check("owner/MyReviews")
    (tmp_path / cached).mkdir()
    sources.check("owner/MyReviews")


def test_silent_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never answers
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DataError, match="the hub cannot be reached"):
            load_task("glue/sst2")
    assert datasets.config.HF_HUB_OFFLINE is False
