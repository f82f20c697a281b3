"""`compress label` with a prompt that asks for a text: answers of the model's own, as training data."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import compress
from compress.commands import label as labelled
from compress.commands.pretrain import pretrain
from compress.data import load_task
from compress.errors import DataError, OutputError, PromptError, StudentError, TeacherError
from compress.papers import t5
from compress.prompting import local_model
from compress.prompting.answers import TextAfter, WrittenText, ask, cut_at
from compress.prompting.http_model import Endpoint, RemoteModel
from compress.prompting.local_model import LocalModel
from compress.prompting.prompt import Prompt, WritingPrompt, load_prompt
from compress.prompting.writing import PromptedWriter
from compress.training.stage import Trained
from tests import command, generative, tiny
from tests.prompting import language_models
from tests.prompting.endpoint_server import ok
from tests.prompting.language_models import FakeLanguageModel

QUIET = Console(quiet=True)
PROMPT = """
template: "{{ text }}\\nSummary: {{ answer }}"
max_new_tokens: 6
max_length: 60
"""
TEXTS = ("a gorgeous film", "the plot was slow and the actors were worse than bad", "it is good or bad", "")


def prompt(folder: Path, content: str = PROMPT) -> str:
    (folder / "free.yaml").write_text(content, encoding="utf-8")
    return str(folder / "free.yaml")


def lines(path: Path, *texts: str) -> str:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeLanguageModel:
    """Whatever the teacher is called, this one repeats the words that it is given."""
    fake = FakeLanguageModel({}, ())
    monkeypatch.setattr(labelled, "open_language_model", lambda *_, **__: fake)
    return fake


def label(data: str, prompt: str, out: Path, **changes: Any) -> list[dict[str, Any]]:
    labelled.label(**{"teacher": "told", "prompt": prompt, "data": data, "out": out, **changes})
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


# What a local model writes


def by_hand(model: Any, tokenizer: Any, begun: list[int], most: int, stop: Sequence[str]) -> WrittenText:
    """The likeliest token after the other, one sequence at a time, a whole forward pass each, no padding, no cache."""
    end = tokenizer.eos_token_id
    read = list(begun)
    target = [0] if model.config.is_encoder_decoder else read
    written: list[int] = []
    for _ in range(most):
        with torch.no_grad():
            given = {"decoder_input_ids": torch.tensor([target])} if model.config.is_encoder_decoder else {}
            logits = model(input_ids=torch.tensor([read]), **given).logits[0, -1]
        token = int(logits.argmax())
        if token == end:
            return WrittenText(cut_at(tokenizer.decode(written), stop)[0], True)
        written.append(token)
        target.append(token)
        text, stopped = cut_at(tokenizer.decode(written, skip_special_tokens=True), stop)
        if stopped:
            return WrittenText(text, True)
    return WrittenText(cut_at(tokenizer.decode(written, skip_special_tokens=True), stop)[0], False)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("together", [True, False])
def test_a_local_model_writes_the_likeliest_token_after_the_other(
    family: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of any lengths as alone; prompts that end differently have different answers."""
    if not together:
        monkeypatch.setattr(local_model, "TOKENS_PER_CALL", 1)
    tokenizer = language_models.pieces() if family == "t5" else language_models.byte_bpe()
    made = {"gpt2": language_models.gpt2, "t5": language_models.t5}
    model = made[family]() if family in made else language_models.causal(family)
    begun = [tokenizer(text)["input_ids"] or [0] for text in TEXTS]
    stop = (by_hand(model, tokenizer, begun[0], 12, ()).text[2:4],)
    expected = [by_hand(model, tokenizer, each, 12, stop) for each in begun]
    speaker = language_models.local(model, tokenizer)
    found = dict(speaker.write(TEXTS, max_new_tokens=12, stop=stop))
    assert [found[number] for number in range(len(TEXTS))] == expected
    assert len({each.text for each in expected}) > 1
    assert expected[0].finished


