"""Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer", arXiv:1910.10683.

Sec. 2.4    text_to_text     every task as text: "sst2 sentence: ..." -> "positive";
                             numbers in steps of 0.2 as words
App. D      prompt           what the examples look like
Sec. 3.3.4  corrupt_spans    spans of 3 tokens on average, 15 % of all, replaced by
                             sentinels; the target is the spans
(ours)      answers          a model's answers to a task's examples, as logits

Shapes: B examples, L tokens of the source, M of the target, C classes.

Deviations:
- answers scores each class by the log-likelihood of its word, so that there is always
  an answer and there are soft labels; the paper decodes greedily and counts any other
  text as wrong. Numbers are decoded, as in the paper.
- rows to corrupt are whole sentences of one document; the authors' code joins texts,
  and cuts them every 568 tokens.
- the target ends with one more sentinel, as in Fig. 2; that of their code does not.
- corrupt_spans draws the lengths of the spans uniformly from all ways to divide the
  noise, like the authors' code, but anew for each batch; theirs does so once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.arrays import Floats
from compress.data.collate import Collate
from compress.data.constants import IGNORE_INDEX
from compress.data.encoder import encoder_of
from compress.data.masking import Words
from compress.data.task import Task
from compress.errors import DataError
from compress.tensors import TensorDict, Tensors
from compress.training.reads import Fraction

ROWS_PER_TARGET = 1000
LENGTH_GRID = 0.2
"""STS-B's scores are rounded to this (Sec. 2.4)."""
NO_NUMBER = -1.0
"""The value of a text that is not a number (authors' code)."""


def number_text(value: float) -> str:
    """Write a number to the nearest 0.2 with one decimal: 3.84 -> "3.8"."""
    return f"{round(value / LENGTH_GRID) * LENGTH_GRID + 0.0:.1f}"  # + 0.0: no "-0.0"


def text_number(text: str) -> float:
    """Read "3.8" as 3.8; -1 for any other text."""
    try:
        return float(text)
    except ValueError:
        return NO_NUMBER


def prompt(task: Task, texts: Sequence[str], *, name: str = "") -> str:
    """Write the prompt, the task's name and each text after its column: "mrpc
    sentence1: ... sentence2: ..."."""
    parts = [f"{column}: {text}" for column, text in zip(task.text, texts, strict=True)]
    return " ".join([name, *parts] if name else parts)


def target(task: Task, label: Any) -> str:
    """Write the word, the number or the text that answers an example."""
    if task.writes:
        return str(label)
    return number_text(label) if task.numeric else task.labels[label]


def text_to_text(
    split: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    name: str = "",
) -> Iterator[dict[str, Any]]:
    """Build rows for an encoder-decoder: input_ids of the prompt, cut at `max_length`,
    and labels of the answer.

    `name` is what the prompt calls the task, `sst2` for the paper's checkpoints. Raises
    DataError for kinds of tasks whose answer is neither one word or number, nor a text.
    """
    if not task.writes:
        _check(task)
    encoder = encoder_of(tokenizer)
    for rows in split.iter(ROWS_PER_TARGET):
        sources = encoder.encode(_prompts(rows, task, name), max_length)
        targets = encoder.encode([target(task, label) for label in rows["label"]])
        for source, answer in zip(sources, targets, strict=True):
            yield {"input_ids": source["input_ids"], "labels": answer["input_ids"]}


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    split: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    name: str = "",
    batch: int = 32,
    bf16: bool = False,
) -> Floats:
    """Compute each class's log-likelihood (rows, C), or decode the number (rows, 1); in
    the split's order.

    `Task.score_rows` takes the result. It may also serve as soft labels for students of
    any family, whose `hinton.soft_targets` at temperature 1 compares with the
    normalised likelihoods. Runs on the model's device, in eval mode.
    """
    _check(task)
    generate: Any = model.generate
    device = next(model.parameters()).device
    training = model.training
    order = np.argsort(
        [-sum(map(len, texts)) for texts in zip(*_texts(split), strict=True)],
        kind="stable",
    )
    encoder = encoder_of(tokenizer)
    collate = Collate(tokenizer)
    words = [
        torch.tensor(row["input_ids"], device=device)
        for row in encoder.encode(task.labels)
    ]
    found = np.empty((len(split), task.outputs), np.float32)
    model.eval()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        source = collate(
            encoder.encode(_prompts(split[chosen], task, name), max_length)
        )
        inputs = {
            key: source[key].to(device) for key in ("input_ids", "attention_mask")
        }
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            if task.numeric:
                tokens = generate(**inputs, do_sample=False, max_new_tokens=8)
                texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
                found[chosen] = np.array([text_number(text) for text in texts])[:, None]
            else:
                found[chosen] = log_likelihoods(model, inputs, words).cpu().numpy()
    model.train(training)
    return found


