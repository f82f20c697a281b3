"""Put the command together that fits what somebody has and wants, and explain its parts."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from compress.commands import preflight
from compress.config import choices, loader
from compress.config.options import LengthOptions
from compress.data import sources
from compress.errors import CompressError, did_you_mean
from compress.io import atomic_file
from compress.models import checkpoints
from compress.provenance import command_line

SCHEMA: Final = "compress.init/1"
Goal = Literal["score", "size", "speed", "latency"]
RECIPES: Final = {"score": choices.AUTO, "size": "tinybert", "speed": "prune-taylor", "latency": "width-depth"}
"""The recipe, or the space, of each goal."""
ABOUT: Final = {
    "score": "fine-tunes the teacher where it has no head for the task, trains a student, ships and measures it; "
    "a table chooses the recipe and says why",
    "size": "fine-tunes the teacher where it has no head for the task, trains a thin student of 4 layers, ships and "
    "measures it",
    "speed": "cuts from the teacher what matters least until its int8 file is twice as fast, lets it recover, ships "
    "and measures it",
    "latency": "trains one supernet of the teacher, scores its parts, and distils the best that keeps the budget",
}


@dataclass(frozen=True)
class Proposal:
    """A command, and what it says.

    command  to be pasted; plan: the one that tells first how long it takes ('' where there is none)
    parts    the words of the command -> why they are there
    after    commands for what it makes
    file     the settings that were written, to be changed; None: none
    """

    command: str
    plan: str
    parts: dict[str, str]
    after: tuple[str, ...]
    file: str | None = None

    def to_json(self) -> str:
        """Write one JSON object: schema, then the fields."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False, indent=1)


def init(
    *,
    teacher: str = checkpoints.EMBEDDED,
    data: str = "intents",
    goal: Goal = "score",
    latency_ms: float | None = None,
    minutes: float | None = None,
    device: str = "local",
    file: str | Path | None = None,
) -> Proposal:
    """Propose the command for what is there and wanted. Nothing is run, and nothing written but `file`.

    teacher, data  as for distill; they are looked for, not read
    goal        score: as much of the teacher's score as possible; size: a small file; speed: twice the teacher's;
                latency: the best student within `latency_ms`, of one text on the device
    minutes     about so many for everything
    device      where it will run, as for bench; latencies of `speed` and `latency` are measured there
    file        a new file for the recipe (or space) of the goal, to be changed

    Raises a CompressError for a teacher or data that are not there, for numbers that are none, and for a file that is
    there already.
    """
    if goal not in RECIPES:
        raise CompressError(f"--goal {goal}: no such goal.{did_you_mean(goal, get_args(Goal))}")
    if (goal == "latency") != (latency_ms is not None):
        raise CompressError("latency_ms: belongs to the goal latency, which needs it; as in --goal 4, in milliseconds")
    if latency_ms is not None and not latency_ms > 0:
        raise CompressError(f"--goal {latency_ms:g}: expected more than 0 milliseconds")
    preflight.load_recipe("tinybert", length=LengthOptions(minutes=minutes))
    checkpoints.check(teacher)
    sources.check(data)
    settings = None if file is None else _write(Path(file), goal)
    recipe = settings or RECIPES[goal]
    out = preflight.choose_out(recipe, data)
    verb = {"score": "distill", "size": "distill", "speed": "prune", "latency": "search"}[goal]
    words = [("", verb)] if verb != "prune" else [("", verb), ("", teacher)]
    parts = {verb: ABOUT[goal]}
    if verb != "prune":
        words.append(("--teacher", teacher))
        parts[f"--teacher {teacher}"] = "what the student learns from"
    words.append(("--data", data))
    parts[f"--data {data}"] = f"what it is trained and scored on; {_command('inspect', data)} shows what is in it"
    if settings or goal in ("size", "speed"):
        option = "--space" if goal == "latency" else "--recipe"
        words.append((option, recipe))
        parts[f"{option} {recipe}"] = "the numbers, each with its source" + ("; change them there" if settings else "")
    if goal == "speed":
        words.append(("--speedup", "2"))
        parts["--speedup 2"] = "over the teacher's own int8 file, both measured"
    if latency_ms is not None:
        words.append(("--max-latency-ms", f"{latency_ms:g}"))
        parts[f"--max-latency-ms {latency_ms:g}"] = "of one text, by the int8 file that ships"
    if goal in ("speed", "latency") and device != "local":
        words.append(("--device", device))
        parts[f"--device {device}"] = "where latency is measured"
    if minutes is not None:
        words.append(("--minutes", f"{minutes:g}"))
        parts[f"--minutes {minutes:g}"] = "for everything, about"
    words.append(("--out", str(out)))
    parts[f"--out {out}"] = "the folder of the run; --resume continues one that was interrupted"
    command = _command(*(word for pair in words for word in pair if word))
    there = () if device == "local" else ("--device", device, *(("--lan",) if device == "browser" else ()))
    return Proposal(
        command, "" if verb == "search" else f"{command} --plan", parts,
        (_command("predict", str(out), "a text"), _command("bench", str(out), *there),
         _command("export", str(out), "--for", "text", "--out", f"{out}-text")),
        settings,
    )  # fmt: skip


def _command(*words: str) -> str:
    return shlex.join(["compress", *words])


def _write(file: Path, goal: str) -> str:
    """Write the goal's recipe, table or space to a new file."""
    if file.suffix not in (".yaml", ".yml") or file.exists() or not file.parent.is_dir():
        raise CompressError(f"--file {file}: expected a new .yaml file in a folder that is there")
    name = RECIPES[goal]
    source = loader.folder() / "spaces" / f"{name}.yaml" if goal == "latency" else choices.table_path(name)
    head = f"# A copy of {name}, to be changed. Written by: {command_line()}\n"
    with atomic_file(file) as partial:
        partial.write_text(head + source.read_text(encoding="utf-8"), encoding="utf-8")
    return str(file)
