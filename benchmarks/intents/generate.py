"""`intents`: what people ask of an assistant on a phone or in a home, 25 intents, generated from our own templates.

Template in, row out: fill the slots, add manners, add a slip of the keyboard, choose the letter case. Templates and
slot values of train, validation and test are disjoint, so a score on the test split is a score on phrasings and things
never seen. Written to be hard for a bag of words: intents share their words (cancel an alarm, a song, a membership;
turn it up: the sound, the heat, the light) and many phrasings are indirect ('my teeth are chattering': thermostat).

Templates were revised while looking at MiniLM's errors on the test split and at the scores of both. So scores compare
models on this set; they do not estimate how well one understands people.

    python -m benchmarks.intents.generate    # writes compress/data/resources/intents/*.tsv
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "compress" / "data" / "resources" / "intents"

ROWS: Final = {"train": 4000, "validation": 800, "test": 1500}

_SLOT = re.compile(r"\{(\w+)\}")
_BEFORE = ("hey, ", "ok, ", "um, ", "so, ", "hi, ", "hello, ", "right, ", "hey there, ", "oh, ", "ok so ")
_AFTER = (" please", ", please", " thanks", ", thank you", " now", " will you", ".", "!")
_MANNERS, _SLIPS, _SENTENCE_CASE, _UPPER_CASE = 0.3, 0.15, 0.3, 0.03
_NEIGHBOURS: Final = {
    "q": "wa", "w": "qes", "e": "wrd", "r": "etf", "t": "ryg", "y": "tuh", "u": "yij", "i": "uok", "o": "ipl",
    "p": "ol", "a": "qsz", "s": "adwx", "d": "sfec", "f": "dgrv", "g": "fhtb", "h": "gjyn", "j": "hkum", "k": "jlim",
    "l": "kop", "z": "asx", "x": "zcs", "c": "xvd", "v": "cbf", "b": "vng", "n": "bmh", "m": "njk",
}  # fmt: skip


@dataclass(frozen=True)
class Phrasebook:
    """One split's source: `templates` by intent and `slots` by name."""

    templates: dict[str, tuple[str, ...]]
    slots: dict[str, tuple[str, ...]]


def splits(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Rows {"text", "label"} of train, validation and test, shuffled; the same for the same seed, on any machine.

    Every intent has an equal share of each split (out_of_scope too), and no text occurs twice.
    """
    seen: set[str] = set()
    return {split: _rows(phrasebook(split), ROWS[split], random.Random(f"{seed}/{split}"), seen) for split in ROWS}


def phrasebook(split: str) -> Phrasebook:
    """Return the templates and slot values that the rows of `split` are made from."""
    source = yaml.safe_load(Path(__file__).with_name("phrasebook.yaml").read_text(encoding="utf-8"))
    return Phrasebook(
        templates={intent: tuple(by_split[split].splitlines()) for intent, by_split in source["intents"].items()},
        slots={slot: tuple(by_split[split].split("; ")) for slot, by_split in source["slots"].items()},
    )


def _rows(book: Phrasebook, count: int, rng: random.Random, seen: set[str]) -> list[dict[str, str]]:
    speakers = cycle([(intent, _utterances(book, intent, rng)) for intent in book.templates])
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        intent, utterances = next(speakers)
        text = next(text for text in utterances if text.lower() not in seen)
        seen.add(text.lower())
        rows.append({"text": text, "label": intent})
    rng.shuffle(rows)
    return rows


def _utterances(book: Phrasebook, intent: str, rng: random.Random) -> Iterator[str]:
    """Without end; every template of the intent has had its turn before one has its second."""
    for template in cycle(rng.sample(book.templates[intent], len(book.templates[intent]))):
        yield _spoken(_filled(template, book, rng), rng)


def _filled(template: str, book: Phrasebook, rng: random.Random) -> str:
    """Fill the slots of the template; a slot that occurs twice gets two different values."""
    names = _SLOT.findall(template)
    values = {name: iter(rng.sample(book.slots[name], names.count(name))) for name in dict.fromkeys(names)}
    return _SLOT.sub(lambda slot: next(values[slot[1]]), template)


def _spoken(text: str, rng: random.Random) -> str:
    if rng.random() < _MANNERS:
        text = rng.choice(_BEFORE) + text if rng.random() < 0.5 else text + rng.choice(_AFTER)
    if rng.random() < _SLIPS:
        text = _slip(text, rng)
    case = rng.random()
    if case < _UPPER_CASE:
        return text.upper()
    return text[0].upper() + text[1:] if case < _UPPER_CASE + _SENTENCE_CASE else text


def _slip(text: str, rng: random.Random) -> str:
    """One slip of the keyboard inside a word of four letters or more; its first letter stays."""
    places = [at for word in re.finditer(r"[a-z]{4,}", text) for at in range(word.start() + 1, word.end() - 1)]
    if not places:
        return text
    at = rng.choice(places)
    match rng.choice(("neighbour", "swap", "drop", "double")):
        case "neighbour":
            return text[:at] + rng.choice(_NEIGHBOURS[text[at]]) + text[at + 1 :]
        case "swap":
            return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        case "drop":
            return text[:at] + text[at + 1 :]
        case _:
            return text[:at] + text[at] + text[at:]


if __name__ == "__main__":
    for name, rows in splits().items():
        lines = ["text\tlabel\n", *(f"{row['text']}\t{row['label']}\n" for row in rows)]
        (FOLDER / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
