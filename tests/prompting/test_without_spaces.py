"""Answers that follow without a space: languages that write none, quotes, line breaks; in one token or in several."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compress.prompting.http_model import find_listed
from compress.prompting.labels import TaskPrompt
from compress.prompting.prompt import Prompt, fit
from tests.prompting import language_models

TEXT = (
    "评论：这部电影非常好看。\n情感：好",
    "评论：情节太慢，演员不好。\n情感：不好",
    "評価：とても良い映画でした。\n感情：良い",
    'Review: never dull\nSentiment: "good"\nReview: worse than bad\nSentiment: "bad"\nSentiment:\ngood',
)
TEMPLATES = {
    "chinese": ("评论：{{ text }}\n情感：{{ label }}", {"negative": "不好", "positive": ["好", "很好看"]}, "情感："),
    "japanese": ("評価：{{ text }}\n感情：{{ label }}", {"negative": "悪い", "positive": "良い"}, "感情："),
    "a quote": ('Review: {{ text }}\nSentiment: "{{ label }}', {"negative": "bad", "positive": "good"}, 'Sentiment: "'),
    "a line break": (
        "Review: {{ text }}\nSentiment:\n{{ label }}",
        {"negative": "bad", "positive": "good"},
        "Sentiment:",
    ),
    "a space": ("Review: {{ text }}\nSentiment: {{ label }}", {"negative": "bad", "positive": "good"}, "Sentiment:"),
}


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's and Qwen's: a character of Chinese is up to three tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's first: a text begins with the mark of a word, so that an answer alone has other tokens than after a
    prompt; bytes stand for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=pieces, limit_alphabet=60, max_token_length=6, show_progress=False
    )
    made.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


def task_prompt(name: str) -> TaskPrompt:
    template, labels, _ = TEMPLATES[name]
    return TaskPrompt.from_prompt(
        Prompt(name="p", template=template, labels=labels), ("negative", "positive"), (), pair=False
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_follows_as_the_template_says(name: str) -> None:
    template, labels, end = TEMPLATES[name]
    prepared = task_prompt(name)
    prompt = prepared.render(["TEXT"])
    assert prompt.endswith(end)
    words = [word for several in labels.values() for word in ([several] if isinstance(several, str) else several)]
    between = {"a line break": "\n", "a space": " "}.get(name, "")
    assert prepared.answers == tuple(between + word for word in words)
    assert [prompt + answer for answer in prepared.answers] == [
        template.replace("{{ text }}", "TEXT").replace("{{ label }}", word) for word in words
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_scored_are_those_of_prompt_and_answer_together(kind: str, name: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    speaker = language_models.local(language_models.gpt2(), tokenizer)
    prepared = task_prompt(name)
    for text in ("这部电影非常好看", "不", "never dull", "良い映画"):
        prompt = prepared.render([text])
        row = speaker._tokenize(0, prompt, prepared.answers)
        alone = tokenizer(prompt)["input_ids"]
        assert row.prompt == alone[: len(row.prompt)]
        for answer, tokens in zip(prepared.answers, row.answers, strict=True):
            assert tokens
            assert row.prompt + tokens == tokenizer(prompt + answer)["input_ids"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_cases_that_differ_from_tokens_of_the_answer_alone_are_among_them(kind: str) -> None:
    """A mark that only a text's beginning has, characters of several tokens, and a token across the prompt's end, from
    which all answers are scored then."""
    tokenizer: Any = TOKENIZERS[kind]()
    speaker = language_models.local(language_models.gpt2(), tokenizer)
    prepared = task_prompt("chinese")
    row = speaker._tokenize(0, prepared.render(["很"]), prepared.answers)
    several = [tokens for tokens in row.answers if len(tokens) > 1]
    assert several
    apart = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in prepared.answers]
    assert kind == "byte-level" or row.answers != apart
    prompt = "Sentiment: go"
    joined = [tokenizer(prompt + answer)["input_ids"] for answer in ("od", "!")]
    alone = tokenizer(prompt)["input_ids"]
    assert joined[0][: len(alone)] != alone, "the case that is meant"
    across = speaker._tokenize(0, prompt, ("od", "!"))
    assert len(across.prompt) < len(alone)
    assert [across.prompt + tokens for tokens in across.answers] == joined


def test_a_list_of_tokens_knows_a_longer_answer_by_its_first() -> None:
    """Unless that begins another answer too; a whole answer counts alone."""
    import math

    listed = [("正", math.log(0.5)), ("负", math.log(0.2)), ("▁", math.log(0.1))]
    assert [math.exp(p) for p in find_listed(listed, ("正面", "负面")).log_p] == pytest.approx([0.5, 0.2])
    assert find_listed(listed, ("正面", "负面")).absent == 0
    shared = find_listed([("very", math.log(0.6)), ("bad", math.log(0.3))], (" very good", " very bad", " bad"))
    assert shared.absent == 2
    assert math.exp(shared.log_p[2]) == pytest.approx(0.3)
    assert shared.log_p[0] == shared.log_p[1]
    both = find_listed([("good", math.log(0.4)), ("go", math.log(0.3))], (" good", " bad"))
    assert math.exp(both.log_p[0]) == pytest.approx(0.4)


def test_a_text_without_spaces_is_cut_where_it_must_be() -> None:
    """Not after the only space of it, far before."""
    text = "电影 " + "很长" * 100
    cut, was_cut = fit(lambda texts: texts[0], [text], len, 150, name="p")
    assert was_cut
    assert cut == text[:150]
    english, _ = fit(lambda texts: texts[0], ["one two three four"], len, 12, name="p")
    assert english == "one two"
