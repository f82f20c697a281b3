"""Describe a checkpoint, bundle, recipe, data set, run or study, and what to do with it
next."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import yaml

from compress.arguments import ModelLike, check_arguments, name_of
from compress.config import catalog, choices, loader
from compress.config.options import DataOptions
from compress.config.recipe import Recipe
from compress.data import sources
from compress.data.objects import data_path
from compress.errors import (
    ArgumentError,
    BundleError,
    CompressError,
    DamagedError,
    RecipeError,
    TeacherError,
    did_you_mean,
)
from compress.exporters import manifest as manifests
from compress.exporters.manifest import Manifest
from compress.io import CHECKSUMS, JsonObject, load_json, verify
from compress.models import checkpoints, gguf_file
from compress.models.checkpoints import ALIASES, EMBEDDED_MODEL
from compress.models.folder import (
    ADAPTER,
    CONFIG,
    MODULES,
    ModelFolder,
    identify_kind,
    read_tensor_infos,
)
from compress.models.sentence_folder import SentenceFolder
from compress.provenance import option_of, predict_command, shell_command
from compress.records.inspection import InspectedForm, Inspection
from compress.records.run_report import REPORT, Report
from compress.records.search_report import SEARCH_RECORD, SearchReport
from compress.slicing.shape import sizes_of
from compress.training.run import continuation

YAML = (".yaml", ".yml")
STUDY_FILE = "search.yaml"
RUN = "run.json"
TASKS: Final = {
    "ForSequenceClassification": "classes or a number of a text",
    "ForTokenClassification": "a tag for each word",
    "ForQuestionAnswering": "a span that answers a question",
    "ForMaskedLM": "masked words",
    "LMHeadModel": "the next word",
    "ForCausalLM": "the next word",
    "ForConditionalGeneration": "text for text",
    "Model": "nothing: an encoder without a head",
    "Encoder": "nothing: an encoder without a head",
}
"""Phrases for what a checkpoint's head predicts, by the suffix of its class name."""


@check_arguments
def inspect(
    thing: ModelLike,
    *,
    form: InspectedForm | None = None,
    teacher: ModelLike | None = None,
    columns: DataOptions = DataOptions(),
) -> Inspection:
    """Describe a thing, without running or changing it.

    thing    a path; or the name of a recipe, of the embedded data `intents` or teacher
             `minilm`, an alias or a hub id
    form     what it is, if the name has several meanings; None: data, teacher or
             recipe, in this order
    teacher  for data: the teacher whose tokenizer is tried on its texts
    columns  for data: its columns and kind of task, if they should not be detected

    Damage is listed in the `problems` of the result. For a hub id only the config is
    fetched. Raises a CompressError for anything else, or if it cannot be read."""
    name = name_of(thing)
    form = form or detect_form(name)
    if form == "data":
        found = inspect_data(
            name,
            None if teacher is None else name_of(teacher),
            columns,
        )
    elif teacher is not None:
        raise CompressError(
            f"--teacher: is for data, but {name} is a {form}; leave it out"
        )
    else:
        columns.refuse()
        found = _INSPECTORS[form](name)
    facts = {
        key: value for key, value in found.facts.items() if value not in (None, "")
    }
    meanings: dict[InspectedForm, bool] = {
        "recipe": name in loader.names(),
        "checkpoint": name in ALIASES or name == EMBEDDED_MODEL,
    }
    others = [
        f"{name} is also the name of a {other}: "
        f"{shell_command('inspect', name, '--as', other)}"
        for other, exists in meanings.items()
        if exists and form not in (other, "data")
    ]
    return replace(found, facts=facts, notes=(*others, *found.notes))


def detect_form(name: str) -> InspectedForm:
    """Detect what a path or name is."""
    path = Path(name).expanduser()
    if gguf_file.find(path):
        return "checkpoint"
    if path.is_dir():
        marks: Mapping[str, InspectedForm] = {
            STUDY_FILE: "study",
            RUN: "run",
            manifests.MANIFEST_FILE: "bundle",
            manifests.FORMER: "bundle",
            CONFIG: "checkpoint",
            MODULES: "checkpoint",
            ADAPTER: "checkpoint",
        }
        return next(
            (form for mark, form in marks.items() if (path / mark).is_file()), "data"
        )
    if path.is_file() and path.suffix not in YAML:
        return "data"
    embedded = {*sources.EMBEDDED_DATA, *sources.SUITES}
    meanings: tuple[tuple[bool, InspectedForm], ...] = (
        (
            name.partition("/")[0] in embedded or re.match(r"\w+=", name) is not None,
            "data",
        ),
        (name == EMBEDDED_MODEL, "checkpoint"),
        (
            path.suffix in YAML
            or name in loader.names()
            or name == choices.AUTO_RECIPE,
            "recipe",
        ),
        (
            name in ALIASES or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None,
            "checkpoint",
        ),
    )
    for fits, form in meanings:
        if fits:
            return form
    hint = (
        ""
        if "/" in name
        else did_you_mean(
            name, [*loader.names(), *ALIASES, *sources.EMBEDDED_DATA, EMBEDDED_MODEL]
        )
    )
    raise CompressError(
        f"{name}: no such file or folder here, and no recipe, teacher or embedded data "
        f"of this name.{hint}"
    )


