"""Define prompts: how a text becomes a question to a language model, and which words
answer it, or that the model writes the answer. Strict YAML.

    template: |
      Review: {{ text }}
      Sentiment: {{ label }}
    labels: {negative: Negative, positive: [Positive, Good]}
    examples: 4

    template: |
      {{ text }}
      TL;DR: {{ answer }}
    max_new_tokens: 64

The template is Jinja2's, sandboxed. It reads `text`, for pairs `text_pair`, and ends
with `label`, or with `answer`. Nothing here imports torch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

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

TEXT_VARIABLES = ("text", "text_pair")

LabelWords = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class Example(Frozen):
    """A text and its label, shown to the model before the question."""

    text: str
    text_pair: str | None = None
    label: str

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for text in (self.text, self.text_pair) if text is not None)


class WrittenExample(Frozen):
    """A text and the answer to it, shown to the model before the question."""

    text: str
    text_pair: str | None = None
    answer: str


class AnyPrompt(Frozen):
    """A question to ask about a text or a pair of texts.

    template        the template of a question, and of an example with its answer
    instruction     a text that precedes everything, followed by `separator`
    separator       the text between instruction, examples and question
    max_length      the maximum tokens of prompt and answer; longer texts are cut, the
                    rest of the prompt never is
    """

    answer: ClassVar[str]
    """The variable of the template that stands for the answer."""
    example: ClassVar[type[Frozen]]
    """The class of an example."""

    name: str
    about: str = ""
    template: str
    instruction: str = ""
    separator: str = "\n\n"
    max_length: int = Field(512, ge=16)

    @classmethod
    def from_tree(cls, path: Path, tree: dict[str, Any]) -> Self:
        """Check the settings in a file. Raises PromptError with every problem."""
        try:
            return cls.model_validate({"name": path.stem} | tree)
        except ValidationError as error:
            known = {**cls.model_fields, **cls.example.model_fields}
            raise PromptError(
                loader.explain(
                    path.name, error, lambda _: known, tags=("count", "list")
                )
            ) from error

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, text: str) -> str:
        variables = (*TEXT_VARIABLES, cls.answer)
        try:
            used = meta.find_undeclared_variables(_environment().parse(text))
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        problems = [
            f"no variable {name!r}.{did_you_mean(name, variables)}"
            for name in sorted(used - set(variables))
        ]
        problems += [
            f"does not use {{{{ {name} }}}}"
            for name in ("text", cls.answer)
            if name not in used
        ]
        if not problems:
            problems = cls._find_misplaced(text.rstrip(), pair="text_pair" in used)
        if problems:
            raise ValueError("; ".join(problems))
        return text.rstrip()

    @classmethod
    def _find_misplaced(cls, text: str, *, pair: bool) -> list[str]:
        """Check that the answer is at the end: models that read from left to right
        cannot score it elsewhere."""
        texts = ("x", "y") if pair else ("x",)
        template = _environment().from_string(text)
        try:
            question = _fill(template, texts, {cls.answer: ""}).rstrip()
            answered = _fill(template, texts, {cls.answer: "z"})
        except (TemplateRuntimeError, TypeError, ArithmeticError, LookupError) as error:
            return [f"cannot be filled: {error}"]
        rest = answered[len(question) :].lstrip()
        at_end = answered.startswith(question) and rest == "z"
        return [] if at_end else [f"{{{{ {cls.answer} }}}} must occur once, at the end"]

    @cached_property
    def pair(self) -> bool:
        """Return True if the template asks about two texts."""
        return "text_pair" in meta.find_undeclared_variables(
            _environment().parse(self.template)
        )

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self.template)

    def render(self, text: str, text_pair: str | None, answer: str) -> str:
        """Fill the template; the texts are never interpreted as templates."""
        texts = (text,) if text_pair is None else (text, text_pair)
        return _fill(self._compiled, texts, {self.answer: answer})

    def limit(self, longest: int | None) -> int:
        """Return `max_length`, or as many tokens as a model reads if those are
        fewer."""
        return min(self.max_length, longest or self.max_length)

    def check_texts(self, *, pair: bool) -> None:
        """Raise PromptError if rows have another number of texts than the template."""
        if pair == self.pair:
            return
        expected = "two texts" if self.pair else "one text"
        actual = "two" if pair else "one"
        raise PromptError(
            [f"{self.name}: its template asks about {expected}, the task has {actual}"]
        )

    def list_examples(
        self, examples: Sequence["Example | WrittenExample"]
    ) -> list[str]:
        """List what is wrong with the number of their texts."""
        return [
            f"examples[{at}]: {'needs a' if self.pair else 'has a'} text_pair"
            for at, each in enumerate(examples)
            if (each.text_pair is not None) != self.pair
        ]


class Prompt(AnyPrompt):
    """The question to ask, and how to interpret the answer.

    labels          the task's labels, each with the words that stand for it (if
                    several: their mean probability)
    aliases         other names of these labels in the data: name in the data -> label
    examples        the number of training rows to show, with balanced labels; or the
                    examples themselves
    normalise       none: log p(answer | prompt); length: the same per token;
                    unconditional: minus log p(answer | `answer_context`) (Brown et al.
                    2020, Sec. 2.4)
    calibrate       content_free: divide by the probabilities for content-free texts
                    (Zhao et al. 2021)
    content_free    these texts; in a pair both are replaced
    """

    answer = "label"
    example = Example

    labels: dict[str, LabelWords] = Field(min_length=2)
    aliases: dict[str, str] = Field(default_factory=dict)
    examples: Annotated[
        Annotated[int, Tag("count")] | Annotated[tuple[Example, ...], Tag("list")],
        Discriminator(
            lambda value: "list" if isinstance(value, list | tuple) else "count"
        ),
    ] = 0
    normalise: Literal["length", "none", "unconditional"] = "length"
    answer_context: str = Field("Answer:", min_length=1)
    calibrate: Literal["content_free", "none"] = "content_free"
    content_free: tuple[str, ...] = Field(("N/A", "", "[MASK]"), min_length=1)

    @staticmethod
    def from_argument(prompt: "NameLike | Prompt | None") -> "Prompt | None":
        """Load what a function was given: a name, a path, a Prompt or None."""
        if prompt is None or isinstance(prompt, Prompt):
            return prompt
        return Prompt.load(name_of(prompt))

    @staticmethod
    def load(name: str) -> "Prompt":
        """Load `recipes/prompts/<name>.yaml`, or the .yaml file `name`. Raises
        PromptError with every problem found, and for a prompt that asks for a text."""
        prompt = load_prompt(name)
        if isinstance(prompt, Prompt):
            return prompt
        raise PromptError(
            [
                f"{prompt.name}: asks for a text, not for one of some labels: compress "
                "label writes the answers, and compress pretrain --recipe t5 learns "
                "them"
            ]
        )

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
            problems += self.list_examples(self.examples)
        if problems:
            raise ValueError("; ".join(problems))
        return self


class WritingPrompt(AnyPrompt):
    """A question that the model answers with a text of its own.

    max_new_tokens  the maximum tokens of an answer
    stop            texts at whose first occurrence an answer ends: by default a line is
                    an answer
    examples        examples to show
    """

    answer = "answer"
    example = WrittenExample

    max_new_tokens: int = Field(64, ge=1)
    stop: tuple[str, ...] = ("\n",)
    examples: tuple[WrittenExample, ...] = ()

    @field_validator("stop")
    @classmethod
    def _are_texts(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty text would end every answer at once")
        return stop

    @model_validator(mode="after")
    def _have_as_many_texts(self) -> "WritingPrompt":
        problems = self.list_examples(self.examples)
        if self.max_length <= self.max_new_tokens:
            problems.append(
                f"max_length: {self.max_length} tokens leave no room for a text beside "
                f"max_new_tokens, {self.max_new_tokens}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_prompt(name: str) -> "Prompt | WritingPrompt":
    """Load `recipes/prompts/<name>.yaml`, or the .yaml file `name`: one with labels, or
    one that asks for a text. Raises PromptError with every problem found."""
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
    writes = "labels" not in tree and WritingPrompt.answer in str(tree.get("template"))
    return (WritingPrompt if writes else Prompt).from_tree(path, tree)


def _environment() -> ImmutableSandboxedEnvironment:
    """Create an environment whose templates can only access their variables: a prompt
    may come from anywhere."""
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _fill(template: Template, texts: Sequence[str], answer: Mapping[str, str]) -> str:
    return template.render(**dict(zip(TEXT_VARIABLES, texts, strict=False)), **answer)


def fit(
    render: Callable[[Sequence[str]], str],
    texts: Sequence[str],
    count: Callable[[str], int],
    limit: int,
    *,
    name: str,
) -> tuple[str, bool]:
    """Write the prompt of this name in at most `limit` tokens, as `count` counts them;
    return it and whether texts were cut.

    Texts lose their end, the longer of a pair first; template, instruction and examples
    are never cut. Raises PromptError if those parts alone are too long.
    """
    full = render(texts)
    if count(full) <= limit:
        return full, False
    overhead = count(render([""] * len(texts)))
    if overhead > limit:
        raise PromptError(
            [
                f"{name}: without any text it takes {overhead} tokens, and {limit} are "
                "available: use fewer or shorter examples, or raise max_length as far "
                "as the model reads"
            ]
        )
    # characters of each text: `low` fit, `high` do not
    low = 0
    high = max(map(len, texts))
    while high - low > 1:
        middle = (low + high) // 2
        fits = count(render([_truncate(text, middle) for text in texts])) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return render([_truncate(text, low) for text in texts]), True


LONGEST_WORD = 40
"""Maximum characters given up to cut a text after a whole word: in languages without
spaces between words, the last space may be far back."""


def _truncate(text: str, characters: int) -> str:
    """Cut a text to at most `characters`, after a whole word if there is one."""
    if len(text) <= characters:
        return text
    start = text[:characters]
    whole_words = start if text[characters].isspace() else start.rpartition(" ")[0]
    near = len(start) - len(whole_words) <= LONGEST_WORD
    return (whole_words if whole_words and near else start).rstrip()


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
