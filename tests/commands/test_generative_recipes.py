"""Every recipe that ends in a language model runs at tiny size, to a checkpoint that writes or answers."""

import io
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import compress
from compress.commands.pretrain import pretrain
from compress.jobs import pretrain as jobs
from compress.jobs.pretrain import describe_stage, load_scores
from compress.training.stage import Trained
from tests import command, generative, tiny

SMALL = {"steps": "3", "batch": "8", "micro_batch": "4", "max_length": "32", "evaluate": "1"}
ON_POLICY = {
    "gkd": "stages.on-policy.step={by: gkd.OnPolicy, share: 1.0, prompt: 4, new_tokens: 6}",
    "minillm": "stages.policy.step={by: minillm.PolicyGradient, prompt: 4, new_tokens: 6}",
}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    story = "the story was sharp but slow . a film is never quite dull . this actor was great and the plot is fun ."
    (tmp_path / "corpus.txt").write_text("\n\n".join([f"{story}\n{story}"] * 30), encoding="utf-8")
    return str(tmp_path / "corpus.txt")


def teacher(folder: Path, family: str) -> str:
    model = getattr(generative, family)(layers=4)
    # GPT-2's and Llama's own tokenizers have no padding token either
    tokenizer = generative.t5_tokenizer() if family == "t5" else generative.gpt2_tokenizer(pad=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def overrides(stages: int, *more: str) -> list[str]:
    return [f"stages.{n}.{key}={value}" for n in range(stages) for key, value in SMALL.items()] + list(more)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("recipe", "stages"), [("distilgpt2", 1), ("gkd", 2), ("minillm", 2)])
