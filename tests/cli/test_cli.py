"""The command line: options, output, exit codes, and imports."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import compress
from compress import cli
from compress.cli import COMMANDS, app
from compress.commands import bench as benching
from compress.config import catalog, loader
from compress.config.options import PANELS
from compress.config.recipe import Recipe
from compress.exporters import predictor
from compress.records.bench_result import BenchResult
from compress.records.latency import DeviceError
from tests import command, unshipped
from tests.command import Shelf

OPTIONS = {
    "doctor": "--json",
    "inspect": "thing --as --teacher --text --label --kind --metric --allow-code --json",
    "distill": (
        "--teacher --recipe --data --out --corpus --prompt --set --text --label --kind --metric --seed --precision "
        "--resume --gate --vocabulary --max-drop --allow-pickle --allow-code --json --paper --effort --minutes "
        "--plan --track --keep --least --knowledge"
    ),
    "pretrain": (
        "--teacher --recipe --out --corpus --data --set --seed --precision --resume --allow-pickle --allow-code "
        "--paper --effort --minutes --plan --json --track"
    ),
    "label": (
        "--teacher --prompt --data --out --text --label --seed --precision --gate --allow-pickle --max-calls "
        "--max-tokens --batch --plan --json"
    ),
    "prune": (
        "model --data --out --recipe --layers --hidden --heads --ffn --embedding --bottleneck --max-latency-ms "
        "--speedup --max-params --device --threads --batch --seq --set --text --label --kind --metric "
        "--seed --precision --resume --gate --vocabulary --max-drop --allow-pickle --allow-code --json --paper "
        "--effort --minutes --plan --track --keep --least"
    ),
    "export": (
        "model --out --for --precision --opset --tune --device --lan --timeout --python --threads --batch --seq "
        "--assets --max-drop --data --text --label --pair --pool --normalise --max-length --allow-pickle --wide "
        "--allow-code --json"
    ),
    "quantize": (
        "bundle --data --out --method --calibration --percentile --rows --max-drop --form --target-cpu --device "
        "--lan --timeout --python --assets --text --label --set --seed --plan --wide --allow-code --json"
    ),
    "search": (
        "--teacher --data --out --space --set --max-latency-ms --speedup --max-params --max-file-mb --min-score "
        "--objective --device --lan --timeout --python --threads --batch --seq --file --max-drop --shapes --rounds "
        "--runs --anchor --sampler --trials --minutes --finalists --winners --storage --name --worker --weights --text "
        "--label --kind --metric --seed --precision --resume --gate --allow-pickle --allow-code --plan --json --track"
    ),
    "search show": "study trial --bundle --train --allow-code --wide --json",
    "trim": "model --out --data --corpus --min-count --keep --max-drop --text --label --plan --allow-code --json",
    "push": "bundle repo --public --dry-run --allow-code --json",
    "predict": (
        "bundle texts... --input --output --text --pair --against --top --vectors --prompt-name --new-tokens "
        "--precision --on-error --allow-code --json"
    ),
    "demo": "bundle --out --serve --no-open --precision --data --title --lan --assets --allow-code --json",
    "bench": (
        "bundles... --formats --data --device --precision --threads --batch --seq --rounds --runs --sustain --visitors "
        "--affinity --lan --timeout --python --native --assets --webgpu --out --wide --allow-code --json"
    ),
    "gate": (
        "old new --max-slower --max-drop --max-larger --data --text --label --precision --device --lan --timeout "
        "--python --affinity --native --assets --webgpu --threads --batch --seq --minutes --markdown --junit "
        "--allow-code --json"
    ),
    "report": "inputs... --html --at --budget-ms --max-mb --min-score --open --wide --allow-code --json",
    "recipes": "name --json",
    "students": "teacher --wide --json",
    "clean": "run --dry-run --unfinished --json",
}
SHARED = {"--quiet": "q", "--log-level": "", "--version": "V"}
"""What every command has, with its letter."""
LIGHT = """
import json, sys
from compress.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    found = {'torch', 'transformers', 'datasets', 'accelerate', 'sklearn'} & set(sys.modules)
    assert not found, (words, found)
