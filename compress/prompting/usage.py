"""Count the requests to an endpoint and the tokens that it charges for, and stop before
a limit is exceeded."""

from dataclasses import dataclass

from pydantic import BaseModel, Field, ValidationError

from compress.errors import TeacherError


class LimitError(TeacherError):
    """A limit of requests or tokens is reached; what is answered is cached."""


@dataclass
class Meter:
    """Count what is asked now, up to `max_calls` requests and `max_tokens` tokens of
    prompts and answers.

    requests    including failed ones; answers: successful ones
    prompt_tokens, completion_tokens  as the endpoint counts them
    uncounted   answers for which the endpoint counted none
    reserved    estimated tokens of requests under way, and of uncounted answers
    """

    max_calls: int | None = None
    max_tokens: int | None = None
    requests: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    reserved: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Return the figures that --json prints; none if nothing was asked."""
        names = ("requests", "prompt_tokens", "completion_tokens")
        asked = self.requests or self.prompt_tokens
        return {name: getattr(self, name) for name in names} if asked else {}

    def describe(self) -> str:
        """Describe what was asked, without a full stop."""
        text = (
            f"{self.requests:,} requests, {self.prompt_tokens:,} tokens of prompts and "
            f"{self.completion_tokens:,} of answers"
        )
        if self.uncounted:
            text += f"; the endpoint gave no `usage` for {self.uncounted:,} answers"
        return text

    def forecast(self, rows: int, length: float) -> str:
        """Forecast the requests and tokens of rows whose prompts have about `length`
        tokens each, from the rows that were tried."""
        tried = self.requests - self.uncounted
        if not self.prompt_tokens or not tried:
            return f"about {rows:,} requests, with {length * rows:,.0f} tokens of text"
        return (
            f"about {rows:,} requests, with {self.prompt_tokens / tried * rows:,.0f} "
            f"tokens of prompts and {self.completion_tokens / tried * rows:,.0f} of "
            "answers"
        )

    def reserve(self, tokens: int) -> None:
        """Count a request of at most `tokens` tokens, by estimate. Raises LimitError
        instead of exceeding a limit."""
        spent = self.prompt_tokens + self.completion_tokens + self.reserved
        for name, limit, needed in (
            ("max_calls", self.max_calls, self.requests + 1),
            ("max_tokens", self.max_tokens, spent + tokens),
        ):
            if limit is not None and needed > limit:
                raise LimitError(
                    f"the next request would exceed {name}, {limit:,}, after "
                    f"{self.describe()}. The answers are cached: to continue, run the "
                    f"same command again, with a larger {name} if this one is too small"
                )
        self.requests += 1
        self.reserved += tokens

    def settle(self, tokens: int, answer: bytes) -> None:
        """Count an answer, and the tokens that the endpoint charges for it, instead of
        the reserved ones if it says so."""
        self.answers += 1
        try:
            counted = _Billed.model_validate_json(answer).usage
        except ValidationError:
            counted = None
        if counted is None:
            self.uncounted += 1
            return
        self.reserved -= tokens
        self.prompt_tokens += counted.prompt_tokens
        self.completion_tokens += counted.completion_tokens


class _Charged(BaseModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(0, ge=0)


class _Billed(BaseModel):
    usage: _Charged | None = None
