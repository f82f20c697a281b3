"""Does a recipe lead a control that can win, on real data, in minutes of a small machine?

    python -m benchmarks.recipes_for_real --data ../shared/data --corpus ../shared/data/enwiki_2015

Without names of recipes it goes through all that need no GPU, in the order of PROOFS, leaves out those that have a
result, and goes on after a failure; called again it continues, with all runs that it has finished on the same code.
`--data` is a folder with SST-2 (sst2), half of SQuAD 2's dev file (squad2_half_dev) and MLQA's in English
(mlqa_en_dev); `--corpus` is text. PROOFS says of every recipe what stands in the place of its own numbers, which ask
for days, and what its control lacks. What is scored:

    score   accuracy on 4,000 rows, after a task's last stage, or of `t5`'s likeliest answers; of `q8bert` with the int8
            file's rounding, of questions the F1, of rankings and vectors the nDCG@10
    nats    for a token of held-out text, the mean of each document, after a stage on text
    kl      to the teacher, for a token that the student itself writes: recipes that learn from their own writing

**The controls.** A task's control without its teacher is the same student, trained on the labels of the same rows and
of the variants that the recipe reads of them, by BERT's numbers, for as long as the validation split shows
improvement: the rule by which the recipe itself ends (`epochs: auto`, effort quick). As that rule asks for a
teacher's distance too, which lets a recipe go on, the control has a second try, the rows alone at normal effort (400
to 1,500 steps), and the better of the two on the validation split counts; so have controls without stages on text,
and those of vectors. A try that diverges is repeated at a fifth of its rate. A recipe that reads texts without
labels, which only a teacher can answer for, is scored without them as well, so that the teacher, the texts and both
together are told apart. Of stages on text the control has as much time: it takes the recipe's steps, and where it is
faster, once more as many as fit into the recipe's time. Vectors are compared with those of `embed-mse`, and
`embed-mse` with the same copied layers, trained on the same texts to tell each text's vector, under another dropout,
from the other texts' (Gao et al. 2021, "SimCSE", arXiv:2104.08821, without labels).

**The statistics** are those of benchmarks/effects.py: every seed draws its own rows to train and validate on, its
own teacher and its own students; the test rows are the same for all. The teacher is `minilm`, fine-tuned on the
seed's rows for 3 epochs, or one of those that are trained here once, for 500 to 2,000 steps of 1,024 tokens, and
know little: `lm`, a GPT-2 of 4 x 192, `answering`, the same after 8,000 steps on rows that no seed draws, each a
prompt with its answer, `electra` and `t5`, both 3 x 128, the latter fine-tuned. What begins with random weights has
a vocabulary of 2,000 pieces that is made here. A GPU reads 64 times the text in as many minutes: `--longer 4 --wider
16 --hidden 256`.

Results are one JSON file a recipe. The site's page "Recipes on real data" shows them.
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

import compress
from benchmarks.common import COMMIT, make_parser, write_result
from benchmarks.effects import NOT_RUN, measure
from benchmarks.trial_data import POOL, draw, load_whole
from benchmarks.trial_runs import Trial, run
from benchmarks.trial_scores import Scored, guess_by_rate
from compress.config.recipe import Recipe, Target
from compress.config.reference import Call
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.cache import home
from compress.data.corpus import load_corpus
from compress.errors import CompressError
from compress.io import atomic_folder
from compress.prompting.labels import label_names
from compress.prompting.prompt import Prompt

UNTRAINED = ("n-gram", "majority", "rate")
"""Controls that are no other student."""
TARGET = Target.model_validate({"layers": 0.67, "ffn": 0.5})
"""The sizes that recipes which prune are given, those of `--recipe auto`."""
PIECES, SPANS = 2000, 100
SMALL = {"layers": 3, "hidden": 128, "ffn": 512, "heads": 4}
BATCH: Mapping[str, Any] = {"micro_batch": None, "tokens": None, "max_length": 64, "warmup": 0.05}
SCRATCH = {**BATCH, "steps": 500, "batch": 16, "lr": 1e-3, "lr_end": 0.0, "evaluate": 5, "limit_tokens": 1_100_000}
GENERAL = {**BATCH, "steps": 300, "batch": 16, "lr": 1e-3, "evaluate": 2, "limit_tokens": 1_000_000}
LIKE_LM = {"layers": 2}


@dataclass(frozen=True)
class Proof:
    """Say how a recipe is tried.

    without   what its control lacks: the `teacher`, stages on `text`, a `step`, `variants` of the rows, or the
              `importance` of what is cut; in its place `embed-mse` is that recipe, `two views` what embed-mse is
              compared with, `n-gram` another model, `majority` the most frequent class, `rate` how often each token is
              a replacement
    data      sst2, squad, vectors, answers (vectors of questions and what answers them) or ranking: see
              benchmarks/trial_data.py
    teacher   minilm, lm, answering, electra, t5, or `vocabulary`: nothing but tokens
    student   sizes in the place of its own; text, task, teacher_lm: numbers of its stages on text, of those on a task,
              and of the head for masked words that its teacher gets
    stages    which of its stages are run; None: all
    int8      score what is trained with the rounding of its int8 file
    """

    without: str
    data: str = "sst2"
    teacher: str = "minilm"
    student: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=lambda: {"max_length": 64})
    stages: Sequence[int] | None = None
    prompt: Prompt | None = None
    int8: bool = False
    teacher_lm: Mapping[str, Any] = field(default_factory=lambda: {**BATCH, "steps": 300, "batch": 16})

    @property
    def measure(self) -> str:
        """What is scored after a stage on text."""
        if self.without == "rate":
            return "rate"
        if self.teacher == "lm":
            return "kl" if self.without == "step" else "nats and teacher"
        return "nats"

    def enlarge(self, args: argparse.Namespace) -> "Proof":
        """Return the proof with the steps on text, their rows and the width that the command line asks for."""
        times, sizes = {"steps": args.longer, "batch": args.wider, "limit_tokens": args.wider}, dict(self.student)
        text, teacher_lm = (
            {name: round(value * times[name]) if name in times else value for name, value in each.items()}
            for each in (self.text, self.teacher_lm)
        )
        if args.hidden and self.teacher == "vocabulary":
            sizes |= {"hidden": args.hidden} | ({"ffn": 4 * args.hidden} if sizes.get("ffn") else {})
        return replace(self, text=text, student=sizes, teacher_lm=teacher_lm)


def scratch(without: str, stages: Sequence[int] | None = None, **numbers: Any) -> Proof:
    """Try the stages of a recipe that train on text from random weights."""
    sizes = SMALL | numbers.pop("student", {})
    return Proof(without, "sst2", "vocabulary", sizes, SCRATCH | numbers, stages=stages)


def general(**student: Any) -> Proof:
    """Try a recipe with a general student, taught on text."""
    return Proof("text", student=student, text=GENERAL)


VARIANTS = Call("tinybert.near_words", {"copies": 5, "probability": 0.4, "candidates": 15})
FEW_VARIANTS = {"max_length": 64, "epochs": 2.0, "augment": VARIANTS}
ON_OWN_TEXT = {"prompt": 16, "new_tokens": 32}
TAUGHT, PRUNED, NARROW = Proof("teacher"), Proof("importance"), general(layers=3, hidden=192, ffn=768)
VECTORS, RANKING = Proof("embed-mse", "vectors"), Proof("teacher", "ranking", task={"max_length": 128})
PROOFS: Mapping[str, Proof] = {
    "hinton": TAUGHT,
    "distilbert": TAUGHT,
    "prune-taylor": PRUNED,
    "tinybert": TAUGHT,
    "static": TAUGHT,
    "prune-minitron": PRUNED,
    "pkd": TAUGHT,
    "embed-mse": replace(VECTORS, without="two views"),
    "leaf": VECTORS,
    "minilm": NARROW,
    # what begins as layers of its teacher is spoiled by 1e-3: distilroberta lost 2.7 points
    "distilbert-general": replace(general(), text=GENERAL | {"lr": 2e-4}),
    "mobilebert-task": TAUGHT,
    "albert-shared": TAUGHT,
    "prune-dynabert": PRUNED,
    "prune-cofi": PRUNED,
    "deberta-sift": TAUGHT,
    "q8bert": Proof("step", int8=True),
    "distilgpt2": Proof("teacher", "sst2", "lm", LIKE_LM, SCRATCH | {"steps": 240}),
    **dict.fromkeys(
        ("gkd", "minillm"),
        Proof("step", "sst2", "lm", LIKE_LM, SCRATCH | {"steps": 500, "lr": 3e-4, "step": ON_OWN_TEXT}),
    ),
    "minilm-v1": NARROW,
    # twenty variants of each row, by a masked-word head, would take 10,000 steps; at the paper's rates 600 leave random
    # weights at the share of the most frequent class
    "tinybert-general": replace(NARROW, task=FEW_VARIANTS | {"lr": 3e-4}),
    "embed-similarity": VECTORS,
    "dpr": replace(VECTORS, data="answers"),
    "margin-mse": RANKING,
    "listnet": RANKING,
    "tinybert-aug": Proof("variants", task=FEW_VARIANTS),
    "minilm-assistant": general(ffn=768),
    "tinybert-6": general(layers=3, hidden=384, ffn=1536),
    "distilbert-squad": Proof("teacher", "squad", task={"max_length": 192, "epochs": 2.0}),
    "t5-spans": scratch(
        "n-gram", student={"family": "t5"}, lr=1e-2, corrupt={"sentinel": PIECES + SPANS - 1, "end": 3}
    ),
    "t5": Proof("teacher", "sst2", "t5", {"layers": 2}, task={"epochs": 6.0, "max_length": 64}),
    "prompted": Proof(
        "majority", teacher="answering", prompt=Prompt.load("sentiment").model_copy(update={"examples": 0})
    ),
    "deberta-v3": scratch("rate", (0,)),
    **dict.fromkeys(("bert", "roberta"), scratch("n-gram", (0,))),
    "xlm": scratch("n-gram", (0,), student={"ffn": None}),
    **dict.fromkeys(("xlnet", "deberta"), scratch("n-gram", (0,), steps=1000)),
    **dict.fromkeys(("albert", "ib-bert"), scratch("n-gram", (0,), student={"embedding": 128}, lr=3e-3)),
    **dict.fromkeys(("electra-small", "electra-base"), scratch("rate", (0,), student={"embedding": 128})),
    **dict.fromkeys(("mobilebert", "mobilebert-tiny"), scratch("step", (0, 1, 2), steps=500, lr=3e-3)),
    "electra-distill": Proof("text", "sst2", "electra", text=GENERAL, task={"max_length": 64, "lr": 3e-4}),
    "distilroberta": replace(general(), text=GENERAL | {"lr": 2e-4}),
}
"""How each recipe is tried, in the order in which they are."""
LM = Proof(
    "n-gram",
    "sst2",
    "vocabulary",
    {"family": "gpt2", "layers": 4, "hidden": 192, "heads": 4},
    SCRATCH | {"steps": 2000, "limit_tokens": 2_100_000},
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(PROOFS))
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--corpus", help="text for stages on text")
    parser.add_argument("--rows", type=int, default=1000, help="train on so many labelled rows")
    parser.add_argument("--texts", type=int, default=4000, help="other rows' texts that a task's recipe reads; 0: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="three or more")
    parser.add_argument("--looks", type=int, default=1, help="how often results were looked at, this time included")
    parser.add_argument("--longer", type=float, default=1, help="take as many times the steps on text")
    parser.add_argument("--wider", type=int, default=1, help="read as many times the rows in a step on text")
    parser.add_argument(
        "--hidden", type=int, help="the width of students that begin with random weights, instead of 128"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recipes"), help="the folder of results")
    args = parser.parse_args()
    if unknown := set(args.recipes) - PROOFS.keys():
        parser.error(f"no recipe is called {', '.join(sorted(unknown))}")
    if not COMMIT["clean"]:
        sys.exit("a result names the commit that it ran on: commit what has changed in compress, recipes or benchmarks")
    chosen = args.recipes or [name for name in PROOFS if name not in NOT_RUN]
    failed = []
    for name in chosen:
        if (args.out / f"{name}.json").exists():
            print(f"{name}: has a result", flush=True)
            continue
        try:
            compare(name, args)
        except Exception:  # what comes next may go well
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def compare(name: str, args: argparse.Namespace) -> None:
    """Run a recipe and its control for every seed, and write what was found."""
    proof = PROOFS[name].enlarge(args)
    recipe = adapt(Recipe.load(name), proof)
    on_text = reads_text(recipe)
    runs: dict[str, list[dict[str, Any]]] = {}
    errors: dict[str, list[NDArray[Any]]] = {}
    for seed in args.seeds:
        splits, others = draw(args.data, proof.data, rows=args.rows, texts=args.texts, seed=seed)
        teacher = proof.teacher if proof.teacher == "minilm" else load_made_teacher(proof.teacher, args)
        teacher = tune_t5(teacher, splits, seed) if proof.teacher == "t5" else teacher
        drawn = (proof.data, args.rows, args.texts, seed)
        trial = Trial(proof.data, splits, drawn, teacher, seed, proof.prompt, proof.int8, proof.measure)
        corpus = args.corpus if on_text else others if proof.without == "teacher" else None
        sides = run(recipe, trial, corpus)
        sides["control"] = run_control(recipe, proof, trial, corpus, sides["recipe"])
        for side, (found, wrong) in sides.items():
            found.pop("tokens", None)
            print(f"{name}, seed {seed}, {side}: {found}", flush=True)
            runs.setdefault(side, []).append(found)
            errors.setdefault(side, []).append(wrong)
    effects = {"control": measure(errors["recipe"], errors["control"])}
    if "without texts" in errors:
        effects["teacher"] = measure(errors["without texts"], errors["control"])
        effects["texts"] = measure(errors["recipe"], errors["without texts"])
    found = {
        "recipe": name,
        "control": proof.without,
        "rows": args.rows,
        "texts": args.texts if "without texts" in errors else 0,
        "seeds": args.seeds,
        "looks": args.looks,
        "longer": args.longer,
        "wider": args.wider,
        "hidden": args.hidden,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "effects": {key: asdict(effect) for key, effect in effects.items()},
        "runs": runs,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_result(args.out / f"{name}.json", found, ("compress", "torch", "transformers", "scipy"))
    for key, effect in effects.items():
        print(
            f"{name}, {key}: {effect.mean:+.4f} ({effect.low:+.4f} to {effect.high:+.4f}), p {effect.p:.2g}", flush=True
        )


def reads_text(recipe: Recipe) -> bool:
    return any(stage.data == "text" for stage in recipe.stages)


def adapt(recipe: Recipe, proof: Proof) -> Recipe:
    """Return the recipe at the sizes and lengths of its proof, with little effort."""

    def numbers(stage: Stage) -> dict[str, Any]:
        """Return what changes in a stage."""
        found = dict(proof.text if stage.data == "text" else proof.task)
        for line in ("corrupt", "step"):
            call, options = getattr(stage, line), found.pop(line, None)
            if call is not None and options:
                found[line] = Call(call.by, dict(call.options) | options)
        if stage.student is not None:
            found["student"] = stage.student.model_copy(update=dict(proof.student))
        return found

    chosen = [recipe.stages[at] for at in proof.stages or range(len(recipe.stages))]
    stages = tuple(stage.model_copy(update=numbers(stage)) if isinstance(stage, Stage) else stage for stage in chosen)
    update: dict[str, Any] = {
        "stages": stages,
        "student": recipe.student.model_copy(update=dict(proof.student)),
        "teacher": recipe.teacher.model_copy(update={"epochs": 3.0}),  # BERT's (Devlin et al. 2019, A.3)
        "teacher_lm": recipe.teacher_lm.model_copy(update=dict(proof.teacher_lm)),
    }
    return recipe.model_copy(update=update | ({"target": TARGET} if recipe.pruning else {})).with_effort("quick")


def run_control(recipe: Recipe, proof: Proof, trial: Trial, corpus: str | None, ours: Scored) -> Scored:
    """Run what the recipe is compared with: of several the one with the best validation score; of stages on text for as
    long as the recipe took."""
    if proof.without == "rate":
        return guess_by_rate(np.asarray(ours[0]["tokens"]))
    if proof.without in UNTRAINED:
        return run(recipe, trial, corpus, untrained=True)["recipe"]
    control = make_control(recipe, proof)
    text = corpus if reads_text(control) else None
    if control.stages[-1].head == "task":
        return best_of((control, *longer_controls(control, proof)), trial, text)
    took = ours[0]
    equal = run(with_steps(control, lambda stage: took["steps_of"][stage.name]), trial, text)["recipe"]
    longer = took["seconds"] / equal[0]["seconds"]
    if longer <= 1:
        return equal
    return run(with_steps(control, lambda stage: round(took["steps_of"][stage.name] * longer)), trial, text)["recipe"]


def best_of(controls: Sequence[Recipe], trial: Trial, corpus: str | None) -> Scored:
    """Return the one with the best validation score. One whose training fails, as its loss is no number, is run again
    at a fifth of its rate; what it said stands with the result."""
    found, lost = list[Scored](), list[str]()
    for control in controls:
        try:
            found.append(run(control, trial, corpus)["recipe"])
        except CompressError as error:
            lost.append(str(error))
            found.append(run(slower(control), trial, corpus)["recipe"])
    best, wrong = max(found, key=lambda each: float(*each[0]["validated"]))
    return best | ({"lost": lost} if lost else {}), wrong


def slower(recipe: Recipe) -> Recipe:
    """Return the recipe with a fifth of the rate in each of its stages that has one of its own."""
    stages = [
        stage if stage.lr == "auto" else stage.model_copy(update={"lr": stage.lr / 5}) for stage in recipe.training
    ]
    return recipe.model_copy(update={"stages": tuple(stages)})


def longer_controls(control: Recipe, proof: Proof) -> list[Recipe]:
    """Return the control with normal effort if it has no teacher, whose distance would tell it to go on; labels of the
    rows alone, since variants of them did harm (docs/LOG.md)."""
    if proof.without not in ("teacher", "text", "two views"):
        return []
    longer = control.with_effort("normal").model_copy(update={"teacher": control.teacher})
    if proof.without == "teacher":
        stages = tuple(stage.model_copy(update={"augment": None}) for stage in longer.training)
        longer = longer.model_copy(update={"stages": stages})
    return [longer]


def with_steps(recipe: Recipe, change: Callable[[Stage], int]) -> Recipe:
    """Return the recipe with another number of steps in each of its stages."""
    stages = [stage.model_copy(update={"steps": change(stage)}) for stage in recipe.training]
    return recipe.model_copy(update={"stages": tuple(stages)})


def make_control(recipe: Recipe, proof: Proof) -> Recipe:
    """Return the recipe without what its proof says."""
    last = recipe.training[-1]
    open_ended = {"epochs": "auto", "steps": None, "lr_end": 0.0, "augment": "auto"}
    match proof.without:
        case "text":
            stages: list[Any] = [stage for stage in recipe.stages if stage.data == "task"]
            specs = [stage.student for stage in recipe.training if stage.student]
            if specs:  # of the last one, whose teacher may be an earlier one
                sizes = {name: getattr(each, name) for each in specs for name in each.model_fields_set}
                stages[0] = stages[0].model_copy(update={"student": specs[-1].model_copy(update=sizes)})
        case "step":
            stages = [
                stage.model_copy(update={"step": None}) if has_mechanism(stage) else stage for stage in recipe.stages
            ]
        case "importance":
            at_once = {"importance": Call("li.magnitude"), "way": 1.0, "copy_layers": "uniform"}
            cut = (recipe.pruning or Recipe.load("prune-taylor").pruning)[-1].model_copy(update=at_once)
            if not recipe.pruning:  # its gates are held to sizes of their own
                gates = next(stage.step for stage in recipe.training if stage.step is not None)
                recipe = recipe.model_copy(update={"target": Target.model_validate(gates.options["sizes"])})
            stages = [cut, last.model_copy(update=open_ended | {"lr": "auto"})]
        case "variants":
            stages = [
                stage.model_copy(update=open_ended | {"augment": None, "lr": "auto"}) for stage in recipe.training
            ]
        case "embed-mse":
            return adapt(Recipe.load("embed-mse"), proof)
        case "two views":
            views = {"step": Call("trial_scores.TwoViews"), "objective": (), "cache_teacher": False}
            stages = [last.model_copy(update=views)]
        case "teacher" if last.head == "task":
            return learn_labels(recipe)
        case "teacher":
            alone = {"kind": "pretrain", "cache_teacher": False, "objective": (Term("bert.masked_lm"),)}
            stages = [last.model_copy(update=alone)]
    return recipe.model_copy(update={"stages": tuple(stages)})


def learn_labels(recipe: Recipe) -> Recipe:
    """Return a recipe whose student learns the labels alone; the same one for all recipes with that student.

    What is made of a teacher's layers learns at the rate of fine-tuning, other students at the recipe's own.
    """
    last = recipe.training[-1]
    spec = recipe.training[0].student or recipe.student
    numbers: dict[str, Any] = {"lr": "auto"}
    if spec.init != "teacher":
        numbers = {"lr": last.lr, "weight_decay": last.weight_decay}
    if recipe.only_kind or spec.init != "teacher":
        numbers["batch"] = last.batch
    line = {"finetune": "labels", "epochs": "auto", "augment": "auto", "max_length": last.max_length} | numbers
    alone = {"student": spec, "stages": (Stage.model_validate(line),), "teacher": recipe.teacher}
    return Recipe.load("hinton").model_copy(update=alone).with_effort("quick")


def has_mechanism(stage: Any) -> bool:
    """Return True of the stages whose mechanism is what a proof is of."""
    return isinstance(stage, Stage) and stage.step is not None and not stage.step.by.endswith("WithoutDropout")


def pretrained(folder: Path, corpus: str | None, recipe: Recipe, *, teacher: str, data: Any = None) -> None:
    """Run a recipe's stages up to a task's head into `folder`."""
    with tempfile.TemporaryDirectory() as out:
        run = Path(out) / "run"
        compress.pretrain(teacher=teacher, recipe=recipe, corpus=corpus, data=data, out=run, console=Console())
        for file in (run / "student").iterdir():
            if file.name != "checksums.json":
                file.rename(folder / file.name)


def from_scratch(name: str, proof: Proof, args: argparse.Namespace, folder: Path) -> None:
    """Train the first stage of a recipe from random weights into `folder`."""
    recipe = adapt(Recipe.load(name), replace(proof.enlarge(args), stages=(0,)))
    student = recipe.student.model_copy(update={"init": "scratch"})
    teacher = load_made_teacher("vocabulary", args)
    pretrained(folder, args.corpus, recipe.model_copy(update={"student": student}), teacher=teacher)


def _teach_answers(args: argparse.Namespace, folder: Path) -> None:
    """Let the language model read prompts with their answers, of rows that no seed draws."""
    whole, order = load_whole(args.data, "sst2")
    prompt = PROOFS["prompted"].prompt
    assert prompt is not None
    words = [prompt.labels[name][0] for name in label_names(prompt, whole.task.labels)]
    others = whole.train.select(np.sort(order[POOL:]))
    with tempfile.TemporaryDirectory() as made:
        text = Path(made) / "answers.txt"
        rows = (prompt.render(row["text"], None, words[row["label"]]) for row in others)
        text.write_text("\n\n".join(" ".join(row.split()) for row in rows), encoding="utf-8")
        proof = replace(LM, student={"layers": None}, text={**LM.text, "steps": 8000}, stages=(0,))
        pretrained(folder, str(text), adapt(Recipe.load("minillm"), proof), teacher=load_made_teacher("lm", args))


def _make_vocabulary(args: argparse.Namespace, folder: Path) -> None:
    texts = load_corpus(args.corpus).documents()
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=PIECES, special_tokens=special, show_progress=False)
    made.train_from_iterator((text for text, _ in zip(texts, range(2000), strict=False)), trainer)
    spans = [f"<extra_id_{number}>" for number in reversed(range(SPANS))]
    known = made.get_vocab()
    pieces = {piece: at for at, piece in enumerate([*sorted(known, key=lambda piece: known[piece]), *spans])}
    tokenizer = BertTokenizer(
        vocab=pieces, do_lower_case=True, model_max_length=128, additional_special_tokens=spans, eos_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(pieces), max_position_embeddings=128, hidden_size=128, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MADE: Mapping[str, Callable[[argparse.Namespace, Path], None]] = {
    "vocabulary": _make_vocabulary,
    "lm": partial(from_scratch, "minillm", LM),
    "answering": _teach_answers,
    "electra": partial(from_scratch, "electra-small", PROOFS["electra-small"]),
    "t5": partial(from_scratch, "t5-spans", PROOFS["t5-spans"]),
}


def load_made_teacher(name: str, args: argparse.Namespace) -> str:
    """Return the folder of a teacher that is made here, kept from an earlier run where there is one."""
    if args.corpus is None:
        sys.exit(f"{name}: give --corpus")
    enlarged = (1, 1, None) if name == "vocabulary" else (args.longer, args.wider, args.hidden)
    size = "" if enlarged == (1, 1, None) else "-{:g}-{}-{}".format(*enlarged)
    folder = home() / "recipes-for-real" / f"{name}-{load_corpus(args.corpus).fingerprint[:12]}{size}"
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            MADE[name](args, made)
    return str(folder)


def tune_t5(folder: str, splits: Mapping[str, Any], seed: int) -> str:
    """Fine-tune a T5 to answer the task as text; return its folder, beside `folder`."""
    answers = Path(f"{folder}-tuned-{len(splits['train'])}-{seed}")
    if not answers.is_dir():
        recipe = with_steps(make_control(adapt(Recipe.load("t5"), PROOFS["t5"]), PROOFS["t5"]), lambda stage: 1000)
        student = recipe.student.model_copy(update={"layers": None})
        with atomic_folder(answers) as made:
            pretrained(made, None, recipe.model_copy(update={"student": student}), teacher=folder, data=dict(splits))
    return str(answers)


if __name__ == "__main__":
    main()