"""


@pytest.fixture(scope="module")
def distilled(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> tuple[command.Result, Path]:
    """The result of `compress distill --json --set ...`, and the directory of its run."""
    folder = tmp_path_factory.mktemp("distilled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        unshipped.hasten(patch)
        words = shelf.distill(
            folder / "run", "--json", "--set", "stages.0.steps=2", "--set", "stages.prediction.lr=1e-3"
        )
        return command.run(*words), folder / "run"


@pytest.fixture(scope="module")
def bundle(distilled: tuple[command.Result, Path]) -> str:
    return str(distilled[1] / "bundle")


def commands() -> dict[str, Any]:
    """Every command by its name on the command line."""
    found: dict[str, Any] = {}
    for name, each in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(each, "commands", {})
        found |= {name: each, **{f"{name} {more}": inner[more] for more in inner}}
    return found


def spelling(parameter: Any) -> str:
    short = [name for name in parameter.opts if re.fullmatch(r"-\w", name)]
    (long,) = set(parameter.opts) - set(short)
    assert short == ([f"-{SHARED[long]}"] if SHARED.get(long) else []), "one spelling each but for the usual letters"
    return long + ("..." if parameter.nargs == -1 else "")


def test_commands_and_options() -> None:
    found = {name: sorted(map(spelling, each.params)) for name, each in commands().items()}
    assert found == {name: sorted([*options.split(), *SHARED]) for name, options in OPTIONS.items()}


def test_light_commands_import_nothing_heavy(bundle: str) -> None:
    lines = ["--help", "--version", "distill --help", "search --help", "recipes", "recipes tinybert", "recipes --json"]
    words = [*map(str.split, lines), ["predict", bundle, "a good film"]]
    subprocess.run([sys.executable, "-c", LIGHT, json.dumps(words)], check=True, stdout=subprocess.DEVNULL)


LONGEST = {"search": 81, "prune": 73, "export": 56, "distill": 60}
"""Lines of help of the commands with the most options; of the others, 55."""


@pytest.mark.parametrize("words", OPTIONS)
def test_help(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It explains every option, in groups, on few lines of 80 columns, with one example."""
    monkeypatch.setenv("COLUMNS", "80")
    result, command_ = command.run(*words.split(), "--help"), commands()[words]
    assert result.code == 0
    assert " ".join(command_.help.split()) in " ".join(result.out.split())
    assert all(parameter.help for parameter in command_.params if parameter.param_type_name == "option")
    lines = result.out.splitlines()
    titles = {line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)}
    assert titles <= {"Arguments", *PANELS, "Other options", "Commands"}
    assert max(map(len, lines)) <= 80
    assert lines[-1 if words != "search" else lines.index("Commands:") - 2].startswith("  -h, --help"), "the last group"
    assert len(lines) <= LONGEST.get(words, 55)
    assert result.out.count("Example: compress") == 1


@pytest.mark.parametrize("words", ["", *OPTIONS])
def test_short_options(words: str) -> None:
    version = command.Result(0, f"compress {compress.__version__}\n", "")
    assert command.run(*words.split(), "--version") == command.run(*words.split(), "-V") == version
    result = command.run(*words.split(), "-h")
    assert result == command.run(*words.split(), "--help")
    assert "-h, --help" in result.out


def test_a_command_without_the_root_command_has_the_same_help_options() -> None:
    doctor = typer.main.get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    assert doctor.get_help_option_names(typer.Context(doctor)) == ["-h", "--help"]


def test_help_shows_defaults_and_ranges() -> None:
    result = " ".join(command.run("quantize", "--help").out.split())
    assert "--rows <int> Calibrate on this many training rows. [512; >=1]" in result
    assert "[0.5; 0 to 100]" in result and "[fused]" in result
    assert (
        "--calibration <calibration> Use this method instead of the closest to fp32: minmax, percentile, entropy."
        in result
    )


COMPLETE = "import sys; sys.argv[0] = 'compress'; from compress.cli import main; main()"


