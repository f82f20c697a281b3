"""Tiny language models with tokenizers trained here, and a fake one with scripted answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from compress.prompting.answers import Likelihood, WrittenText, cut_at
from compress.prompting.local_model import LocalModel
from tests import generative

TEXT = (
    "Review: a gorgeous, witty film that never is dull\nSentiment: Positive",
    "Review: the plot was slow and the actors were worse than bad\nSentiment: Negative",
    "Question: is it good or bad? Answer: very good, true or false",
)


def byte_bpe(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """As GPT-2's: bytes, a space belongs to the word after it, one special token, none added by itself."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def pieces() -> PreTrainedTokenizerFast:
    """As T5's: words begin with a mark, and a text ends in </s>."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/[]?!.,:"),
        show_progress=False,
    )
    made.train_from_iterator(TEXT * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def gpt2(*, seed: int = 0, positions: int = 256) -> Any:
    return generative.gpt2(seed=seed, vocab_size=400, n_positions=positions, pad_token_id=None, initializer_range=0.3)


def t5(*, seed: int = 0) -> Any:
    return generative.t5(seed=seed, vocab_size=200)


CAUSAL: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 24, "attention_types": [[["local"], 2]]},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
}


def causal(family: str) -> Any:
    """One of other families, with other positions: rotary, learned with an offset, none but a bias, recurrent."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0,
    }  # fmt: skip
    if family in ("bloom", "mamba"):
        sizes = {name: sizes[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
    if family == "mamba":
        sizes["num_hidden_layers"] = 2
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes, **CAUSAL[family])).eval()


def local(model: Any, tokenizer: Any, *, digest: str = "tiny") -> LocalModel:
    return LocalModel("tiny", digest, model, tokenizer)


def saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass
class FakeLanguageModel:
    """A LanguageModel with likelihoods by the first known word in a prompt, which logs its prompts."""

    says: Mapping[str, Sequence[float]]
    otherwise: Sequence[float]
    tokens: Sequence[int] = ()
    name: str = "told"
    digest: str = "told"
    longest: int | None = None
    parameters: int | None = None
    asked: list[str] = field(default_factory=list)
    stop_after: int | None = None

    def count(self, text: str) -> int:
        return len(text.split())

    def askers(self, processes: int) -> int:
        return processes

    def likelihoods(self, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[tuple[int, Likelihood]]:
        for number, prompt in enumerate(prompts):
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(prompt)
            question = prompt.rpartition("\n\n")[2]
            log_p = next((each for word, each in self.says.items() if word in question), self.otherwise)
            yield number, Likelihood(tuple(log_p), tuple(self.tokens) or (1,) * len(answers))

    def write(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, WrittenText]]:
        """Answer with the last line of the prompt, of which each word is a token."""
        for number, prompt in enumerate(prompts):
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(prompt)
            words = prompt.rpartition("\n\n")[2].split()
            text, stopped = cut_at(" ".join(words[:max_new_tokens]), stop)
            yield number, WrittenText(text, stopped or len(words) < max_new_tokens)