def test_the_checkpoints_own_settings_of_generation_hold_but_sampling_does_not() -> None:
    model, tokenizer = language_models.gpt2(), language_models.byte_bpe()
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=5)
    speaker = language_models.local(model, tokenizer)
    twice = [dict(speaker.write(TEXTS[:2], max_new_tokens=8, stop=())) for _ in range(2)]
    assert (
        twice[0]
        == twice[1]
        == dict(language_models.local(language_models.gpt2(), tokenizer).write(TEXTS[:2], max_new_tokens=8, stop=()))
    )
    model.generation_config.suppress_tokens = tokenizer(twice[0][0].text)["input_ids"]
    assert dict(speaker.write(TEXTS[:1], max_new_tokens=8, stop=()))[0].text != twice[0][0].text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" so good.\nMore", ("\n",), ("so good.", True)),
        ("\n\nso good", ("\n",), ("so good", False)),
        ("a; b. c", (".", ";"), ("a", True)),
        ("好吃。很好", ("。",), ("好吃", True)),
        ("all of it ", (), ("all of it", False)),
        ("\n", ("\n",), ("", False)),
    ],
)
def test_an_answer_ends_before_the_first_stop(text: str, stop: Sequence[str], expected: tuple[str, bool]) -> None:
    assert cut_at(text, stop) == expected


# Prompts


def test_a_prompt_asks_with_its_examples(tmp_path: Path) -> None:
    example = '\ninstruction: Be short.\nexamples: [{text: one, answer: "1"}, {text: two, answer: "2"}]\n'
    loaded = load_prompt(prompt(tmp_path, PROMPT + example))
    assert isinstance(loaded, WritingPrompt)
    assert loaded.stop == ("\n",)
    writer = PromptedWriter(FakeLanguageModel({}, ()), loaded, QUIET)
    expected = "Be short.\n\none\nSummary: 1\n\ntwo\nSummary: 2\n\n{{ text }} 3\nSummary:"
    assert writer.render(["{{ text }} 3"]) == expected


def test_the_prompts_that_come_along_are_of_both_kinds() -> None:
    assert isinstance(load_prompt("sentiment"), Prompt)
    assert isinstance(load_prompt("summary"), WritingPrompt)
    with pytest.raises(PromptError, match=r"summary: asks for a text.*pretrain --recipe t5"):
        Prompt.load("summary")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('template: "{{ answer }} {{ text }}"', "{{ answer }} must occur once, at the end"),
        ('template: "{{ text }} {{ label }} {{ answer }}"', "no variable 'label'"),
        (PROMPT + "labels: {a: b, c: d}", "no variable 'answer'"),
        (PROMPT + "stop: ['']", "an empty text would end every answer at once"),
        (PROMPT + "examples: [{text: a, text_pair: b, answer: c}]", r"examples\[0\]: has a text_pair"),
        (PROMPT.replace("60", "16").replace("6\n", "16\n", 1), "leave no room for a text"),
        (
            PROMPT + "examples: [{text: a, label: b}]",
            r"examples\[0\].label: no such setting\. Did you mean 'answer'|no such setting",
        ),
    ],
)
def test_unusable_prompts_are_refused(content: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=problem):
        load_prompt(prompt(tmp_path, content))


# The command