def _licence(folder: Path) -> str | None:
    """Read the licence of a folder: from the front matter of its README.md, or the
    first line of its LICENSE."""
    card = checkpoints.describe_origin("", folder)
    if found := card.get("license_name") or card.get("license"):
        return found if isinstance(found, str) else ", ".join(found)
    for file in sorted(folder.glob("LICEN[CS]E*")):
        text = file.read_text(encoding="utf-8", errors="replace").strip()
        return text.partition("\n")[0] or None
    return None


def _files(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _verify(folder: Path) -> tuple[bool | None, tuple[str, ...]]:
    """Compare a folder with its checksums, or return None if it has none."""
    if not (folder / CHECKSUMS).is_file():
        return None, ()
    try:
        verify(folder)
    except DamagedError as error:
        return False, tuple(f"{folder}: {problem}" for problem in error.problems)
    return True, ()


def _scores(report: Report) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {
            "name": row.name,
            "role": row.role,
            report.metric: report.score(row),
            "parameters": row.parameters,
            "MB": row.file_mb,
            "ms": None if (time := report.latency(row)) is None else time.p50_ms,
        }
        for row in report.rows
    )


def inspect_checkpoint(name: str) -> Inspection:
    """Read a checkpoint's config and the headers of its weight files."""
    if (Path(name) / ADAPTER).is_file():
        identify_kind(Path(name))  # says what to do with it
    folder = checkpoints.config_folder(name)
    source = ModelFolder(folder)
    config = source.config
    notes = list[str]()
    problems = list[str]()
    with _gather(problems):
        source.check()
    is_local = Path(name).exists() or name == EMBEDDED_MODEL
    weights = None
    if is_local or list(folder.glob("*.safetensors")):
        with _gather(problems):
            weights = source.weights(allow_pickle=True)
    else:
        notes.append(
            "its weights are not on this machine; they are fetched when needed"
        )
    if weights is not None and weights.pickled:
        notes.append(
            f"{weights.files[0].name}: pickled weights, which can run code when "
            "loaded; --allow-pickle accepts them"
        )
        weights = None
    facts: JsonObject = {"family": config.get("model_type")}
    labels: tuple[str, ...] = ()
    with _gather(problems):
        facts["class"], facts["predicts"] = _describe_head(
            source, with_weights=weights is not None and not problems
        )
        if facts["predicts"] in (
            TASKS["ForSequenceClassification"],
            TASKS["ForTokenClassification"],
        ):
            labels = source.labels()
    facts |= sizes_of(config)
    if weights is not None:
        infos = read_tensor_infos(weights).values()
        # F32, BF16, F8_E4M3; not integers such as positions
        floats = [info for info in infos if "F" in info.format]
        facts |= {
            "parameters": sum(prod(info.shape) for info in floats),
            "number formats": ", ".join(sorted({info.format for info in floats})),
        }
    verified, damaged = _verify(folder)
    sizes = (
        f"{facts[each]} {unit}"
        for each, unit in (("layers", "layers"), ("hidden", "wide"))
        if each in facts
    )
    return Inspection(
        thing=name,
        form="checkpoint",
        path=str(folder),
        licence=_licence(folder),
        facts=facts,
        title=f"a transformers checkpoint: {', '.join((str(facts['family']), *sizes))}",
        labels=labels,
        files=_files(folder),
        verified=verified,
        problems=(*problems, *damaged),
        notes=tuple(notes),
        next=(
            shell_command("students", name),
            shell_command("distill", "--teacher", name, "--data", "intents", "--plan"),
            shell_command("export", name, "--out", f"exported/{Path(name).name}"),
        ),
    )