@pytest.mark.parametrize(
    ("shell", "typed", "offered"),
    [
        ("bash", ["di"], ["distill"]),
        ("zsh", ["distill", "--te"], ["--teacher", "--text"]),
        ("bash", ["distill", "--teacher", "minilm", "--effort", ""], ["quick", "normal", "best"]),
        ("fish", ["search", "--teacher", "minilm", "--da"], ["--data"]),
        ("bash", ["search", "sh"], ["show"]),
    ],
)
def test_completion(shell: str, typed: list[str], offered: list[str]) -> None:
    """It is fast: it does not even import pydantic, which every command needs."""
    line = shlex.join(["compress", *typed[:-1]]) + f" {typed[-1]}"
    asked = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(typed))}, "zsh": {"_TYPER_COMPLETE_ARGS": line},
             "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}}  # fmt: skip
    environment = {**os.environ, "_COMPRESS_COMPLETE": f"complete_{shell}", **asked[shell]}
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {COMPLETE}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found = re.findall(r"(?m)^([\w-]+)" if shell != "zsh" else r'"([\w-]+)"(?::|\)|\n)', done.stdout)
    assert [word for word in found if word != "_arguments"] == offered
    assert {"pydantic", "rich.console", "yaml", "torch"} & set(done.stderr.split()) == set()


def test_recipes_lists_each_once() -> None:
    """What it makes, how long that takes, the verdict on it; and below, when to choose it."""
    result = command.run("recipes")
    assert result.code == 0
    entries = dict(re.findall(r"^  ([\w-]+) +\S.*$((?:\n      .*)+)", result.out, re.MULTILINE))
    assert sorted(entries) == loader.names()
    for name, below in entries.items():
        assert " ".join(below.split()) == " ".join((Recipe.load(name).choose or "").split())
    assert max(map(len, result.out.splitlines())) <= 80
    facts = dict(re.findall(r"^  ([\w-]+) +(\S.*)$", result.out, re.MULTILINE))
    assert facts["hinton"].startswith("half the layers; minutes")
    tried = {name: fact.partition("tried: ")[2] for name, fact in facts.items()}
    assert {name: verdict for name, verdict in tried.items() if verdict} == catalog.verdicts()


def test_recipes_shows_the_file() -> None:
    assert command.run("recipes", "tinybert").out.strip() == loader.locate("tinybert").read_text().strip()


def test_recipes_as_json() -> None:
    listed = json.loads(command.run("recipes", "--json").out)["recipes"]
    assert [each["name"] for each in listed] == loader.names()
    assert all({"about", "purpose", "student", "title", "authors", "year", "url"} < each.keys() for each in listed)
    one = json.loads(command.run("recipes", "tinybert", "--json").out)
    assert one["student"]["layers"] == 4
    assert one["stages"][0]["eps"] == 1e-8, "defaults too"


def test_distill_as_json_prints_only_the_report(distilled: tuple[command.Result, Path]) -> None:
    result, out = distilled
    assert result.code == 0
    report = json.loads((out / "bundle" / "report.json").read_text())
    assert json.loads(result.out) == {"schema": "compress.distill/1", **report}
    assert "bundle:" in result.err


def test_distill_says_first_what_it_will_do(distilled: tuple[command.Result, Path]) -> None:
    report = json.loads(distilled[0].out)
    said = " ".join(distilled[0].err.split()).split("this run will ")[1]
    stages = re.findall(r"(?:distill|finetune) \(([\w-]+)\)", said.split("export to ONNX")[0])
    assert stages == [each.name for each in Recipe.load(str(distilled[1] / "recipe.yaml")).stages]
    assert f"export to ONNX, and measure on {report['split_rows']:,} rows; --plan" in said