def test_texts_get_answers_and_those_without_an_end_have_no_line(
    model: FakeLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake model repeats the prompt: six words have no room for an end."""
    texts = [f"film {n}" for n in range(9)]
    data = lines(tmp_path / "texts.txt", *texts, "far more words than fit here")
    found = label(data, prompt(tmp_path), tmp_path / "out.jsonl", console=Console())
    assert found == [{"text": text, "answer": f"{text} Summary:"} for text in texts]
    printed = " ".join(capsys.readouterr().out.split())
    assert "no answer to 1 of 10 texts, which are left out" in printed
    assert "9 texts:" in printed


def test_a_teacher_that_answers_too_few_is_refused(model: FakeLanguageModel, tmp_path: Path) -> None:
    data = lines(tmp_path / "texts.txt", "a film", "far more words than fit here", "again more words than fit here")
    out = tmp_path / "out.jsonl"
    with pytest.raises(TeacherError, match=r"no answer to 2 of 3 texts.*--gate warn"):
        label(data, prompt(tmp_path), out)
    assert not out.exists()
    assert len(label(data, prompt(tmp_path), out, gate="warn")) == 1
    with pytest.raises(TeacherError, match="no answer to any text"):
        none = lines(tmp_path / "none.txt", "far more words than fit here")
        label(none, prompt(tmp_path), tmp_path / "none.jsonl", gate="warn")
    same = prompt(tmp_path, PROMPT + 'stop: ["film"]\n')
    data = lines(tmp_path / "same.txt", "a film 1", "a film 2")
    with pytest.raises(TeacherError, match="writes the same answer to every text"):
        label(data, same, tmp_path / "same.jsonl")


def test_an_interrupted_command_asks_only_for_the_rest(model: FakeLanguageModel, tmp_path: Path) -> None:
    data = lines(tmp_path / "texts.txt", *(f"film {n}" for n in range(5)))
    model.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        label(data, prompt(tmp_path), tmp_path / "out.jsonl")
    model.stop_after = None
    found = label(data, prompt(tmp_path), tmp_path / "out.jsonl")
    assert len(found) == len(model.asked) == len(set(model.asked)) == 5
    label(data, prompt(tmp_path), tmp_path / "again.jsonl")
    assert len(model.asked) == 5
    label(data, prompt(tmp_path, PROMPT.replace("6\n", "7\n", 1)), tmp_path / "longer.jsonl")
    assert len(model.asked) == 10, "another limit has other answers"


def test_pairs_and_long_texts(model: FakeLanguageModel, tmp_path: Path) -> None:
    pairs = PROMPT.replace("{{ text }}", "{{ text }} / {{ text_pair }}").replace(
        "max_new_tokens: 6", "max_new_tokens: 9"
    )
    (tmp_path / "rows.jsonl").write_text('{"premise": "a film", "hypothesis": "is good"}\n', encoding="utf-8")
    (row,) = label(str(tmp_path / "rows.jsonl"), prompt(tmp_path, pairs), tmp_path / "out.jsonl")
    assert row == {"text": "a film", "text_pair": "is good", "answer": "a film / is good Summary:"}
    with pytest.raises(PromptError, match="asks about two texts, the task has one"):
        label(lines(tmp_path / "one.txt", "one text"), prompt(tmp_path, pairs), tmp_path / "no.jsonl")
    writer = PromptedWriter(
        model, WritingPrompt(name="cut", template="{{ text }} {{ answer }}", max_length=16, max_new_tokens=6), QUIET
    )
    ((fitted, cut),) = writer.fit([[" ".join("abcdefghijklmnop")]])
    assert cut and fitted.split() == list("abcdefghij")


def test_the_file_is_training_data_for_t5(model: FakeLanguageModel, tmp_path: Path) -> None:
    """As it stands: `compress pretrain` reads it, trains, and scores the loss of held-out rows."""
    data = lines(tmp_path / "texts.txt", *(f"a film {n}" for n in range(40)))
    label(data, prompt(tmp_path), tmp_path / "written.jsonl")
    task = load_task(str(tmp_path / "written.jsonl"))
    assert (task.task.kind, task.task.text, task.task.label) == ("generation", ("text",), "answer")
    assert len(task.train) + len(task.validation) == 40
    tokenizer = generative.t5_tokenizer()
    row = next(t5.text_to_text(task.train, task.task, tokenizer, max_length=32))
    assert tokenizer.decode(row["input_ids"]).startswith("text: a film")
    assert tokenizer.decode(row["labels"]) == f"{task.train[0]['label']}</s>".replace("S", "")
    folder = language_models.saved(tmp_path / "t5", generative.t5(layers=4), tokenizer)
    sizes = ("steps=3", "batch=8", "micro_batch=4", "max_length=32", "evaluate=1")
    tiny.call(
        pretrain,
        teacher=folder,
        recipe="t5",
        out=tmp_path / "run",
        data=str(tmp_path / "written.jsonl"),
        overrides=[f"stages.0.{each}" for each in sizes],
        precision="fp32",
    )
    record = Trained.read(next((tmp_path / "run" / "stages").iterdir()) / "model")
    assert record.measure == "negative loss"
    assert record.score is not None and record.score < 0


def test_answers_are_no_labels_of_a_classifier(tmp_path: Path) -> None:
    """Unless few different ones, numbers or a column of labels say so, or the user does."""
    rows = [f"a film of {n}\tas {n} films" for n in range(20)]
    data = lines(tmp_path / "rows.tsv", "text\tanswer", *rows)
    with pytest.raises(StudentError, match=r"the column 'answer' has texts.*pretrain.*--label answer"):
        tiny.call(compress.distill, teacher=tiny.checkpoint(tmp_path / "bert"), data=data, out=tmp_path / "run")
    few = lines(tmp_path / "few.tsv", "text\tanswer", *(f"a film of {n}\t{('no', 'yes')[n % 2]}" for n in range(20)))
    assert load_task(few).task.kind == "classification"
    assert load_task(few, label="answer").task.labels == ("no", "yes")
    numbers = lines(tmp_path / "numbers.tsv", "text\tanswer", *(f"a film of {n}\t{n / 7}" for n in range(20)))
    assert load_task(numbers).task.kind == "regression"
    both = lines(tmp_path / "both.tsv", "text\tlabel\tanswer", *(f"film {n}\t{n % 2}\tas {n} films" for n in range(20)))
    assert load_task(both).task.kind == "classification"
    with pytest.raises(DataError, match="for the kind generation"):
        load_task(both, kind="generation")
    gaps = lines(tmp_path / "gaps.tsv", "text\tanswer", *rows, "a film without one\t")
    found = load_task(gaps, kind="generation")
    assert len(found.train) + len(found.validation) == 20
    assert any("left out 1 rows without text or answer" in note for note in found.notes)


def test_labels_in_the_data_are_not_written(model: FakeLanguageModel, tmp_path: Path) -> None:
    data = lines(tmp_path / "rows.tsv", "text\tlabel", *(f"film {n}\t{n % 2}" for n in range(20)))
    found = label(data, prompt(tmp_path), tmp_path / "out.jsonl")
    assert all(set(row) == {"text", "answer"} for row in found)


def test_from_the_command_line(tmp_path: Path) -> None:
    """With a real (tiny, random) GPT-2; a second time nothing is asked, and a file is not written over."""
    teacher = language_models.saved(tmp_path / "gpt2", language_models.gpt2(), language_models.byte_bpe())
    data = lines(tmp_path / "texts.txt", "a good film", "a bad film", "another one")
    words = ["label", "--teacher", teacher, "--prompt", prompt(tmp_path, PROMPT + "stop: [a, e, i, o, u, ' ']\n")]
    words += ["--data", data, "--precision", "fp32", "--gate", "warn"]
    result = command.run(*words, "--out", str(tmp_path / "out.jsonl"), "--json")
    assert result.code == 0, result.err
    printed = json.loads(result.out)
    assert (printed["texts"], printed["asked"]) == (3, 3)
    again = command.run(*words, "--out", str(tmp_path / "again.jsonl"), "--json")
    assert json.loads(again.out)["asked"] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    refused = command.run(*words, "--out", str(tmp_path / "out.jsonl"))
    assert refused.code == 2
    with pytest.raises(OutputError):
        labelled.label(teacher=teacher, prompt=prompt(tmp_path), data=data, out=tmp_path / "out.jsonl")


# Endpoints


@pytest.mark.parametrize("mode", ["echo", "top", "chat"])
def test_an_endpoint_writes_texts(mode: str, serve: Any) -> None:
    def reply(number: int, path: str, body: dict[str, Any]) -> Any:
        asked = body["messages"][0]["content"] if mode == "chat" else body["prompt"]
        ended = "long" not in asked
        text = f" about {asked}" + (". More" if ended else "")
        content = {"message": {"content": text}} if mode == "chat" else {"text": text}
        return ok({"choices": [content | {"finish_reason": "stop" if "end" in asked else "length"}]})

    server = serve(reply)
    speaker = RemoteModel(Endpoint(url=server.url, model="m", mode=mode))
    prompts = ["a film", "the end", "a long film"]
    found = ask(speaker, prompts, TextAfter(8, (".",)), console=QUIET).answers
    assert found == [
        WrittenText("about a film", True),
        WrittenText("about the end", True),
        WrittenText("about a long film", False),
    ]
    path, body, _ = server.seen[0]
    assert path.endswith("/chat/completions" if mode == "chat" else "/completions")
    assert {name: body[name] for name in ("temperature", "max_tokens", "stop")} == {
        "temperature": 0, "max_tokens": 8, "stop": ["."],
    }  # fmt: skip
    before = len(server.seen)
    assert ask(speaker, prompts, TextAfter(8, (".",)), console=QUIET).answers == found
    assert len(server.seen) == before


def test_an_unusable_completion_is_paid_for_once_and_refused(serve: Any) -> None:
    server = serve(lambda *_: ok({"choices": [{"text": None, "finish_reason": "stop"}]}))
    speaker = RemoteModel(Endpoint(url=server.url, model="m", retries=1))
    with pytest.raises(TeacherError, match="with a finish_reason"):
        ask(speaker, ["a film"], TextAfter(8, ()), console=QUIET)
    assert len(server.seen) == 1


def test_bfloat16_writes_too() -> None:
    speaker = LocalModel("tiny", "b", language_models.gpt2(), language_models.byte_bpe(), bf16=True)
    assert dict(speaker.write(TEXTS[:1], max_new_tokens=4, stop=()))[0].text
