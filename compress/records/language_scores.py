"""Hold how well language models predict held-out documents, as `perplexity.json` in a
run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERPLEXITY = "perplexity.json"
LARGEST_EXPONENT = 700.0
"""The largest exponent whose exponential still fits a float."""


@dataclass(frozen=True)
class LanguageScore:
    """Hold the score of one model.

    nats  of each document: the sum of -log p over its tokens
    """

    name: str
    parameters: int
    nats: tuple[float, ...]


@dataclass(frozen=True)
class LanguageScores:
    """Hold the scores of several models on the same documents.

    tokens  the number of predicted tokens of each document
    """

    tokens: tuple[int, ...]
    models: tuple[LanguageScore, ...]

    def mean(self, nats: Sequence[float]) -> tuple[float, float]:
        """Return the nats per token, and the standard error of that ratio over
        documents (Cochran 1977, Sampling Techniques, Eq. 6.4); the error of a single
        document is not a number."""
        count = len(self.tokens)
        mean = sum(nats) / sum(self.tokens)
        if count == 1:
            return mean, math.nan
        squares = sum(
            (sums - mean * tokens) ** 2
            for sums, tokens in zip(nats, self.tokens, strict=True)
        )
        error = math.sqrt(count / (count - 1) * squares) / sum(self.tokens)
        return mean, error

    def perplexity(self, model: LanguageScore) -> tuple[float, float]:
        """Return the perplexity of a model and its standard error, to first order."""
        mean, error = self.mean(model.nats)
        perplexity = math.exp(min(mean, LARGEST_EXPONENT))
        return perplexity, perplexity * error

    def compare(self, one: LanguageScore, other: LanguageScore) -> tuple[float, float]:
        """Return how many more nats per token `one` needs than `other`, and the
        standard error of that difference."""
        pairs = zip(one.nats, other.nats, strict=True)
        return self.mean([mine - theirs for mine, theirs in pairs])

    def summarise(self) -> list[dict[str, str | float]]:
        """Return name, parameters, nats per token with standard error, and perplexity
        of each model."""
        rows = list[dict[str, str | float]]()
        for model in self.models:
            mean, error = self.mean(model.nats)
            rows.append(
                {
                    "name": model.name,
                    "parameters": model.parameters,
                    "nats": mean,
                    "standard_error": error,
                    "perplexity": self.perplexity(model)[0],
                }
            )
        return rows

    def to_lines(self) -> list[str]:
        """State the perplexity and the size of each model, and how far the last one is
        from the others."""
        lines = [
            f"perplexity on {len(self.tokens)} held-out documents, "
            f"{sum(self.tokens):,} tokens, with standard errors over documents"
        ]
        for model in self.models:
            mean, error = self.mean(model.nats)
            perplexity, deviation = self.perplexity(model)
            lines.append(
                f"  {model.name}: {perplexity:,.2f} ± {deviation:,.2f} "
                f"({mean:.3f} ± {error:.3f} nats a token), "
                f"{model.parameters / 1e6:,.1f} million parameters, "
                f"{4 * model.parameters / 1e6:,.0f} MB as float32"
            )
        *others, last = self.models
        for model in others:
            difference, error = self.compare(last, model)
            lines.append(
                f"  {last.name} - {model.name}: {difference:+.3f} ± {error:.3f} nats "
                "a token"
            )
        return lines