def test_the_list_of_commands_imports_none() -> None:
    program = (
        "import sys; sys.argv = ['compress', '--help']; import compress.cli as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert not [name for name, _ in cli.COMMANDS.values() if f'compress.cli.{name}' in sys.modules]\n"
        "assert 'compress.config.options' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("Commands:\n")[1].splitlines()
    assert [line.split(maxsplit=1) for line in listed] == [[name, text] for name, (_, text) in COMMANDS.items()]


def test_distill_certifies_int8(distilled: tuple[command.Result, Path]) -> None:
    (found,) = json.loads(distilled[0].out)["certificates"]
    assert (found["artefact"], found["split"], found["max_drop"]) == ("onnx/model_quantized.onnx", "validation", 0.002)
    assert "certificate" in (distilled[1] / "report.html").read_text().lower()


def test_documented_schemas_are_those_of_the_commands() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    page = Path(__file__).parents[2] / "docs" / "json.md"
    if page.is_file():  # in a checkout
        listed = re.findall(r"^\| `compress\.([a-z-]+)/1`", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(listed) == sorted(set(re.findall(r'(?:print_json|schema)\(\s*"([a-z-]+)"', source)))


def test_help_comes_before_refusals() -> None:
    assert command.run("distill", "--data", "a", "--data", "b", "-h").code == 0


def test_flags_and_lists_may_be_given_twice(bundle: str) -> None:
    assert command.run("inspect", bundle, "--quiet", "--quiet").code == 0
    given = [word for setting in ("a=1", "b=2") for word in ("--set", setting)]
    found = command.run("distill", "--teacher", "minilm", "--data", "intents", *given, "--plan")
    assert (found.code, found.err.count("no such setting")) == (2, 2)


def test_json_begins_with_its_schema(bundle: str) -> None:
    result = command.run("clean", str(Path(bundle).parent), "--dry-run", "--json")
    assert next(iter(json.loads(result.out).items())) == ("schema", "compress.clean/1")


def test_set_overrides_the_recipe(distilled: tuple[command.Result, Path]) -> None:
    resolved = yaml.safe_load((distilled[1] / "recipe.yaml").read_text())
    assert resolved["stages"][0]["steps"] == 2
    assert float(resolved["stages"][1]["lr"]) == 1e-3


def test_predict_prints_a_line_per_text(bundle: str) -> None:
    result = command.run("predict", bundle, "a good film", "a bad film")
    assert result.code == 0
    lines = [line.split("\t") for line in result.out.splitlines()]
    assert [line[2] for line in lines] == ["a good film", "a bad film"]
    assert {line[0] for line in lines} <= {"negative", "positive"}
    assert all(0.5 <= float(line[1]) <= 1 for line in lines)


def test_predict_reads_standard_input(bundle: str) -> None:
    texts = ["a good film", "", "a bad film"]
    assert command.run("predict", bundle, "-", stdin="\n".join(texts) + "\n") == command.run("predict", bundle, *texts)
    assert command.run("predict", bundle, "-", stdin="") == command.Result(0, "", "")


def test_predict_stops_at_invalid_text(bundle: str) -> None:
    stdin = b"a good film\na b\xffd film\na bad film\n"
    result = command.run("predict", bundle, "-", stdin=stdin)
    assert result.code == 2
    assert [line.split("\t")[2] for line in result.out.splitlines()] == ["a good film"]
    assert "line 2: byte 4 (0xff)" in result.err
    as_json = command.run("predict", bundle, "-", "--json", stdin=stdin)
    assert as_json.code == 2
    assert len(json.loads(as_json.out)["answers"]) == 1


def test_predict_skips_invalid_text(bundle: str) -> None:
    stdin = b"a good film\r\n\xff\n" + b"a" * (predictor.LONGEST_LINE + 5) + b"\na bad film"
    result = command.run("predict", bundle, "-", "--on-error", "skip", stdin=stdin)
    assert result.code == 0
    good, invalid, long, bad = result.out.splitlines()
    assert (good.split("\t")[2], bad.split("\t")[2]) == ("a good film", "a bad film")
    assert invalid.startswith("error: line 2")
    assert long.startswith("error: line 3")
    assert "2 texts were skipped" in result.err
    as_json = command.run("predict", bundle, "-", "--on-error", "skip", "--json", stdin=stdin)
    assert [set(each) for each in json.loads(as_json.out)["answers"]][1:3] == [{"error"}, {"error"}]


def test_predict_streams(bundle: str) -> None:
    """It answers a line before it reads the next, and is quiet when nobody reads any more."""
    words = [sys.executable, "-m", "compress", "predict", bundle, "-"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for text in (b"a good film", b"a bad film"):
            process.stdin.write(text + b"\n")
            process.stdin.flush()
            assert process.stdout.readline().rstrip().endswith(text)
        process.stdout.close()
        process.stdin.write(b"another\n" * 3)
        process.stdin.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "\x9b2J", "two\nlines", "\u202egood"])
def test_predict_escapes_control_characters(bundle: str, text: str) -> None:
    result = command.run("predict", bundle, text)
    assert result.code == 0
    assert result.out.rstrip("\n").replace("\t", "").isprintable()


def test_predict_refuses_invalid_arguments(bundle: str) -> None:
    result = command.run("predict", bundle, "good", os.fsdecode(b"b\xffd"))
    assert (result.code, len(result.out.splitlines())) == (2, 1)
    assert "text 2: byte 2 (0xff)" in result.err
    assert "--pair" in command.run("predict", bundle, "good", "--pair", os.fsdecode(b"\xff")).err


def test_predict_takes_a_run(bundle: str) -> None:
    assert command.run("predict", str(Path(bundle).parent), "good") == command.run("predict", bundle, "good")


def test_predict_as_json(bundle: str) -> None:
    for more in ([], ["--precision", "fp32"]):
        (found,) = json.loads(command.run("predict", bundle, "a good film", "--json", *more).out)["answers"]
        assert found["label"] in {"negative", "positive"}
    none = json.loads(command.run("predict", bundle, "-", "--json", stdin="").out)
    assert none == {"schema": "compress.predict/1", "answers": []}


def test_bench(bundle: str) -> None:
    result = command.run("bench", bundle, "--seq", "8,16", "--rounds", "2", "--runs", "1", "--json")
    assert result.code == 0
    found = [(each["name"].rpartition(":")[2], each["setting"]["seq"]) for each in json.loads(result.out)["latencies"]]
    assert found == [("fp32", 8), ("int8", 8), ("fp32", 16), ("int8", 16)]
    assert (
        "p50" in command.run("bench", bundle, "--precision", "fp32", "--seq", "8", "--rounds", "2", "--runs", "1").out
    )


def test_bench_knows_how_many_cores_there_are(bundle: str) -> None:
    result = command.run("bench", bundle, "--threads", "9999")
    assert (result.code, "--threads 9999" in result.err) == (2, True)


def test_bench_writes_a_file_per_visitor(bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([BenchResult("browser", {}, "", "", ()), BenchResult("browser", {}, "", "", ())])

    def bench(files: Any, **options: Any) -> BenchResult:
        for result in measured:
            return result
        raise DeviceError("browser: the page was left")

    monkeypatch.setattr(benching, "bench", bench)
    words = ["bench", bundle, "--device", "browser", "--visitors", "3", "--out", str(tmp_path / "phones.json")]
    told = command.run(*words)
    assert (told.code, "the page was left" in told.err) == (2, True)
    files = sorted(tmp_path.glob("*.json"))
    assert [(file.name, BenchResult.from_json(file).device) for file in files] == [
        ("phones-1.json", "browser 1"), ("phones-2.json", "browser 2"),
    ]  # fmt: skip


def test_an_interruption_shows_how_to_continue(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.training.run.Run.remaining", interrupt)
    words = shelf.distill(tmp_path / "run", "--set", "teacher.steps=1", "--gate", "warn")
    result = command.run(*words)
    assert result.code == 130
    assert shlex.split(result.err.partition("Continue with: ")[2]) == ["compress", *words, "--resume"]


def test_a_bug_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError

    monkeypatch.setattr(loader, "names", broken)
    with pytest.raises(ZeroDivisionError):
        command.run("recipes")


OTHERS = {
    "--api_token", "--backend-store-uri", "--fsdp_version", "--graph", "--help", "--logdir", "--loglevel",
    "--max_profiler_iterations",
    "--max_secs", "--merge", "--min_secs", "--num_runs", "--num_threads", "--pack-destination", "--project", "--remove",
    "--restrict_ce_to_mask", "--target_runtime", "--use_fsdp", "--warmup_min_secs", "--warmup_runs",
}  # fmt: skip
"""Options of other tools in our code."""


def test_options_in_messages_exist() -> None:
    from typer.main import get_command

    def options(command: Any) -> set[str]:
        own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))

    text = "".join(path.read_text(encoding="utf-8") for path in Path(compress.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)) - options(get_command(app)) <= OTHERS


def test_commands_in_messages_have_no_placeholders() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(compress.__file__).parent.rglob("*.py"))
    output = re.findall(rf"compress (?:{'|'.join(commands())}) [^\n]*", text)
    assert [words for words in output if "..." in words or re.search(r" (NAME|OUT|TEACHER|STUDY|TRIAL)\b", words)] == []
