"""Score answers with a language model on this machine: how likely each is to follow a
prompt; or let it write the answers.

A causal model reads the prompt once: its cached keys and values serve every answer, and
the common prefix of all prompts of a batch, such as examples, is read once for all of
them. A sequence-to-sequence model encodes the prompt once, and its decoder reads the
answers.

Shapes: B prompts, P prompt tokens, A answers, T answer tokens, M tokens attended to, V
vocabulary.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from compress.data.encoder import encoder_of
from compress.data.templates import Template
from compress.errors import TeacherError
from compress.models.checkpoints import resolve
from compress.models.folder import identify
from compress.models.key_value_cache import (
    cache_name,
    cache_of,
    counts_places,
    with_cache,
)
from compress.models.loader import (
    check_vocabulary,
    load_config,
    load_model,
    load_tokenizer,
)
from compress.models.memory import to_device
from compress.prompting.answers import Likelihood, WrittenText, cut_at

TOKENS_PER_CALL = 8192
"""Maximum tokens of a forward pass, padding included."""
TOKENISED = 1024
"""Number of prompts that are tokenised at a time."""
SHARED = 16
"""The minimum length of a common prefix that is read only once."""


def open_model(
    name: str, *, allow_pickle: bool = False, bf16: bool = False
) -> "LocalModel":
    """Open a language model by alias, folder or hub id, on the GPU if there is one.
    Raises TeacherError.

    Its weights are float32 whatever the format of its files, like every other
    teacher's; bf16 computes under autocast, so that a format in the files never changes
    the answers.
    """
    folder = resolve(name, allow_pickle=allow_pickle)
    config = load_config(folder)
    masked = (
        config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_decoder
    )
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked
    if not (config.is_encoder_decoder or causal):
        raise TeacherError(
            f"teacher {name}: a {config.model_type} model does not generate text, so "
            "it cannot be prompted. Without a prompt it is fine-tuned on the labels; "
            "prompts are for models like gpt2 or flan-t5-base"
        )
    tokenizer = load_tokenizer(folder)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = load_model(
        folder, auto, config, allow_pickle=allow_pickle, frozen=True
    ).model
    check_vocabulary(folder, tokenizer, model)
    to_device(model, "cuda" if torch.cuda.is_available() else "cpu")
    return LocalModel(
        name, f"{identify(folder)} {'bf16' if bf16 else 'fp32'}", model, tokenizer, bf16
    )


@dataclass(frozen=True)
class TokenRow:
    """A prompt and its answers as tokens; each answer has at least one."""

    number: int
    prompt: list[int]
    answers: list[list[int]]


@dataclass(frozen=True)
class LocalModel:
    """A language model on this machine, as a LanguageModel.

    digest  a hash of weights, tokenizer and precision; bf16: compute under bfloat16
            autocast
    """

    name: str
    digest: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    bf16: bool = False

    @property
    def is_seq2seq(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def longest(self) -> int | None:
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return None if positions is None else int(positions)

    @property
    def parameters(self) -> int | None:
        return self.model.num_parameters()

    def count(self, text: str) -> int:
        return len(self._tokens(text)[0]) + sum(map(len, self._ends))

    def askers(self, processes: int) -> int:
        return processes

    def likelihoods(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> Iterator[tuple[int, Likelihood]]:
        """Score the answers to each prompt, longest prompts first, so that too little
        memory shows at once."""
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        for start in range(0, len(order), TOKENISED):
            rows = [
                self._tokenize(number, prompts[number], answers)
                for number in order[start : start + TOKENISED]
            ]
            rows.sort(key=lambda row: -len(row.prompt))
            while rows:
                size = max(1, TOKENS_PER_CALL // len(rows[0].prompt))
                batch = rows[:size]
                rows = rows[size:]
                for row, log_p_A in zip(
                    batch, self._log_p(batch).tolist(), strict=True
                ):
                    yield (
                        row.number,
                        Likelihood(tuple(log_p_A), tuple(map(len, row.answers))),
                    )

    def write(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, WrittenText]]:
        """Write the likeliest token at each step, longest prompts first. Other
        generation settings are the checkpoint's."""
        tokens = [self._begin(prompt) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda number: -len(tokens[number]))
        # without a cache of keys and values there may be no mask either
        any_length = self.is_seq2seq or cache_name(self.model) != ""
        while order:
            longest = len(tokens[order[0]])
            size = max(1, TOKENS_PER_CALL // (longest + max_new_tokens))
            batch = [
                number
                for number in order[:size]
                if any_length or len(tokens[number]) == longest
            ]
            order = order[len(batch) :]
            rows = [tokens[number] for number in batch]
            yield from zip(
                batch, self._generate(rows, max_new_tokens, stop), strict=True
            )

    def _begin(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt with the special ones before it, and for a
        sequence-to-sequence model after it; at least one."""
        before, after = self._ends
        found = [*before, *self._tokens(prompt)[0], *(after if self.is_seq2seq else [])]
        return found or [self._first_token]

    @torch.inference_mode()
    def _generate(
        self, rows: Sequence[list[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> list[WrittenText]:
        """Continue rows of tokens until an end token or one of `stop`."""
        settings: Any = self.model.generation_config
        known = self.tokenizer.eos_token_id
        if settings.eos_token_id is not None:
            known = settings.eos_token_id
        ends = known if isinstance(known, list) else [known]
        ids_BP, mask_BP = _pad(rows, self.model, "right" if self.is_seq2seq else "left")
        start = 1 if self.is_seq2seq else ids_BP.shape[1]
        generate: Any = self.model.generate
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16):
            written_BL = generate(
                input_ids=ids_BP,
                attention_mask=mask_BP,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                max_length=None,
                max_new_tokens=max_new_tokens,
                eos_token_id=None if known is None else ends,
                pad_token_id=next((end for end in ends if end is not None), 0),
                stopping_criteria=StoppingCriteriaList(
                    [_StopTexts(self.tokenizer, start, stop)]
                ),
            )
        found = []
        for tokens in written_BL[:, start:].tolist():
            text_tokens = list(takewhile(lambda token: token not in ends, tokens))
            whole: Any = self.tokenizer.decode(text_tokens, skip_special_tokens=True)
            text, stopped = cut_at(whole, stop)
            ended = len(text_tokens) < len(tokens)
            found.append(WrittenText(text, ended or stopped))
        return found

    @property
    def _first_token(self) -> int:
        """The token before an empty prompt: a model needs one to predict the next."""
        bos = self.tokenizer.bos_token_id
        first: Any = self.tokenizer.eos_token_id if bos is None else bos
        if first is None:
            raise TeacherError(
                f"teacher {self.name}: its tokenizer has no token to begin an empty "
                "prompt with"
            )
        return int(first)

    def _tokens(self, *texts: str) -> list[list[int]]:
        return encoder_of(self.tokenizer).pieces(texts)

    @cached_property
    def _ends(self) -> Sequence[list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        return Template.from_tokenizer(self.tokenizer, 1).ids

    def _tokenize(self, number: int, prompt: str, answers: Sequence[str]) -> TokenRow:
        before, after = self._ends
        eos = self.tokenizer.eos_token_id
        # the decoder starts a new text: no space before the answer, and a token that
        # ends it
        if self.is_seq2seq:
            if eos is None:
                raise TeacherError(
                    f"teacher {self.name}: its tokenizer has no token that ends an "
                    "answer"
                )
            targets = [
                [*tokens, int(eos)]
                for tokens in self._tokens(*(answer.strip() for answer in answers))
            ]
            return TokenRow(
                number, [*before, *self._tokens(prompt)[0], *after], targets
            )
        # Tokens may span the end of the prompt. All answers are then scored from where
        # the first of them departs from the prompt's own tokens, so that all explain
        # the same text.
        alone, *joined = self._tokens(prompt, *(prompt + answer for answer in answers))
        shared = min(_common_prefix([alone, tokens]) for tokens in joined)
        start = before
        if not (before or shared):
            start = [self._first_token]
        return TokenRow(
            number, [*start, *alone[:shared]], [tokens[shared:] for tokens in joined]
        )

    @torch.inference_mode()
    def _log_p(self, rows: Sequence[TokenRow]) -> Tensor:
        """Compute log p of each row's answers: (B, A) float64."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16):
            if self.is_seq2seq:
                return _score_with_decoder(self.model, rows)
            if cache_name(self.model):
                return _score_with_cache(self.model, rows)
            return _score_without_cache(self.model, rows)


class _StopTexts(StoppingCriteria):
    """End each row in whose text after `start` tokens one of `stop` occurs."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: int, stop: Sequence[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.start = start
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        texts: Any = self.tokenizer.batch_decode(
            input_ids[:, self.start :], skip_special_tokens=True
        )
        stopped = [cut_at(text, self.stop)[1] for text in texts]
        return torch.tensor(stopped, device=input_ids.device)


def _score_with_decoder(model: PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
    """Encode each prompt once, and decode a slice of the answers at a time."""
    prompt_BP, mask_BP = _pad([row.prompt for row in rows], model)
    states = model.get_encoder()(
        input_ids=prompt_BP, attention_mask=mask_BP
    ).last_hidden_state
    start = torch.full(
        (len(rows), 1), int(model.config.decoder_start_token_id), device=model.device
    )
    parts = []
    for answers in _slices(rows, prompt_BP.shape[1]):
        many = len(answers[0])
        target_RT, real_RT = _pad(
            [tokens for of_row in answers for tokens in of_row], model
        )
        inputs_RT = torch.cat(
            [start.repeat_interleave(many, 0), target_RT[:, :-1]], dim=1
        )
        logits_RTV = model(
            encoder_outputs=BaseModelOutput(
                last_hidden_state=states.repeat_interleave(many, 0)
            ),
            attention_mask=mask_BP.repeat_interleave(many, 0),
            decoder_input_ids=inputs_RT,
            use_cache=False,
        ).logits
        parts.append(
            _sum_log_probabilities(logits_RTV, target_RT, real_RT).view(len(rows), many)
        )
    return torch.cat(parts, dim=1)


def _score_with_cache(model: PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
    """Read the common prefix of the prompts, then the rest of each, then the answers
    after each."""
    device = model.device
    count = len(rows)
    shared = min(
        _common_prefix([row.prompt for row in rows]),
        min(len(row.prompt) for row in rows) - 1,
    )
    if counts_places(model) and len({len(row.prompt) for row in rows}) > 1:
        shared = 0  # padding would stand between the prefix and the rest
    past = None
    seen_BM = torch.zeros((count, 0), dtype=torch.long, device=device)
    if shared >= SHARED and count > 1:
        begin_1P = torch.tensor([rows[0].prompt[:shared]], device=device)
        begun = _extend(
            model, begin_1P, torch.ones_like(begin_1P), None, last_only=True
        )
        past = cache_of(begun)
        past.batch_repeat_interleave(count)
        seen_BM = torch.ones((count, shared), dtype=torch.long, device=device)
    rest = [row.prompt[seen_BM.shape[1] :] for row in rows]
    prompt_BP, mask_BP = _pad(rest, model, "left")
    seen_BM = torch.cat([seen_BM, mask_BP], dim=1)
    out = _extend(model, prompt_BP, seen_BM, past, last_only=True)
    next_BV = out.logits[:, -1].float().log_softmax(-1)
    first_BA = torch.tensor(
        [[tokens[0] for tokens in row.answers] for row in rows], device=device
    )
    log_p_BA = next_BV.gather(1, first_BA).double()
    if all(len(tokens) == 1 for row in rows for tokens in row.answers):
        return log_p_BA
    parts = []
    for answers in _slices(rows, seen_BM.shape[1]):
        many = len(answers[0])
        tokens_RT, real_RT = _pad(
            [tokens for of_row in answers for tokens in of_row], model
        )
        parts.append(torch.zeros((count, many), dtype=torch.float64, device=device))
        if tokens_RT.shape[1] > 1:
            # a cache grows in place; the next slice needs the original
            past = copy.deepcopy(cache_of(out))
            past.batch_repeat_interleave(many)
            mask_RM = torch.cat(
                [seen_BM.repeat_interleave(many, 0), real_RT[:, :-1]], dim=1
            )
            logits_RTV = _extend(model, tokens_RT[:, :-1], mask_RM, past).logits
            parts[-1] = _sum_log_probabilities(
                logits_RTV, tokens_RT[:, 1:], real_RT[:, 1:]
            ).view(count, many)
    return log_p_BA + torch.cat(parts, dim=1)


def _score_without_cache(model: PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
    """Read the prompt again with every answer."""
    parts = []
    for at in range(len(rows[0].answers)):
        tokens_BP, mask_BP = _pad([row.prompt + row.answers[at] for row in rows], model)
        starts = torch.tensor([len(row.prompt) for row in rows], device=model.device)
        is_answer_BP = mask_BP * (
            torch.arange(tokens_BP.shape[1], device=model.device) >= starts[:, None]
        )
        options = (
            {"attention_mask": mask_BP}
            if "attention_mask" in _forward_parameters(model)
            else {}
        )
        logits_BPV = model(input_ids=tokens_BP, **options).logits
        parts.append(
            _sum_log_probabilities(
                logits_BPV[:, :-1], tokens_BP[:, 1:], is_answer_BP[:, 1:]
            )
        )
    return torch.stack(parts, dim=1)


def _extend(
    model: PreTrainedModel,
    tokens_BL: Tensor,
    mask_BM: Tensor,
    past: Any,
    *,
    last_only: bool = False,
) -> Any:
    """Read more tokens after `past`. mask_BM: the real tokens among the cached and the
    new ones (L <= M)."""
    places_BM = (mask_BM.cumsum(1) - 1).clamp_min(0)
    wanted = {
        "position_ids": places_BM[:, -tokens_BL.shape[1] :],
        "logits_to_keep": int(last_only),  # 0: all of them
    }
    known = _forward_parameters(model)
    options = {name: value for name, value in wanted.items() if name in known}
    return model(
        input_ids=tokens_BL,
        attention_mask=mask_BM,
        **with_cache(model, past),
        **options,
    )


def _sum_log_probabilities(
    logits_RTV: Tensor, tokens_RT: Tensor, real_RT: Tensor
) -> Tensor:
    """Sum log p over the real tokens, with the logits of a token at its own position:
    (R,) float64."""
    log_p_RT = (
        logits_RTV.float().log_softmax(-1).gather(2, tokens_RT[:, :, None])[:, :, 0]
    )
    return torch.where(real_RT.bool(), log_p_RT.double(), 0.0).sum(1)


def _pad(
    rows: Sequence[list[int]], model: PreTrainedModel, side: str = "right"
) -> tuple[Tensor, Tensor]:
    """Pad token ids with 0; return them and the mask of the real ones, both (rows,
    longest)."""
    texts = [torch.tensor(row, dtype=torch.long, device=model.device) for row in rows]
    real = [torch.ones_like(text) for text in texts]
    tokens = pad_sequence(texts, batch_first=True, padding_side=side)
    return tokens, pad_sequence(real, batch_first=True, padding_side=side)


def _slices(rows: Sequence[TokenRow], length: int) -> Iterator[list[list[list[int]]]]:
    """Yield slices of the rows' answers so that copies of `length` tokens for each fit
    into TOKENS_PER_CALL."""
    many = max(1, TOKENS_PER_CALL // (len(rows) * max(1, length)))
    for at in range(0, len(rows[0].answers), many):
        yield [row.answers[at : at + many] for row in rows]


def _common_prefix(rows: Sequence[list[int]]) -> int:
    """Count the tokens that all rows begin with."""
    columns = zip(*rows, strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))


def _forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
