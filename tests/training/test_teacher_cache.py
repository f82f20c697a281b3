"""A teacher's outputs read from disk are the teacher's outputs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compress.config.reference import Call
from compress.config.term import Term
from compress.data.collate import Collate
from compress.errors import ObjectiveError
from compress.io import CHECKSUMS
from compress.models.signals import Signals, open_attention, read
from compress.models.teacher import Teacher
from compress.training import schedule
from compress.training import teacher_cache as caches
from compress.training.stage import cache_pays
from compress.training.step import Distillation
from compress.training.teacher_cache import TeacherCache, teacher_cache
from tests import forks, learning, tiny
from tests.damage import damaged

WANTS = frozenset({"logits", "embeddings", "layers", "scores"})
CACHEABLE = (
    Term("tinybert.attention"),
    Term("hinton.soft_targets", 0.5, options={"temperature": 2.0}),
    Term("bert.labels", 0.5),
    Term("tinybert.embeddings", project=True),
    Term("tinybert.hidden", project=True),
)


@pytest.fixture(params=[1 << 15, 5], ids=["one shard", "five shards, the last short"])
def shards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Five rows a shard make 22 rows five shards."""
    monkeypatch.setattr(caches, "SHARD", request.param)
    return -(-22 // int(request.param))


def opened(
    folder: Path, *, wants: frozenset[str] = WANTS, layers: Sequence[int] = (1, 3), seed: int = 2
) -> TeacherCache:
    teacher = tiny.model("bert", layers=4, seed=seed)
    entry = folder / "outputs"
    return teacher_cache(teacher, learning.rows(), learning.collate(), entry, wants=wants, layers=layers, batch=4)


def attended() -> Any:
    teacher = tiny.model("bert", layers=4, seed=2)
    open_attention(teacher)
    return teacher


def assert_same(cached: Signals, online: Signals, layers: Sequence[int]) -> None:
    """At real tokens; what stands at pads is nobody's business."""
    real = online.mask_BL.bool()
    assert (cached.logits is None) == (online.logits is None)
    torch.testing.assert_close(cached.logits, online.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(cached.embeddings[real], online.embeddings[real], rtol=0, atol=1e-5)
    pairs = real[:, :, None] & real[:, None, :]
    for layer in layers:
        torch.testing.assert_close(cached.layers[layer][real], online.layers[layer][real], rtol=0, atol=1e-5)
        if online.attention:
            found, expected = (each.scores[layer].permute(0, 2, 3, 1)[pairs] for each in (cached, online))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chosen", [range(22), [21, 0, 9, 4, 5], [13]], ids=["all", "across shards", "one"])
def test_cached_is_online(tmp_path: Path, chosen: Sequence[int], shards: int) -> None:
    """In any order and company: a row is padded differently here than when it was computed."""
    cache = opened(tmp_path)
    assert len(list(tmp_path.glob("outputs/*/logits.npy"))) == shards
    rows = learning.rows()
    batch = learning.collate()([rows[i] for i in chosen])
    with torch.no_grad():
        online = read(attended(), batch, WANTS)
    assert_same(cache.signals(batch, WANTS), online, (1, 3))


def test_only_wanted_signals_are_cached(tmp_path: Path, shards: int) -> None:
    opened(tmp_path, wants=frozenset({"layers"}), layers=[3])
    files = {path for path in (tmp_path / "outputs").glob("0*/*") if path.name != CHECKSUMS}
    assert {path.name for path in files} == {"hidden4.npy"}
    assert len(files) == shards
    rows = learning.rows()
    kept = sum(np.load(path, mmap_mode="r").nbytes for path in files)
    assert kept == sum(rows["length"]) * 32 * 4, "tokens, and no pads"


def test_a_second_opening_computes_nothing(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(caches, "read", None)
    again = opened(tmp_path)
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    batch = learning.collate()([learning.rows()[i] for i in (3, 17)])
    assert_same(again.signals(batch, WANTS), first.signals(batch, WANTS), (1, 3))
    assert all(isinstance(shard, np.memmap) for shard in again.logits)


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "never finished"])
def test_only_missing_and_damaged_shards_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """One flipped bit in them would be learned from."""
    monkeypatch.setattr(caches, "SHARD", 5)
    opened(tmp_path)
    entry = tmp_path / "outputs" / "00003"
    if damage == "never finished":  # a killed process leaves a shard under another name, and half of it written
        unfinished = entry.rename(entry.with_name(".00003.partial"))
        (unfinished / "hidden2.npy").rename(unfinished / ".hidden2.npy.partial")
    else:
        damaged(entry / "hidden2.npy", damage)
    whole = [path for path in entry.parent.glob("0*/*.npy") if path.parent != entry]
    kept = {path: path.stat().st_mtime_ns for path in whole}
    again = opened(tmp_path)
    assert kept == {path: path.stat().st_mtime_ns for path in whole}
    assert ("hidden2.npy" in capsys.readouterr().err) == (damage != "never finished")
    assert sorted(path.name for path in entry.parent.iterdir()) == [f"{shard:05d}" for shard in range(5)]
    batch = learning.collate()([learning.rows()[i] for i in (15, 19)])
    with torch.no_grad():
        online = read(attended(), batch, WANTS)
    assert_same(again.signals(batch, WANTS), online, (1, 3))


def test_a_bfloat16_teacher_is_cached_in_half_of_the_bytes(tmp_path: Path) -> None:
    teacher, rows = tiny.model("bert", layers=4, seed=2), learning.rows()
    entry = tmp_path / "outputs"
    cache = teacher_cache(teacher, rows, learning.collate(), entry, wants=WANTS, layers=[3], batch=22, bf16=True)
    assert np.load(entry / "00000" / "hidden4.npy", mmap_mode="r").nbytes == sum(rows["length"]) * 32 * 2
    batch = learning.collate()([rows[i] for i in range(22)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        online = read(teacher, batch, WANTS)
    kept, real = cache.signals(batch, WANTS), online.mask_BL.bool()
    assert kept.scores[3].dtype == torch.bfloat16
    assert kept.layers[3].dtype == torch.float32
    torch.testing.assert_close(kept.layers[3][real], online.layers[3].float()[real], rtol=2**-7, atol=1e-2)


def test_sentence_vectors_are_cached_in_float16(tmp_path: Path) -> None:
    teacher, rows, wants = tiny.model("bert", seed=2), learning.rows(), frozenset({"logits"})
    options = {"wants": wants, "layers": ()}
    cache = teacher_cache(teacher, rows, learning.collate(), tmp_path, vectors=True, **options)
    assert cache.logits[0].dtype == np.float16
    batch = learning.collate()([rows[i] for i in range(22)])
    with torch.no_grad():
        online = read(teacher, batch, wants)
    torch.testing.assert_close(cache.signals(batch, wants).logits, online.logits, rtol=2**-10, atol=1e-6)


def _open_as(rank: int, folder: Path, begin: Any) -> None:
    caches.SHARD = 6  # four shards
    caches.PartialState = lambda: SimpleNamespace(process_index=rank, num_processes=2)
    progress = caches.Progress

    def begin_shard(*args: Any, done: int, **more: Any) -> Any:
        begin.wait(30)  # both processes are writing a shard
        (folder / f"{done // 6} by {rank}").touch()
        return progress(*args, done=done, **more)

    caches.Progress = begin_shard
    opened(folder)


def test_two_processes_make_different_shards_at_a_time(tmp_path: Path) -> None:
    context = forks.context()
    begin = context.Barrier(2)
    both = [context.Process(target=_open_as, args=(rank, tmp_path, begin)) for rank in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
    assert [each.exitcode for each in both] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("* by *")) == [f"{n} by {n % 2}" for n in range(4)]


@pytest.mark.parametrize(
    ("changes", "terms", "pays"),
    [
        ({"steps": None, "epochs": 2}, CACHEABLE, True),
        ({"steps": None, "epochs": 1}, CACHEABLE, False),
        ({"steps": None, "epochs": "auto"}, CACHEABLE, True),
        ({"steps": None, "epochs": "auto", "effort": "quick", "batch": 1}, CACHEABLE, False),
        ({"steps": 9, "corrupt": Call("bert.mask")}, CACHEABLE, False),
        ({"steps": 9}, (*CACHEABLE, Term("minilm.value_relations", options={"heads": 4})), False),
        ({"steps": 9, "head": "masked_lm"}, CACHEABLE, False),
    ],
)
def test_auto_keeps_outputs_that_are_read_again_and_do_not_change(
    changes: dict[str, Any], terms: Sequence[Term], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "LEAST_AUTO_STEPS", 40)
    teacher = Teacher("t", Path(), tiny.model("bert", layers=4), tiny.tokenizer(), digest="", trained=True)
    stage, objective = learning.stage(terms, **changes), learning.step(terms).objective
    assert cache_pays(stage, objective, teacher, learning.rows()) == pays
    monkeypatch.setattr("compress.training.stage.MOST_CACHED", 10_000)
    assert not cache_pays(stage, objective, teacher, learning.rows())


@pytest.mark.parametrize(("terms", "pays"), [((Term("hinton.soft_targets"),), True), (CACHEABLE, False)])
def test_on_a_gpu_auto_keeps_logits_only(terms: Sequence[Term], pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    teacher = Teacher("t", Path(), tiny.model("bert", layers=4), tiny.tokenizer(), digest="", trained=True)
    objective = learning.step(terms).objective
    assert cache_pays(learning.stage(terms, steps=9), objective, teacher, learning.rows()) == pays


def test_queries_keys_and_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ObjectiveError, match=r"this objective reads queries, values; set cache_teacher: false"):
        opened(tmp_path, wants=frozenset({"logits", "scores", "queries", "values"}))


@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_scores_of_tokens_that_do_not_see_each_other_are_refused(tmp_path: Path, family: str) -> None:
    """The cache would lose which they are."""
    rows, collate = learning.rows(), learning.collate()
    wants = frozenset({"scores"})
    with pytest.raises(
        ObjectiveError, match=r"does not store which tokens .* causal attention .* cache_teacher: false"
    ):
        teacher_cache(tiny.model(family), rows, collate, tmp_path, wants=wants, layers=[0, 1])
    assert not caches.explain_uncacheable(tiny.model("bert"), wants)
    assert not caches.explain_uncacheable(tiny.model(family), frozenset({"layers"}))


@pytest.mark.parametrize("family", ["xlnet", "roberta"])
def test_padding_on_the_left_is_supported(tmp_path: Path, family: str) -> None:
    """XLNet's rows are padded on the left. RoBERTa shows scores, but answers at the first place."""
    tokens, teacher, rows = tiny.tokenizer(), tiny.model(family, seed=2), learning.rows()
    wants = WANTS - {"logits" if family == "roberta" else "scores"}
    collate = Collate(tokens, left=True)
    cache = teacher_cache(teacher, rows, collate, tmp_path, wants=wants, layers=[0, 1], batch=4)
    batch = collate([rows[i] for i in (2, 11, 20)])
    assert not batch["attention_mask"][:, 0].all()
    with torch.no_grad():
        assert_same(cache.signals(batch, wants), read(teacher, batch, wants), (0, 1))


def test_training_with_the_cache_is_training_without(tmp_path: Path, shards: int) -> None:
    """With an eps that keeps Adam from blowing up the rounding of gradients that are zero: those of key biases."""
    stage, online = learning.stage(CACHEABLE, eps=1e-4), learning.step(CACHEABLE)
    learning.train(online, stage, tmp_path / "online")

    cached = learning.step(CACHEABLE)
    layers = sorted({n for pairs in cached.objective.pairs for _, n in pairs})
    cache = opened(tmp_path / "cache", wants=cached.objective.teacher_wants, layers=layers)
    cached = Distillation(cached.student, cache, cached.objective)
    learning.train(cached, stage, tmp_path / "cached")

    expected = learning.weights(online)
    for name, tensor in learning.weights(cached).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