@contextmanager
def _gather(problems: list[str]) -> Iterator[None]:
    """Add a raised TeacherError to the problems, once."""
    try:
        yield
    except TeacherError as error:
        if str(error) not in problems:
            problems.append(str(error))


def _describe_head(source: ModelFolder, *, with_weights: bool) -> tuple[str, str]:
    """Return the class that was saved, and what its head predicts; '' if unknown.

    A class of transformers is known by its name; else the tensors are compared with the
    family's classes, if the weights are here, which takes some seconds. Raises
    TeacherError for damaged files, and for an unknown head.
    """
    if source.kind == "sentence_encoder":
        SentenceFolder.read(source.path)  # raises
        return source.architecture or "?", "vectors of texts"
    name = source.architecture
    if with_weights and not _is_class(str(source.config.get("model_type")), name):
        from compress.models.loader import load_config
        from compress.models.saved_head import explain_unknown_head, find_head

        head = find_head(source, load_config(source.path))
        if head.part == "unknown":
            raise TeacherError(explain_unknown_head(source, head))
        name = head.name
    predicts = (what for end, what in TASKS.items() if name.endswith(end))
    return name or "?", next(predicts, "")


def _is_class(family: str, name: str) -> bool:
    """Check whether transformers, which is not imported, defines a class in the modules
    of a family."""
    spec = importlib.util.find_spec("transformers")
    if not name or spec is None or spec.origin is None:
        return False
    modules = (Path(spec.origin).parent / "models" / family.replace("-", "_")).glob(
        "modeling_*.py"
    )
    return any(
        f"\nclass {name}(" in module.read_text(encoding="utf-8") for module in modules
    )


def inspect_bundle(name: str) -> Inspection:
    """Read a bundle's manifest and report, and check every file against its hash."""
    folder = Path(name).expanduser()
    path = manifests.find_bundle(folder) or folder
    made = Manifest.read(path)
    problems = []
    try:
        made.check(path)
    except BundleError as error:
        problems = str(error).split("\n")[:-1]
    task = made.task
    report = Report.from_json(path / REPORT) if (path / REPORT).is_file() else None
    facts: JsonObject = {
        "family": made.model_type,
        "parameters": made.parameters or None,
        "tokens": made.max_length,
    }
    what: str = made.kind
    labels: tuple[str, ...] = ()
    if task is not None:
        what = task.kind
        labels = task.labels
        facts |= {
            "task": task.kind,
            "text": ", ".join(task.text),
            "metric": task.metric,
        }
    files = {each: stamp.bytes for each, stamp in made.files.items()}
    next_ = list(_next_of_bundle(path, made, report))
    scores: tuple[Mapping[str, Any], ...] = ()
    if report is not None:
        scores = _scores(report)
        facts |= {
            "recipe": report.recipe,
            "teacher": report.teacher,
            "data": report.data,
            "date": report.date,
        }
        facts |= {
            f"certificate of {each.artefact}": each.reason
            for each in report.certificates
        }
    facts["made with"] = ", ".join(
        f"{package} {number}" for package, number in made.versions.items()
    )
    return Inspection(
        thing=name,
        form="bundle",
        path=str(path),
        licence=_licence(path),
        facts=facts,
        title=f"a bundle: {made.model_type}, {made.parameters / 1e6:.1f} M parameters, "
        f"{what}",
        labels=labels,
        scores=scores,
        files=files,
        verified=not problems,
        problems=tuple(problems),
        next=tuple(next_) if not problems else (),
    )


def _next_of_bundle(path: Path, made: Manifest, report: Report | None) -> Iterator[str]:
    if made.kind != "generative":
        yield shell_command("bench", path)
    if made.task is not None:
        yield predict_command(path, pair=made.task.pair)
        yield shell_command(
            "export",
            path,
            "--for",
            "text",
            "--out",
            f"exported/{path.name}",
        )
    if report is not None and report.rows:
        yield shell_command("report", path, "--html", "choice.html")
    if report is not None and (data := option_of(report.command, "--data")):
        yield shell_command("quantize", path, "--data", data)
        yield shell_command("trim", path, "--data", data, "--out", f"{path}-trimmed")