def log_likelihoods(
    model: PreTrainedModel, inputs: Tensors, words: Sequence[Tensor]
) -> Tensor:
    """Sum log p(word | source) over the tokens of each word and the end token, (B, C).
    The source is encoded once."""
    encoded = model.get_encoder()(**inputs)
    columns = []
    for word_M in words:
        labels_BM = word_M.expand(len(inputs["input_ids"]), -1)
        begun_BM = model.prepare_decoder_input_ids_from_labels(labels=labels_BM)  # type: ignore[operator]
        out = model(
            encoder_outputs=encoded,
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=begun_BM,
        )
        log_p_BMV = out.logits.float().log_softmax(-1)
        columns.append(log_p_BMV.gather(2, labels_BM[:, :, None])[:, :, 0].sum(1))
    return torch.stack(columns, 1)


def corrupt_spans(
    batch: Tensors,
    words: Words,
    *,
    rate: Fraction = 0.15,
    span: float = 3.0,
    sentinel: int = 32_099,
    end: int = 1,
) -> TensorDict:
    """Replace spans of a row by sentinels; labels are sentinels with their spans, and
    one more (Sec. 3.3.4, Fig. 2).

    span       mean length of a span
    sentinel   the id of <extra_id_0>, from which the others count down
    end        the token that ends source and target

    Adds decoder_input_ids that begin with the padding token, as T5 does. Special tokens
    (the end token of a row) stay, and unknown ones are words. Draws from torch's global
    generator. Raises DataError for a sentinel that is not a special token, and for a
    row with more spans than there are sentinels.
    """
    specials = {*words.special_V.nonzero()[:, 0].tolist()}
    sources = []
    targets = []
    device = batch["input_ids"].device
    removed = specials - {words.unknown}
    inputs = (batch[name].cpu() for name in ("input_ids", "attention_mask"))
    for ids_L, mask_L in zip(*inputs, strict=True):
        tokens = [each for each in ids_L[mask_L.bool()].tolist() if each not in removed]
        source, target = _spans(tokens, rate, span, sentinel)
        if not {sentinel, target[-1]} <= specials:
            raise DataError(
                f"t5.corrupt_spans: tokens {target[-1]} to {sentinel} have to be "
                "special tokens of this tokenizer, one for each span and one more; "
                "expected the id of its <extra_id_0>, {by: t5.corrupt_spans, sentinel: "
                "ID}, and no more spans in a row than it has sentinels: shorten "
                "max_length"
            )
        sources.append([*source, end])
        targets.append([*target, end])
    input_ids = _pad(sources, words.pad, device)
    labels_BM = _pad(targets, IGNORE_INDEX, device)
    begun_BM = torch.cat(
        [labels_BM.new_full((len(targets), 1), words.pad), labels_BM[:, :-1]], 1
    )
    return {
        "input_ids": input_ids,
        "attention_mask": _pad([[1] * len(source) for source in sources], 0, device),
        "labels": labels_BM,
        "decoder_input_ids": begun_BM.where(begun_BM != IGNORE_INDEX, words.pad),
    }


def _spans(
    tokens: list[int], rate: float, span: float, sentinel: int
) -> tuple[list[int], list[int]]:
    """Split a row, which begins with kept text and ends with a span, into source and
    target."""
    noise = min(max(round(len(tokens) * rate), 1), len(tokens) - 1)
    if noise < 1:
        return tokens, [sentinel]
    count = min(max(round(noise / span), 1), len(tokens) - noise)
    source = list[int]()
    target = list[int]()
    at = 0
    for number, (kept, gone) in enumerate(
        zip(_cut(len(tokens) - noise, count), _cut(noise, count), strict=True)
    ):
        source += [*tokens[at : at + kept], sentinel - number]
        target += [sentinel - number, *tokens[at + kept : at + kept + gone]]
        at += kept + gone
    return source, [*target, sentinel - count]


def _cut(length: int, parts: int) -> list[int]:
    """Divide a length into non-empty parts, uniformly among all ways to do so."""
    cuts = (torch.randperm(length - 1)[: parts - 1] + 1).sort().values.tolist()
    return [
        after - before
        for before, after in zip([0, *cuts], [*cuts, length], strict=True)
    ]


def _pad(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(
        tensors, batch_first=True, padding_value=value
    ).to(device)


def _check(task: Task) -> None:
    if not task.one_word:
        raise DataError(
            f"t5: a {task.kind} task has no one-word answer; expected classification "
            "or regression"
        )


def _texts(rows: Any) -> list[list[str]]:
    """Return the one or two columns of texts."""
    columns = rows.column_names if isinstance(rows, Dataset) else rows
    return [list(rows[name]) for name in ("text", "text_pair") if name in columns]


def _prompts(rows: Mapping[str, Any], task: Task, name: str) -> list[str]:
    return [prompt(task, texts, name=name) for texts in zip(*_texts(rows), strict=True)]