def test_a_distilled_language_model_generates_text(
    recipe: str, stages: int, family: str, corpus: str, tmp_path: Path
) -> None:
    lines = overrides(stages, *([ON_POLICY[recipe]] if recipe in ON_POLICY else []))
    folder = tiny.call(pretrain,
        teacher=teacher(tmp_path / "teacher", family), recipe=recipe, out=tmp_path / "run", corpus=corpus,
        overrides=lines, precision="fp32",
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.model_type, model.config.num_hidden_layers) == (family, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = tokenizer("the film", return_tensors="pt")
    assert len(model.generate(**start, max_new_tokens=3, do_sample=False)[0]) > len("the film")
    scores = load_scores(folder.parent)
    assert scores is not None
    assert [each.name.split()[0] for each in scores.models] == ["teacher", "student", "student"]
    whole, cut, student = scores.models
    assert student.parameters == cut.parameters == sum(each.numel() for each in model.parameters()) < whole.parameters
    assert cut.nats != student.nats, "it has been trained"
    assert len(scores.tokens) == 2
    page = (folder.parent / "report.html").read_text(encoding="utf-8")
    for expected in (*(each.name for each in scores.models), "<span>export</span>", "Perplexity", recipe):
        assert expected in page


def test_the_command_that_is_printed_next_makes_a_bundle(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["--teacher", teacher(tmp_path / "teacher", "gpt2"), "--recipe", "distilgpt2", "--corpus", corpus]
    changes = [word for line in overrides(1) for word in ("--set", line)]
    made = command.run("pretrain", *given, *changes, "--out", str(out))
    (following,) = [line for line in (made.out + made.err).splitlines() if line.startswith("next: ")]
    (out / "student").rename(out / "elsewhere")
    assert command.refused(command.run(*shlex.split(following)[2:]), out, "a run without a bundle")
    (out / "elsewhere").rename(out / "student")
    result = command.run(*shlex.split(following)[2:])
    assert result.code == 0, result.err
    assert len(compress.Bundle.load(out).complete(["the film"])) == 1


def test_a_llama_is_distilled_into_a_narrower_one(corpus: str, tmp_path: Path) -> None:
    """Its units are the teacher's, chosen by what its own words lose without them."""
    sizes = [f"student.{name}={size}" for name, size in {"hidden": 24, "ffn": 40, "heads": 2}.items()]
    folder = tiny.call(pretrain,
        teacher=teacher(tmp_path / "teacher", "llama"), recipe="distilgpt2", out=tmp_path / "run", corpus=corpus,
        overrides=[*overrides(1), *sizes, "stages.0.objective.2.project=true"], precision="fp32",
    )  # fmt: skip
    scores = load_scores(folder.parent)
    assert scores is not None and scores.models[1].parameters == scores.models[2].parameters
    config = AutoModelForCausalLM.from_pretrained(folder).config
    found = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    assert (*found, config.head_dim) == (24, 40, 2, 1, 8)


MINITRON = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: A language model is pruned by its activations, and learns the whole one's next words.
student: {init: teacher}
stages:
  - {prune: once, data: text, head: causal_lm, importance: {by: minitron.activation}, rows: 32, max_length: 32}
  - distill: logits
    data: text
    head: causal_lm
    rows: gpt2.blocks
    corrupt: gpt2.next_tokens
    steps: 3
    batch: 8
    max_length: 32
    lr: 1.0e-3
    objective: [{loss: distilbert.masked_soft_targets}]
"""


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_language_model_is_pruned_by_its_activations(family: str, corpus: str, tmp_path: Path) -> None:
    sizes = [f"target.{name}=0.5" for name in ("layers", "hidden", "heads", "ffn")]
    folder = tiny.call(pretrain,
        teacher=teacher(tmp_path / "teacher", family), recipe=tiny.recipe(tmp_path, MINITRON), out=tmp_path / "run",
        corpus=corpus, overrides=sizes, precision="fp32",
    )  # fmt: skip
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 16, 2)
    scores = load_scores(folder.parent)
    assert scores is not None
    whole, cut, student = (each.parameters for each in scores.models)
    assert whole > cut == student, "what is cut is scored as it was before it recovered"


def test_scores_are_forecast_and_computed_once(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "teacher": teacher(tmp_path / "teacher", "gpt2"),
        "recipe": "distilgpt2",
        "corpus": corpus,
        "overrides": overrides(1),
        "precision": "fp32",
    }
    *_, last = tiny.call(compress.forecast_pretraining, **given).phases
    assert last.name == "perplexity" and 0 < last.seconds[0] == last.seconds[1]
    folder = tiny.call(pretrain, **given, out=tmp_path / "run")
    before = load_scores(folder.parent)
    monkeypatch.setattr(jobs, "score_documents", None)
    tiny.call(pretrain, **given, out=tmp_path / "run", resume=True)
    assert load_scores(folder.parent) == before is not None


def test_a_text_to_text_model_learns_to_fill_in_spans(corpus: str, tmp_path: Path) -> None:
    """Scored by what it expects of the spans of text that is held out."""
    sizes = [f"student.{name}={size}" for name, size in {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4}.items()]
    lines = overrides(1, *sizes, "stages.0.corrupt.sentinel=6", "stages.0.max_length=64", "stages.0.steps=30")
    folder = tiny.call(pretrain,
        teacher=teacher(tmp_path / "teacher", "t5"), recipe="t5-spans", corpus=corpus, out=tmp_path / "run",
        overrides=lines, precision="fp32",
    )  # fmt: skip
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert (model.config.num_layers, model.config.num_decoder_layers, model.config.d_model) == (2, 2, 32)
    measure = Trained.read(next((tmp_path / "run" / "stages").iterdir()) / "model").measure
    assert measure == "log-likelihood"
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [line["eval_score"] for line in log if "eval_score" in line]
    rates = {line["step"]: line["learning_rate"] for line in log if "learning_rate" in line}
    assert scores[-1] > -math.log(len(generative.t5_tokenizer())), "better than every token alike"
    assert rates[30] == pytest.approx(0.01 * math.sqrt(1 / 29), rel=1e-6)


def test_a_distilled_text_to_text_model_answers(tmp_path: Path) -> None:
    """Its score is the task's metric, and is printed as what it is."""
    console = Console(file=io.StringIO(), width=200)
    folder = tiny.call(
        pretrain,
        teacher=teacher(tmp_path / "teacher", "t5"),
        recipe="t5",
        out=tmp_path / "run",
        data=tiny.reviews(tmp_path / "data"),
        overrides=overrides(1, "stages.0.rows.name=sst2"),
        precision="fp32",
        console=console,
    )
    record = Trained.read(next((tmp_path / "run" / "stages").iterdir()) / "model")
    assert record.measure == "accuracy"
    assert record.score is not None
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"accuracy {record.score:.3f} on the validation split" in printed
    assert "nats" not in printed
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert (model.config.num_layers, model.config.num_decoder_layers) == (2, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = tokenizer("sst2 text: a good film", return_tensors="pt")
    assert model.generate(input_ids=source["input_ids"], max_new_tokens=3).shape[0] == 1


@pytest.mark.parametrize(
    ("score", "measure", "expected"),
    [
        (None, None, ""),
        (-2.5, "log-likelihood", ", log-likelihood of a held-out token -2.500 nats"),
        (-0.25, "negative loss", ", loss on held-out rows 0.250"),
        (0.75, "pearson", ", pearson 0.750 on the validation split"),
        (0.75, None, ", score 0.750 on the validation split"),  # a stage that ended before measures were recorded
    ],
)
def test_a_score_is_printed_with_what_it_measures(score: float | None, measure: str | None, expected: str) -> None:
    assert describe_stage(Trained(1, 1, 1.0, score, 1, measure=measure)) == f"1 steps in 1 s{expected}"