def inspect_run(name: str) -> Inspection:
    """Read a run's settings, its finished stages, and the scores of its bundle."""
    folder = Path(name).expanduser()
    settings = load_json(
        folder / RUN,
        "The run cannot be identified without it: start again in another --out",
    )
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    done = list[str]()
    problems = list[str]()
    for result in sorted(folder.glob("stages/*/model")):
        verified, damaged = _verify(result)
        problems += damaged
        done += [result.parent.name] if verified is not False else []
    bundle = Inspection(thing=name, form="run", title="a run without a bundle")
    if manifests.find_bundle(folder):
        bundle = inspect_bundle(name)
    problems += bundle.problems
    finished = "finished" in settings
    stages = [str(next(iter(stage.values()))) for stage in recipe.get("stages", ())]
    facts: JsonObject = {
        "recipe": recipe.get("name"),
        **{key: settings.get(key) for key in _RUN_FACTS},
    }
    facts |= {"stages done": ", ".join(done) or "none", "stages": ", ".join(stages)}
    if (folder / "seconds.json").is_file():
        facts["minutes"] = round(
            load_json(folder / "seconds.json", "").get("seconds", 0) / 60, 1
        )
    next_ = list(bundle.next)
    if finished:
        state = f"finished on {settings['finished']}"
        next_.append(shell_command("clean", folder, "--dry-run"))
    else:
        state = "not finished"
        next_.insert(0, continuation(folder))
    read = [settings.get(key) for key in ("data", "corpus")]
    title = (
        f"a run, {state}: {settings.get('teacher')} on "
        f"{' and '.join(map(str, filter(None, read)))}"
    )
    return Inspection(
        thing=name,
        form="run",
        path=str(folder),
        title=title,
        licence=bundle.licence,
        facts=facts,
        labels=bundle.labels,
        scores=bundle.scores,
        files=bundle.files,
        problems=tuple(problems),
        verified=not problems if done or problems or bundle.files else None,
        notes=()
        if finished
        else ("it can be continued; finished stages are not trained again",),
        next=tuple(filter(None, next_)),
    )


_RUN_FACTS: Final = (
    "teacher",
    "data",
    "corpus",
    "seed",
    "precision",
    "command",
    "finished",
)
"""Fields of run.json to show."""


def inspect_study(name: str) -> Inspection:
    """Read the results of a search so far."""
    folder = Path(name).expanduser()
    settings = load_json(
        folder / RUN,
        "The search cannot be identified without it: start again in another --out",
    )
    facts: JsonObject = {key: settings.get(key) for key in _RUN_FACTS}
    resume = "" if "finished" in settings else continuation(folder)
    next_ = [resume] if resume else []
    study = Inspection(
        thing=name,
        form="study",
        path=str(folder),
        title="a search without trials yet",
        facts=facts,
        next=tuple(next_),
    )
    if not (folder / SEARCH_RECORD).is_file():
        return study
    report = SearchReport.from_json(folder / SEARCH_RECORD)
    facts |= {
        "device": f"{report.device}, {report.setting}",
        "objectives": ", ".join(report.objectives),
        "budgets": ", ".join(
            f"{objective} {limit:g}" for objective, limit in report.budgets.items()
        )
        or "none",
        "trials": ", ".join(
            f"{count} {state}" for state, count in report.counts().items()
        ),
        "teacher's score": report.teacher_score,
        "winner": report.winner,
    }
    front = [report.point(number) for number in report.front]
    scores = tuple(
        {
            "name": f"trial {point.number}",
            "role": "student",
            report.metric: point.score,
            "parameters": point.parameters,
            "MB": point.file_mb,
            "ms": report.ms(point),
        }
        for point in front
    )
    next_.append(shell_command("search", "show", folder))
    if (best := report.best_within()) is not None:
        number = str(best.number)
        out = f"{folder}-{number}"
        next_.append(shell_command("search", "show", folder, number, "--bundle", out))
    if (bundle := manifests.find_bundle(folder, "task")) is not None:
        task = Manifest.read(bundle).task
        next_.append(predict_command(bundle, pair=task is not None and task.pair))
    state = "finished" if "finished" in settings else "not finished"
    return replace(
        study,
        facts=facts,
        scores=scores,
        notes=report.notes,
        next=tuple(next_),
        title=f"a search, {state}: {report.title}",
    )


