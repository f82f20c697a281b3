"""Load recipes, and report every problem at once."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.config import loader
from compress.config.recipe import Recipe
from compress.config.term import Term
from compress.errors import RecipeError
from compress.training.objective import check_terms

GOOD: dict[str, Any] = {
    "paper": {"title": "A", "authors": "B", "year": 2020, "url": "https://example.org"},
    "about": "C",
    "student": {"layers": 2, "hidden": 32},
    "stages": [
        {"distill": "first", "lr": 1e-3, "objective": [{"loss": "tinybert.hidden", "project": True}]},
        {
            "distill": "second",
            "lr": 1e-3,
            "epochs": 2,
            "objective": [{"loss": "hinton.soft_targets", "temperature": 2.0}],
        },
    ],
}
BOMB = "a: &a0 [x, x]\n" + "".join(f"k{at}: &a{at + 1} [*a{at}, *a{at}]\n" for at in range(40))


def written(folder: Path, tree: object, name: str = "mine") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return str(path)


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        Recipe.load(name, overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def test_a_good_recipe(tmp_path: Path) -> None:
    recipe = Recipe.load(written(tmp_path, GOOD))
    assert recipe.name == "mine"
    assert (recipe.student.family, recipe.student.layers, recipe.student.heads) == ("teacher", 2, None)
    assert [(stage.kind, stage.name) for stage in recipe.stages] == [("distill", "first"), ("distill", "second")]
    assert recipe.stages[0].objective == (Term("tinybert.hidden", project=True),)
    assert (recipe.teacher.kind, recipe.teacher.name, recipe.teacher.lr) == ("finetune", "teacher", "auto")
    assert recipe.teacher.objective == (Term("bert.labels"),)


def test_an_objective_without_a_weight_is_refused(tmp_path: Path) -> None:
    """It would train nothing."""
    terms = [{"loss": "hinton.soft_targets", "weight": 0}, {"loss": "bert.labels", "weight": 0}]
    stages = [{"distill": "first", "lr": 1e-3, "objective": terms}]
    (problem,) = problems(written(tmp_path, GOOD | {"stages": stages}))
    assert problem.startswith("mine.yaml: stages[0].objective: has no term with a weight")
    terms[1]["weight"] = 0.5
    Recipe.load(written(tmp_path, GOOD | {"stages": stages}))


def test_only_finetune_has_a_default_objective(tmp_path: Path) -> None:
    stages = [{"finetune": "task", "lr": 1e-3}, {"distill": "it", "lr": 1e-3}]
    assert problems(written(tmp_path, GOOD | {"stages": stages})) == ["mine.yaml: stages[1].objective: is missing"]
    assert Recipe.load(written(tmp_path, GOOD | {"stages": stages[:1]})).stages[0].objective == (Term("bert.labels"),)


# Numbers


@pytest.mark.parametrize(
    ("text", "number"), [("5e-5", 5e-5), ("5.0e-5", 5e-5), ("1E-3", 1e-3), (".5e-3", 5e-4), ("0.001", 1e-3), ("1", 1.0)]
)
def test_numbers_in_scientific_notation(tmp_path: Path, text: str, number: float) -> None:
    """YAML 1.1 reads 5e-5 as text."""
    name = written(tmp_path, yaml.safe_dump(GOOD).replace("lr: 0.001", f"lr: {text}").replace("2.0", text))
    recipe = Recipe.load(name)
    assert recipe.stages[0].lr == number
    assert recipe.stages[1].objective[0].options["temperature"] == number
    assert Recipe.load(name, [f"stages.1.objective.0.weight={text}"]).stages[1].objective[0].weight == number


# Everything wrong at once


def test_all_problems_at_once(tmp_path: Path) -> None:
    tree = {
        "paper": GOOD["paper"] | {"yaer": 2020},
        "abuot": "C",
        "student": {"layers": -1, "hiden": 32, "copy_layers": "evne"},
        "stages": [
            {
                "distill": "First!",
                "lr": "fast",
                "epoch": 3,
                "objective": [{"loss": "tinybert.hidden", "layers": "unifrom"}, {"weight": 2}],
            },
            {"distil": "second", "lr": 1e-3},
            {"distill": "third", "objective": []},
            5,
        ],
        "teacher": {"lr": 0, "batch": 1.5},
    }
    found = problems(written(tmp_path, tree))
    for expected in (
        "mine.yaml: abuot: no such setting. Did you mean 'about'?",
        "mine.yaml: about: is missing",
        "mine.yaml: paper.yaer: no such setting. Did you mean 'year'?",
        "mine.yaml: student.hiden: no such setting. Did you mean 'hidden'?",
        "mine.yaml: student.layers: Input should be greater than 0, found -1",
        "mine.yaml: stages[0].epoch: no such setting. Did you mean 'epochs'?",
        "mine.yaml: stages[0].objective[0]: layers: expected uniform, last, first, top, skip or spread; "
        "found 'unifrom'. Did you mean 'uniform'?",
        "mine.yaml: stages[0].objective[1]: expected a mapping with `loss: paper.function`, found {'weight': 2}",
        "mine.yaml: stages[1]: expected exactly one of `distill: NAME`, `finetune: NAME`, `pretrain: NAME`, "
        "`prune: NAME`",
        "mine.yaml: stages[2].lr: is missing",
        "mine.yaml: teacher.lr: Input should be greater than 0, found 0",
    ):
        assert expected in found
    for place in ("student.copy_layers", "stages[0].name", "stages[0].lr", "stages[2].objective", "stages[3]"):
        assert [problem for problem in found if problem.startswith(f"mine.yaml: {place}")], place
    assert any(problem.startswith("mine.yaml: teacher.batch") for problem in found)
    assert len(found) == len(set(found))


def test_merge_keys_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    """Also where a mapping is merged before it is read itself, as it lies deeper."""
    text = "a: &a {x: 1, y: 2}\ndeep: {down: &b {<<: *a, y: 3}}\nlast: {<<: [*b, *a], z: 4}\n"
    assert loader.parse_yaml(text, "here") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: a\nabout: b\n", "line 2, column 1: 'about' is given twice"),
        ("student: {layers: 2, layers: 3}\n", "'layers' is given twice"),
        ("student: &a {layers: 2}\nmore: {<<: *a, hidden: 1, hidden: 2}\n", "'hidden' is given twice"),
        ("stages: [\n", "not readable as YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "not readable as YAML"),
        ("? [1, 2]\n: 3\n", "not readable as YAML"),
        ("- a\n- b\n", "expected a mapping with student and stages, found list"),
        ("", "expected a mapping with student and stages, found NoneType"),
        ("teacher: 5\n", "mine.yaml: teacher: "),
        ("stages: 5\n", "mine.yaml: stages: "),
        ("stages: [{distill: a, lr: 1, objective: 5}]\n", "mine.yaml: stages[0].objective: "),
        ("stages: []\n", "mine.yaml: stages: "),
        ("1: 2\n", "mine.yaml: "),
        ("about: c\nstages: [\n", "mine.yaml: not readable as YAML: line 3, column 1: "),
        ("about: !!timestamp soon\n", "not readable as YAML"),
        ("about: 2020-99-99\n", "not readable as YAML"),
        (b"about: \xff\xfe\n", "mine.yaml: not readable as YAML"),
        (f"about: {'1' * 5000}\n", "not readable as YAML"),
        ("[" * 20_000, "mine.yaml: not readable as YAML: line 1, column 101: nested more than 100 deep"),
        ("\n".join(f"{' ' * at}a:" for at in range(200)), "nested more than 100 deep"),
        ("a: &a [*a]\n", "once its aliases are expanded"),
        (BOMB, "once its aliases are expanded"),
        ("about: |\n" + " x\n" * 30_000, "mine.yaml: is larger than 65,536 bytes"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert any(message in problem for problem in problems(str(tmp_path / "mine.yaml")))


def test_duplicate_stage_names(tmp_path: Path) -> None:
    for name in ("second", "teacher"):
        stages = [GOOD["stages"][0] | {"distill": name}, GOOD["stages"][1]]
        stages = stages if name == "second" else stages[:1]
        assert f"two stages are called {name}" in problems(written(tmp_path, GOOD | {"stages": stages}))[0]


def test_unknown_recipes(tmp_path: Path) -> None:
    known = loader.names()[0]
    assert f"no recipe '{known}x'. Did you mean '{known}'?" in problems(f"{known}x")[0]
    assert "no such recipe file" in problems(str(tmp_path / "absent.yaml"))[0]
    assert "no such recipe file" in problems(str(tmp_path / "x.yaml" / ".." / "y.yaml"))[0]


# Extends


def test_extends(tmp_path: Path) -> None:
    written(tmp_path, GOOD | {"name": "parent"}, "parent")
    child = {"extends": "parent", "about": "D", "student": {"hidden": 64}, "stages": GOOD["stages"][1:]}
    recipe = Recipe.load(written(tmp_path, child))
    assert (recipe.name, recipe.about, recipe.paper.year) == ("mine", "D", 2020)
    assert (recipe.student.layers, recipe.student.hidden) == (2, 64)
    assert [stage.name for stage in recipe.stages] == ["second"]


def test_extends_a_built_in_recipe(tmp_path: Path) -> None:
    parent = loader.names()[0]
    recipe = Recipe.load(written(tmp_path, {"extends": parent, "about": "D"}))
    assert recipe == Recipe.load(parent).model_copy(update={"name": "mine", "about": "D"})


def test_extends_one_level_only(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "a")
    written(tmp_path, {"extends": "a"}, "b")
    assert "extends 'b', which itself extends another" in problems(written(tmp_path, {"extends": "b"}))[0]
    assert "no recipe 'absent'" in problems(written(tmp_path, {"extends": "absent"}))[0]


@pytest.mark.parametrize("parent", ["../x", "/etc/passwd", "..", "", ["tinybert"], 5, "a/b", "x\0y"])
def test_extends_takes_no_path(tmp_path: Path, parent: object) -> None:
    written(tmp_path.parent, GOOD, "x")
    (problem,) = problems(written(tmp_path, {"extends": parent}))
    assert "expected the name of one of our recipes, or of a file next to this one" in problem


# Overrides


def test_set_by_number_and_by_name(tmp_path: Path) -> None:
    name = written(tmp_path, GOOD)
    recipe = Recipe.load(
        name,
        [
            "stages.0.lr=3e-5",
            "stages.second.epochs=0.5",
            "stages.-1.batch=8",
            "student.layers=3",
            "stages.second.objective.0.temperature=7",
            "teacher.epochs=1",
            "student.copy_layers=[0, 1, 3]",
        ],
    )
    assert (recipe.stages[0].lr, recipe.stages[1].epochs, recipe.stages[1].batch) == (3e-5, 0.5, 8)
    assert recipe.stages[1].objective[0].options == {"temperature": 7}
    assert (recipe.student.layers, recipe.student.copy_layers) == (3, (0, 1, 3))
    assert (recipe.teacher.epochs, recipe.teacher.lr) == (1, "auto")
    assert Recipe.load(name).stages[0].lr == 1e-3


@pytest.mark.parametrize(("name", "paper"), [("electra-small", False), ("minilm", True)])
def test_set_epochs_replaces_steps(name: str, paper: bool) -> None:
    assert Recipe.load(name, paper=paper).training[0].steps
    stage = Recipe.load(name, ["stages.0.epochs=2"], paper=paper).training[0]
    assert (stage.epochs, stage.steps) == (2, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.0.lr", "--set stages.0.lr: expected PATH=VALUE"),
        ("=5", "--set =5: expected PATH=VALUE"),
        ("stages.third.lr=1", "--set stages.third.lr=1: no stage 'third'; use its name or its number from 0"),
        ("stages.--1.lr=1", "no stage '--1'"),
        ("stages.².lr=1", "no stage '²'"),
        ("stages.2.lr=1", "--set stages.2.lr=1: there are only 2 entries, numbered from 0"),
        ("about.x=1", "--set about.x=1: about has no settings below it"),
        ("student.layers=[1", "--set student.layers=[1: not readable as YAML"),
        ("student.layres=4", "mine.yaml: student.layres: no such setting. Did you mean 'layers'?"),
        ("stages.0.lr=-1", "mine.yaml: stages[0].lr: Input should be greater than 0, found -1"),
        ("stages.0.lr=.nan", "mine.yaml: stages[0].lr: "),
        ("stages.0.lr=.inf", "mine.yaml: stages[0].lr: "),
        ("stages.0.lr=1e9", "mine.yaml: stages[0].lr: Input should be less than or equal to 10"),
        ("stages.0.lr_end=1", "mine.yaml: stages[0]: has an `lr_end`"),
        ("stages.1.lr_end=1e-3", "a length, and an `lr` above it"),
        ("stages.0.epochs=1e9", "mine.yaml: stages[0].epochs: Input should be less than or equal to 100000"),
        ("stages.0.steps=1e30", "mine.yaml: stages[0].steps: "),
        ("stages.0.betas=[0.9, 1.5]", "mine.yaml: stages[0].betas[1]: Input should be less than 1"),
        ("stages.0.objective.0.weight=-1", "weight: expected a number from 0 to 1,000,000; found -1"),
        ("student.layers=1e9", "mine.yaml: student.layers: Input should be less than or equal to 1000"),
        (f"stages.0.lr={'[' * 20_000}", "nested more than 100 deep"),
        ("stages.0=5", "mine.yaml: stages[0]: "),
        (
            "stages.0.objective.0.weight=much",
            "mine.yaml: stages[0].objective[0]: weight: expected a number from 0 to 1,000,000; found 'much'",
        ),
        ("extends=tinybert", "mine.yaml: extends: no such setting."),
        ("stages.0.optimizer=adam", "mine.yaml: stages[0].optimizer: Input should be 'adamw', 'lamb' or 'adafactor'"),
    ],
)
def test_invalid_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert any(message in problem for problem in problems(written(tmp_path, GOOD), override))


def test_optimizer_settings(tmp_path: Path) -> None:
    """The resolved recipe keeps them; those of AdamW are refused for other optimizers."""
    name = written(tmp_path, GOOD)
    assert {stage.optimizer for stage in Recipe.load(name).training} == {"adamw"}
    lamb = Recipe.load(name, ["stages.0.optimizer=lamb", "stages.0.betas=[0.8, 0.9]", "stages.0.eps=1e-6"])
    assert [(stage.optimizer, stage.eps) for stage in lamb.training] == [("lamb", 1e-6), ("adamw", 1e-8)]
    assert Recipe.load(written(tmp_path, lamb.to_yaml(), "resolved")) == lamb
    for other in ("stages.0.eps=1e-6", "stages.0.betas=[0.8, 0.9]", "stages.0.lr=auto"):
        (problem,) = problems(name, "stages.0.optimizer=adafactor", other)
        assert problem.startswith("mine.yaml: stages[0]:")


# Ours


@pytest.mark.parametrize("name", loader.names())
def test_a_recipe_of_ours(name: str, tmp_path: Path) -> None:
    """It is equal when it is resolved, its losses and options exist, and it says whose it is and when to choose it."""
    recipe = Recipe.load(name)
    resolved = recipe.to_yaml()
    again = Recipe.load(written(tmp_path, resolved, "resolved"))
    assert again == recipe
    assert again.to_yaml() == resolved
    assert "eps" in yaml.safe_load(resolved)["stages"][-1]
    stages = [recipe.teacher, *recipe.training]
    assert [problem for stage in stages for problem in check_terms(stage.objective, stage.name)] == []
    assert recipe.choose and recipe.needs and recipe.cost
    assert recipe.choose[0].islower(), "it ends the sentence: choose it when"
    text = loader.locate(name).read_text(encoding="utf-8")
    title, command, *_ = text.splitlines()
    assert re.search(r"arXiv:\d{4}\.\d{5}$|https://\S+$", title)
    assert re.match(rf"#   compress (distill|pretrain|prune) .*--recipe {name} ", command)
    assert uncited(text) == [], "every number has a source"


@pytest.mark.parametrize("file", sorted((loader.folder() / "spaces").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_number_of_a_space_has_a_source(file: Path) -> None:
    assert uncited(file.read_text(encoding="utf-8")) == []


def test_guidance_is_not_inherited() -> None:
    texts = [recipe.choose for recipe in map(Recipe.load, loader.names())]
    assert len(set(texts)) == len(texts)


SOURCE = re.compile(r"ours: \w|(Table|Sec\.|Eq\.|Alg\.) \d|\b[A-Z]\.\d|README|TRL|\b(code|scripts?|json)\b")
"""The source of a number in its comment, or `ours:` and the reason."""


def uncited(text: str) -> list[str]:
    """Return the lines with a number that has no source, neither in its own comment nor in that of its block."""
    lines, found = text.splitlines(), set[int]()

    def cited(line: int) -> bool:
        comment = re.search(r"\s# (.+)$", lines[line])
        return comment is not None and SOURCE.search(comment[1]) is not None

    def visit(node: yaml.Node, known: bool) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value != "paper":
                    opens = isinstance(value, yaml.CollectionNode) and key.value != "stages"
                    visit(value, known or (opens and cited(key.start_mark.line)))
        elif isinstance(node, yaml.SequenceNode):
            for each in node.value:
                visit(each, known)
        elif re.search(r":(int|float)$", node.tag) and not known and not cited(node.start_mark.line):
            found.add(node.start_mark.line)

    visit(yaml.compose(text, Loader=yaml.SafeLoader), False)
    return [lines[line] for line in sorted(found)]


def test_find_numbers_without_source() -> None:
    text = """\
paper: {year: 2020}
student: {layers: 2, heads: 4}    # Table 1
stages:                           # Sec. 3
  - distill: first                # Sec. 3
    lr: 3.0e-5                    # the best of three
    batch: 32                     # ours
    epochs: 3                     # ours: theirs are 20
    betas: [0.9, 0.98]
    step:                         # authors' code
      by: a.b
      decay: 0.9
    objective:
      - {loss: a.b, weight: 0.5}
"""
    assert [line.split("#")[0].strip() for line in uncited(text)] == [
        "lr: 3.0e-5", "batch: 32", "betas: [0.9, 0.98]", "- {loss: a.b, weight: 0.5}"
    ]  # fmt: skip


def test_every_recipe_is_in_the_table() -> None:
    assert len(loader.names()) >= 6
    table = loader.folder() / "README.md"
    rows = re.findall(r"^\|\s*\[?`([a-z0-9-]+)`", table.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == loader.names()


def test_loading_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys; from compress.config import loader, recipe; recipe.Recipe.load(loader.names()[0]);"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
