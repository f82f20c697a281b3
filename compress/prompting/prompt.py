"""Define prompts: how a text becomes a question to a language model, and which words
answer it. Strict YAML.

    template: |
      Review: {{ text }}
      Sentiment: {{ label }}
    labels: {negative: Negative, positive: [Positive, Good]}
    examples: 4

The template is Jinja2's, sandboxed. It reads `text`, for pairs `text_pair`, and ends
with `label`. Nothing here imports torch.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from compress.arguments import NameLike, name_of
from compress.config import loader
from compress.config.stages import Frozen
from compress.errors import PromptError, RecipeError, did_you_mean

VARIABLES = ("text", "text_pair", "label")

LabelWords = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class Example(Frozen):
    """A text and its label, shown to the model before the question."""

    text: str
    text_pair: str | None = None
    label: str


class Prompt(Frozen):
    """The question to ask, and how to interpret the answer.

    template        the template of a question, and of an example with its label
    instruction     a text that precedes everything, followed by `separator`
    labels          the task's labels, each with the words that stand for it (if
                    several: their mean probability)
    aliases         other names of these labels in the data: name in the data -> label
    examples        the number of training rows to show, with balanced labels; or the
                    examples themselves
    separator       the text between instruction, examples and question
    normalise       none: log p(answer | prompt); length: that per token; unconditional:
                    minus log p(answer | `answer_context`) (Brown et al. 2020, Sec. 2.4)
    calibrate       content_free: divide by the probabilities for content-free texts
                    (Zhao et al. 2021)
    content_free    these texts; in a pair both are replaced
    max_length      the most tokens of prompt and answer; longer texts are cut, the rest
                    of the prompt never is
    """

    name: str
    about: str = ""
    template: str
    instruction: str = ""
    labels: dict[str, LabelWords] = Field(min_length=2)
    aliases: dict[str, str] = Field(default_factory=dict)
    examples: Annotated[
        Annotated[int, Tag("count")] | Annotated[tuple[Example, ...], Tag("list")],
        Discriminator(
            lambda value: "list" if isinstance(value, list | tuple) else "count"
        ),
    ] = 0
    separator: str = "\n\n"
    normalise: Literal["length", "none", "unconditional"] = "length"
    answer_context: str = Field("Answer:", min_length=1)
    calibrate: Literal["content_free", "none"] = "content_free"
    content_free: tuple[str, ...] = Field(("N/A", "", "[MASK]"), min_length=1)
    max_length: int = Field(512, ge=16)

    @staticmethod
    def from_argument(prompt: "NameLike | Prompt | None") -> "Prompt | None":
        """Load what a function was given: a name, a path, a Prompt or None."""
        if prompt is None or isinstance(prompt, Prompt):
            return prompt
        return Prompt.load(name_of(prompt))

    @staticmethod
    def load(name: str) -> "Prompt":
        """Load `recipes/prompts/<name>.yaml`, or the .yaml file `name`. Raises
        PromptError with every problem found."""
        path = _locate(name)
        try:
            tree = loader.load_yaml(path)
        except RecipeError as error:
            raise PromptError(error.problems) from error
        if not isinstance(tree, dict):
            raise PromptError(
                [
                    f"{path.name}: expected a mapping of template and labels, found "
                    f"{type(tree).__name__}"
                ]
            )
        try:
            return Prompt.model_validate({"name": path.stem} | tree)
        except ValidationError as error:
            known = {**Prompt.model_fields, **Example.model_fields}
            raise PromptError(
                loader.explain(
                    path.name, error, lambda _: known, tags=("count", "list")
                )
            ) from error

    @field_validator("labels", "aliases", mode="before")
    @classmethod
    def _are_words(cls, value: Any) -> Any:
        """Convert names that YAML read as numbers; reject words that it read as
        booleans, such as `no`."""
        if not isinstance(value, dict):
            return value
        words = [
            *value,
            *(
                word
                for item in value.values()
                for word in (item if isinstance(item, list) else [item])
            ),
        ]
        if any(isinstance(word, bool) for word in words):
            raise ValueError(
                "an unquoted yes, no, on, off, true or false is not a string in YAML: "
                "put it in quotes"
            )
        return {str(key): item for key, item in value.items()}

    @field_validator("labels")
    @classmethod
    def _answer_one_label_each(
        cls,
        labels: dict[str, tuple[str, ...]],
    ) -> dict[str, tuple[str, ...]]:
        words = [word for several in labels.values() for word in several]
        problems = [
            f"{name} has no word that stands for it"
            for name, several in labels.items()
            if not several
        ]
        problems += [
            f"{word!r} is empty, or begins or ends with white space, which belongs to "
            "the template"
            for word in words
            if word != word.strip() or not word
        ]
        problems += [
            f"{word!r} occurs twice"
            for word in dict.fromkeys(words)
            if words.count(word) > 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return labels

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, text: str) -> str:
        try:
            used = meta.find_undeclared_variables(_environment().parse(text))
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        problems = [
            f"no variable {name!r}.{did_you_mean(name, VARIABLES)}"
            for name in sorted(used - set(VARIABLES))
        ]
        problems += [
            f"does not use {{{{ {name} }}}}"
            for name in ("text", "label")
            if name not in used
        ]
        if not problems:
            problems = _find_misplaced_label(text.rstrip(), pair="text_pair" in used)
        if problems:
            raise ValueError("; ".join(problems))
        return text.rstrip()

    @model_validator(mode="after")
    def _holds_together(self) -> "Prompt":
        problems = [
            f"aliases.{name}: no label {label!r}.{did_you_mean(label, self.labels)}"
            for name, label in self.aliases.items()
            if label not in self.labels
        ]
        if isinstance(self.examples, int):
            problems += [
                f"examples: expected a number or the examples, found {self.examples}"
            ] * (self.examples < 0)
        else:
            for at, each in enumerate(self.examples):
                if each.label not in self.labels:
                    problems.append(
                        f"examples[{at}]: no label "
                        f"{each.label!r}.{did_you_mean(each.label, self.labels)}"
                    )
                if (each.text_pair is not None) != self.pair:
                    problems.append(
                        f"examples[{at}]: {'needs a' if self.pair else 'has a'} "
                        "text_pair"
                    )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @cached_property
    def pair(self) -> bool:
        """Return True if the template asks about two texts."""
        return "text_pair" in meta.find_undeclared_variables(
            _environment().parse(self.template)
        )

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self.template)

    def render(self, text: str, text_pair: str | None, label: str) -> str:
        """Fill the template; the texts are never interpreted as templates."""
        return _fill(
            self._compiled, (text,) if text_pair is None else (text, text_pair), label
        )


def _environment() -> ImmutableSandboxedEnvironment:
    """Create an environment whose templates can only access their variables: a prompt
    may come from anywhere."""
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _fill(template: Template, texts: tuple[str, ...], label: str) -> str:
    return template.render(label=label, **dict(zip(VARIABLES, texts, strict=False)))


def _find_misplaced_label(text: str, *, pair: bool) -> list[str]:
    """Check that the label is at the end: models that read from left to right cannot
    score it elsewhere."""
    texts = ("x", "y") if pair else ("x",)
    template = _environment().from_string(text)
    try:
        question = _fill(template, texts, "").rstrip()
        answered = _fill(template, texts, "z")
    except (TemplateRuntimeError, TypeError, ArithmeticError, LookupError) as error:
        return [f"cannot be filled: {error}"]
    at_end = answered.startswith(question) and answered[len(question) :].lstrip() == "z"
    return [] if at_end else ["{{ label }} must occur once, at the end"]


def names() -> list[str]:
    """List the prompts that come with the recipes."""
    return sorted(path.stem for path in (loader.folder() / "prompts").glob("*.yaml"))


def _locate(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise PromptError([f"{name}: no such prompt file"])
        return Path(name)
    if name not in names():
        raise PromptError(
            [
                f"no prompt {name!r}.{did_you_mean(name, names())} A .yaml file also "
                "works"
            ]
        )
    return (loader.folder() / "prompts") / f"{name}.yaml"