def inspect_recipe(name: str) -> Inspection:
    """Load a recipe, or a table that chooses one."""
    if choices.is_table(name):
        table = choices.Choices.load(name)
        lines = {
            f"{number}. {each.recipe}": each.because
            for number, each in enumerate(table.choices, 1)
        }
        return Inspection(
            thing=name,
            form="recipe",
            path=str(choices.table_path(name)),
            facts=lines,
            title="a table that chooses a recipe: the first line that fits",
            next=(shell_command("recipes", name), shell_command("recipes")),
        )
    recipe = Recipe.load(name)
    path = loader.locate(name)
    text_alone = recipe.stages[-1].head != "task" if recipe.training else False
    facts = {
        "purpose": catalog.PURPOSES[catalog.purpose(recipe)],
        "student": catalog.student(recipe),
        "needs": recipe.needs,
        "cost": recipe.cost,
        "choose it when": recipe.choose,
        "stages": ", ".join(each.name for each in recipe.stages),
        "paper": f"{recipe.paper.authors} {recipe.paper.year}: {recipe.paper.title}",
        "address": recipe.paper.url,
    }
    teacher = ["--teacher", EMBEDDED_MODEL]
    use = ["distill", *teacher, "--data", "intents", "--plan"]
    if recipe.pruning:
        use = ["prune", EMBEDDED_MODEL, "--data", "intents", "--layers", "3", "--plan"]
    elif text_alone:
        out = f"runs/{path.stem}"
        use = ["pretrain", *teacher, "--corpus", "pydoc", "--out", out]
    next_ = [shell_command("recipes", name)]
    if recipe.pruning or _starts(name, text_alone=text_alone):
        next_.append(shell_command(*use, "--recipe", name))
    return Inspection(
        thing=name,
        form="recipe",
        path=str(path),
        title=f"a recipe: {recipe.about}",
        facts=facts,
        next=tuple(next_),
    )


def _starts(name: str, *, text_alone: bool) -> bool:
    """Check whether the embedded teacher and data are all that a recipe needs."""
    from compress.commands import preflight
    from compress.jobs.request import ForecastArguments, ForecastPretrainingArguments

    out = Path("runs", name)
    try:
        if text_alone:
            text = ForecastPretrainingArguments(
                teacher=EMBEDDED_MODEL, recipe=name, corpus="pydoc"
            )
            preflight.pretrain_request(text, out)
        else:
            task = ForecastArguments(
                teacher=EMBEDDED_MODEL, recipe=name, data="intents"
            )
            preflight.distill_request(task, out)
    except (ArgumentError, RecipeError):
        return False
    return True


def inspect_data(name: str, teacher: str | None, columns: DataOptions) -> Inspection:
    """Load a task's splits, describe them, and try a teacher's tokenizer on them."""
    sources.check(data_path(name), columns.text, columns.label)
    if teacher is not None:
        checkpoints.find_place(teacher)
    from compress.data import audit, load_task  # datasets and pyarrow

    data = load_task(name, **asdict(columns), unlabelled=True)
    splits, overlaps = audit.describe_splits(data)
    coverage = None
    if teacher is not None:
        from compress.models.loader import load_tokenizer

        tokenizer = load_tokenizer(checkpoints.config_folder(teacher))
        coverage = audit.measure_coverage(data, tokenizer, teacher)
    place = sources.local(name) if not re.match(r"\w+=", name) else Path(name)
    task = data.task
    facts = {
        "task": task.kind,
        "text": ", ".join(task.text),
        "label": task.label,
        "metric": task.metric,
        "classes": len(task.labels) or None,
    }
    given = list[str]()
    for option, value in asdict(columns).items():
        for each in [value] if isinstance(value, str) else value or ():
            given += [f"--{option}", each]
    words = ["distill", "--teacher", teacher or EMBEDDED_MODEL]
    if task.writes:
        words = ["pretrain", "--teacher", teacher or "t5-small", "--recipe", "t5"]
    train = shell_command(*words, "--data", name, *given)
    next_ = [f"{train} --plan", train]
    if not teacher:
        next_.append(
            shell_command(
                "inspect",
                name,
                "--teacher",
                EMBEDDED_MODEL,
                *given,
            )
        )
    licence = _licence(place) if place.is_dir() else None
    if name in sources.EMBEDDED_DATA:
        licence = "Apache-2.0"
    return Inspection(
        thing=name,
        form="data",
        path=str(place) if place.exists() else None,
        title=f"data: {task.kind} of "
        f"{', '.join(f'{each.rows:,} {each.name}' for each in splits)} rows",
        licence=licence,
        facts=facts,
        labels=task.labels,
        splits=splits,
        overlaps=overlaps,
        coverage=coverage,
        notes=data.notes,
        next=tuple(next_),
    )


_INSPECTORS: Final = {
    "checkpoint": inspect_checkpoint,
    "bundle": inspect_bundle,
    "recipe": inspect_recipe,
    "run": inspect_run,
    "study": inspect_study,
}
