"""Compose the command that fits what the user has and wants, and explain its parts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from compress.arguments import MINUTES, FileName, ModelLike, NameLike, check_arguments, name_of
from compress.commands import preflight
from compress.config import choices, loader
from compress.data import sources
from compress.errors import CompressError
from compress.models import checkpoints
from compress.outputs import check_new_file, output_file
from compress.provenance import command_line, shell_command

SCHEMA: Final = "compress.init/1"
Goal = Literal["score", "size", "speed", "latency"]
RECIPES: Final = {"score": choices.AUTO, "size": "tinybert", "speed": "prune-taylor", "latency": "width-depth"}
"""The recipe or the space for each goal."""
ABOUT: Final = {
    "score": "fine-tunes the teacher if it has no head for the task, trains a student, ships and measures it; "
    "the recipe is chosen automatically, and the reason is printed",
    "size": "fine-tunes the teacher if it has no head for the task, trains a thin student of 4 layers, ships and "
    "measures it",
    "speed": "prunes what matters least from the teacher until its int8 file is twice as fast, lets it recover, ships "
    "and measures it",
    "latency": "trains one supernet of the teacher, scores its subnets, and distils the best one within the budget",
}


@dataclass(frozen=True)
class Proposal:
    """A proposed command with its explanation.

    command  the command; plan: the one that forecasts how long it takes ('' if there is none)
    parts    parts of the command -> their explanation
    after    commands for the result
    file     the file of settings that was written; None if there is none
    """

    command: str
    plan: str
    parts: dict[str, str]
    after: tuple[str, ...]
    file: str | None = None

    def to_json(self) -> str:
        """Return a JSON object: the schema, then the fields."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False, indent=1)


@check_arguments
def init(
    *,
    teacher: ModelLike = checkpoints.EMBEDDED,
    data: NameLike = "intents",
    goal: Goal = "score",
    latency_ms: float | None = None,
    minutes: Annotated[float | None, MINUTES] = None,
    device: str = "local",
    file: FileName | None = None,
) -> Proposal:
    """Propose the command for what the user has and wants. Nothing is run, and only `file` is written.

    teacher, data  as for distill; checked to exist, not read
    goal        score: as much of the teacher's score as possible; size: a small file; speed: twice the teacher's;
                latency: the best student within `latency_ms` for one text on the device
    minutes     about how long everything may take
    device      where it will run, as for bench; `speed` and `latency` are measured there
    file        a new file to write the goal's recipe (or space) to, for editing

    Raises a CompressError for a teacher or data that do not exist, for invalid numbers, and if the file exists.
    """
    teacher, data = name_of(teacher), name_of(data)
    if (goal == "latency") != (latency_ms is not None):
        raise CompressError("latency_ms: give it with the goal latency, and only then; as in --goal 4, in milliseconds")
    if latency_ms is not None and not latency_ms > 0:
        raise CompressError(f"--goal {latency_ms:g}: expected more than 0 milliseconds")
    checkpoints.check(teacher)
    sources.check(data)
    settings = None if file is None else _write(Path(file), goal)
    recipe = settings or RECIPES[goal]
    out = preflight.choose_out(recipe, data)
    verb = {"score": "distill", "size": "distill", "speed": "prune", "latency": "search"}[goal]
    words, parts = [verb], {verb: ABOUT[goal]}

    def add(option: str, value: str, why: str) -> None:
        words.extend((option, value))
        parts[f"{option} {value}"] = why

    if verb == "prune":
        words.append(teacher)
    else:
        add("--teacher", teacher, "what the student learns from")
    add("--data", data, f"what it is trained and scored on; {shell_command('inspect', data)} shows what is in it")
    if settings or goal in ("size", "speed"):
        option = "--space" if goal == "latency" else "--recipe"
        add(option, recipe, "the numbers, each with its source" + ("; change them there" if settings else ""))
    if goal == "speed":
        add("--speedup", "2", "over the teacher's own int8 file, both measured")
    if latency_ms is not None:
        add("--max-latency-ms", f"{latency_ms:g}", "for one text, with the int8 file that ships")
    if goal in ("speed", "latency") and device != "local":
        add("--device", device, "where latency is measured")
    if minutes is not None:
        add("--minutes", f"{minutes:g}", "for everything, about")
    add("--out", str(out), "the folder of the run; --resume continues it after an interruption")
    command = shell_command(*words)
    bench = () if device == "local" else ("--device", device, *(("--lan",) if device == "browser" else ()))
    after = (
        shell_command("predict", str(out), "a text"), shell_command("bench", str(out), *bench),
        shell_command("export", str(out), "--for", "text", "--out", f"{out}-text"),
    )  # fmt: skip
    return Proposal(command, "" if verb == "search" else f"{command} --plan", parts, after, settings)


def _write(file: Path, goal: str) -> str:
    """Copy the goal's recipe, table or space to a new file."""
    if file.suffix not in (".yaml", ".yml"):
        raise CompressError(f"--file {file}: expected a new .yaml file")
    check_new_file(file, "file", "settings.yaml")
    name = RECIPES[goal]
    source = loader.folder() / "spaces" / f"{name}.yaml" if goal == "latency" else choices.table_path(name)
    head = f"# A copy of {name} to edit. Written by: {command_line()}\n"
    with output_file(file) as partial:
        partial.write_text(head + source.read_text(encoding="utf-8"), encoding="utf-8")
    return str(file)
