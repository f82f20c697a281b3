"""Prompts: what they may say, and how a text becomes a question."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from compress.config import loader
from compress.data.task import Task
from compress.errors import PromptError
from compress.prompting import prompt as prompts
from compress.prompting.labels import TaskPrompt, choose_examples, label_names
from compress.prompting.prompt import Example, Prompt

MINIMAL: dict[str, Any] = {
    "name": "p",
    "template": "Review: {{ text }}\nSentiment: {{ label }}",
    "labels": {"negative": "bad", "positive": ["good", "fine"]},
}
LABELS = ("negative", "positive")


def made(**changes: Any) -> Prompt:
    return Prompt.model_validate(MINIMAL | changes)


def written(folder: Path, text: str) -> str:
    (folder / "p.yaml").write_text(text, encoding="utf-8")
    return str(folder / "p.yaml")


def rows(count: int = 60) -> Dataset:
    """Twice as many of the first class."""
    return Dataset.from_dict(
        {"text": [f"text {i}" for i in range(count)], "label": [int(i % 3 == 0) for i in range(count)]}
    )


def asked(prompt: Prompt, *texts: str, examples: Any = ()) -> str:
    return TaskPrompt.from_prompt(prompt, LABELS, examples, pair=prompt.pair).render(texts)


def test_a_question_ends_where_the_answer_begins() -> None:
    questions = TaskPrompt.from_prompt(made(), LABELS, (), pair=False)
    assert questions.render(["a film"]) == "Review: a film\nSentiment:"
    assert questions.answers == (" bad", " good", " fine")
    assert questions.owners == (0, 1, 1)


@pytest.mark.parametrize(
    "template", ["{{ text }}\n{{ label }}\n\n", "{{ text }}{% if label %}\n{{ label }}{% endif %}"]
)
def test_the_white_space_before_the_answer_is_the_answer_s(template: str) -> None:
    questions = TaskPrompt.from_prompt(made(template=template), LABELS, (), pair=False)
    assert questions.render(["a film"]) == "a film"
    assert questions.answers[0] == "\nbad"
    assert questions.render(["spaces stay "]) == "spaces stay "


def test_instruction_and_examples_come_first() -> None:
    examples = ({"text": "dull", "label": "negative"}, {"text": "warm", "label": "positive"})
    prompt = made(instruction="Judge.\n", separator="\n--\n", examples=examples)
    assert asked(prompt, "x", examples=prompt.examples) == (
        "Judge.\n--\nReview: dull\nSentiment: bad\n--\nReview: warm\nSentiment: good\n--\nReview: x\nSentiment:"
    )


def test_a_pair_is_asked_as_two_texts() -> None:
    prompt = made(template="{{ text }} => {{ text_pair }}? {{ label }}")
    assert prompt.pair
    assert asked(prompt, "one", "two") == "one => two?"
    with pytest.raises(PromptError, match="its template asks about two texts, the task has one"):
        TaskPrompt.from_prompt(prompt, LABELS, (), pair=False)


@pytest.mark.parametrize(
    "text",
    ["{{ label }}", "{% for i in range(9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "{# gone #}", "{{", "%}<b>&"],
)
def test_texts_are_not_interpreted_as_templates(text: str) -> None:
    assert asked(made(), text) == f"Review: {text}\nSentiment:"
    shown = made(examples=({"text": text, "label": "negative"},))
    assert f"Review: {text}\nSentiment: bad\n\n" in asked(shown, "x", examples=shown.examples)


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    reaching = "{{ text.__class__.__mro__[1].__subclasses__() }} {{ label }}"
    with pytest.raises(PromptError, match="template: cannot be filled: access to attribute '__class__'"):
        Prompt.load(written(tmp_path, f"template: '{reaching}'\nlabels: {{a: x, b: y}}"))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(PromptError) as caught:
        Prompt.load(
            written(
                tmp_path,
                "template: '{{ text }} {{ labl }}'\nlabels: {b: [' x', x, x], c: []}\nexampels: 3\n"
                "examples: [{txt: b, label: c}]\nnormalise: lenght\nmax_length: ten\ncalibrate: no\n",
            )
        )
    result = "\n".join(caught.value.problems)
    assert "p.yaml: template: no variable 'labl'. Did you mean 'label'?" in result
    assert "c has no word that stands for it" in result
    assert "' x' is empty, or begins or ends with white space" in result
    assert "'x' occurs twice" in result
    assert "exampels: no such setting. Did you mean 'examples'?" in result
    assert "examples[0].txt: no such setting. Did you mean 'text'?" in result
    assert "examples[0].text: is missing" in result
    assert "normalise: Input should be 'length', 'none' or 'unconditional', found 'lenght'" in result
    assert "max_length:" in result
    assert "calibrate:" in result
    assert "valid integer, found [" not in result, "of a list, that it is no number is not said"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("template: '{{ label }}: {{ text }}'\nlabels: {a: x, b: y}", "{{ label }} must occur once, at the end"),
        ("template: '{{ text }} {{ label }} {{ label }}'\nlabels: {a: x, b: y}", "must occur once"),
        ("template: '{{ text }} {{ label'\nlabels: {a: x, b: y}", "template: line 1:"),
        ("template: '{{ label }}'\nlabels: {a: x, b: y}", "does not use {{ text }}"),
        ("template: '{{ text }} {{ label }}'\nlabels: {a: yes, b: y}", "put it in quotes"),
        ("template: '{{ text }} {{ label }}'\nlabels: {no: x, b: y}", "put it in quotes"),
        ("template: '{{ text }} {{ label }}'\nlabels: {a: x}", "at least 2"),
        ("template: '{{ text }} {{ label }}'\nlabels: {a: x, b: y}\naliases: {'1': c}", "aliases.1: no label 'c'"),
        ("template: '{{ text }} {{ label }}'\nlabels: {a: x, b: y}\nexamples: -1", "expected a number"),
        (
            "template: '{{ text }} {{ label }}'\nlabels: {a: x, b: y}\nexamples: [{text: t, text_pair: u, label: b}]",
            "examples[0]: has a text_pair",
        ),
        ("template: '{{ text }} {{ label }}'\ntemplate: x\nlabels: {a: x, b: y}", "'template' is given twice"),
        ("- a list", "expected a mapping of template and labels, found list"),
    ],
)
def test_malformed_prompts_are_explained(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"p\.yaml: ") as caught:
        Prompt.load(written(tmp_path, text))
    assert expected in str(caught.value)


def test_a_misspelled_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PromptError, match=r"no prompt 'sentimet'\. Did you mean 'sentiment'\?"):
        Prompt.load("sentimet")
    with pytest.raises(PromptError, match="no such prompt file"):
        Prompt.load("missing.yaml")


@pytest.mark.parametrize("name", ["sentiment", "topic", "entailment", "intents"])
def test_included_prompts_are_complete(name: str) -> None:
    prompt = Prompt.load(name)
    assert prompt.about
    questions = TaskPrompt.from_prompt(prompt, tuple(prompt.labels), (), pair=prompt.pair)
    assert all(answer.startswith(" ") and answer.strip() for answer in questions.answers)
    assert set(questions.owners) == set(range(len(prompt.labels)))


def test_every_included_prompt_is_tested_and_documented() -> None:
    assert prompts.names() == ["entailment", "intents", "sentiment", "summary", "topic"]
    table = (loader.folder() / "prompts" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z]+)` \|", table, flags=re.MULTILINE) == [
        "sentiment",
        "topic",
        "entailment",
        "intents",
        "summary",
    ]


def test_the_intents_prompt_is_for_the_embedded_set() -> None:
    from compress.data import load_task

    assert sorted(Prompt.load("intents").labels) == sorted(load_task("intents").task.labels)


def test_labels_must_be_the_task_s() -> None:
    assert label_names(made(), ("positive", "negative")) == ["positive", "negative"]
    assert label_names(made(aliases={"0": "negative", "1": "positive"}), ("0", "1")) == ["negative", "positive"]
    with pytest.raises(PromptError) as caught:
        label_names(made(), ("negativ", "positive"))
    assert "p: lacks the task's label 'negativ'. Did you mean 'negative'?" in caught.value.problems
    assert "the task's labels are negativ, positive" in caught.value.problems[-1]
    with pytest.raises(PromptError, match=r"labels\.neutral: the task has no such label"):
        label_names(made(labels={"negative": "a", "positive": "b", "neutral": "c"}), LABELS)
    with pytest.raises(PromptError, match="'positive' names two of the task's labels"):
        label_names(made(aliases={"negative": "positive"}), LABELS)


# Examples


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_examples_are_as_many_in_balance(count: int) -> None:
    chosen = choose_examples(made(examples=count), rows(), LABELS, seed=0)
    counts = Counter(each.label for each in chosen)
    assert len(chosen) == len({each.text for each in chosen}) == count
    assert max(counts[label] for label in LABELS) - min(counts[label] for label in LABELS) == count % 2
    assert all(each.label == LABELS[int(int(each.text.split()[1]) % 3 == 0)] for each in chosen)


def test_the_seed_chooses_them() -> None:
    first, again, other = (choose_examples(made(examples=6), rows(), LABELS, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    odd = {choose_examples(made(examples=1), rows(), LABELS, seed=seed)[0].label for seed in range(20)}
    assert odd == set(LABELS), "which label comes once more is left to chance"


def test_the_order_of_their_labels_is_random() -> None:
    orders = {tuple(e.label for e in choose_examples(made(examples=4), rows(), LABELS, seed=s)) for s in range(30)}
    assert len(orders) == 6, "all ways to place two and two"


def test_examples_that_cannot_be_chosen() -> None:
    with pytest.raises(PromptError, match="needs 25 of 'positive', which only 20 rows have"):
        choose_examples(made(examples=50), rows(), LABELS, seed=0)
    with pytest.raises(PromptError, match="cannot be chosen from rows without labels: write them out"):
        choose_examples(made(examples=2), rows().remove_columns("label"), LABELS, seed=0)
    own = made(examples=({"text": "t", "label": "negative"},))
    assert choose_examples(own, rows().remove_columns("label"), LABELS, seed=0) == own.examples


def test_examples_of_pairs_are_pairs() -> None:
    prompt = made(template="{{ text }} => {{ text_pair }}? {{ label }}", examples=2)
    pairs = rows().add_column("text_pair", [f"second {i}" for i in range(60)])
    for each in choose_examples(prompt, pairs, LABELS, seed=0):
        assert each.text_pair == f"second {each.text.split()[1]}"


def test_aliases_name_the_examples_labels() -> None:
    task = Task("classification", ("text",), "label", ("0", "1"), "accuracy")
    prompt = made(aliases={"0": "negative", "1": "positive"}, examples=4)
    assert {each.label for each in choose_examples(prompt, rows(), task.labels, seed=0)} == set(LABELS)


# What does not fit


def words(text: str) -> int:
    return len(text.split())


def fitted(prompt: Prompt, texts: tuple[str, ...], room: int) -> tuple[str, bool]:
    questions = TaskPrompt.from_prompt(
        prompt, LABELS, prompt.examples if isinstance(prompt.examples, tuple) else (), pair=prompt.pair
    )
    return questions.fit(texts, words, room)


def test_texts_are_cut_and_the_template_is_not() -> None:
    long = " ".join(f"w{i}" for i in range(50))
    assert fitted(made(), (long,), 52) == (f"Review: {long}\nSentiment:", False)
    assert fitted(made(), (long,), 10) == (f"Review: {' '.join(long.split()[:8])}\nSentiment:", True)
    assert fitted(made(), (long,), 2) == ("Review: \nSentiment:", True)


def test_examples_are_not_cut_either() -> None:
    prompt = made(examples=({"text": "one two three", "label": "negative"},))
    question, cut = fitted(prompt, ("a b c d e f",), 10)
    assert cut
    assert question == "Review: one two three\nSentiment: bad\n\nReview: a b\nSentiment:"
    with pytest.raises(PromptError, match="it takes 8 tokens, and 7 are available: use fewer or shorter"):
        fitted(prompt, ("a b c",), 7)


def test_the_longer_of_a_pair_is_cut_first() -> None:
    prompt = made(template="{{ text }} => {{ text_pair }}? {{ label }}")
    long = " ".join(f"w{i}" for i in range(50))
    question, cut = fitted(prompt, ("short one", long), 10)
    assert cut
    assert question.startswith("short one => w0 w1")
    assert words(question) == 10
    question, _ = fitted(prompt, (long, long), 11)
    first, second = question.removesuffix("?").split(" => ")
    assert first == second


def test_a_text_without_spaces_is_cut_anywhere() -> None:
    questions = TaskPrompt.from_prompt(made(), LABELS, (), pair=False)
    question, cut = questions.fit(["字" * 100], len, 40)
    assert cut
    assert len(question) == 40


def test_a_text_is_not_shown_its_own_label() -> None:
    examples = (Example(text="fine", label="positive"), Example(text="dull", label="negative"))
    questions = TaskPrompt.from_prompt(made(), LABELS, examples, pair=False)
    own, cut = questions.fit(("dull",), len, 10_000)
    assert not cut and own.count("dull") == 1 and "fine" in own
    assert questions.fit(("slow",), len, 10_000)[0].startswith(questions.head)
