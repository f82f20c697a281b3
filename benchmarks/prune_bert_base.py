"""How long does it take to prune BERT-base by half, and how much memory, beside torch-pruning?

    python -m benchmarks.prune_bert_base --rounds 5 --out benchmarks/results/prune_bert_base_<hardware>_<yyyymm>.json

BERT-base with a classifier and random weights, to half of its heads (6), neurons (1,536) and width (384), by the size
of the weights. Ours: `SlicePlan.from_model`, `magnitude`, `choose`, `slice_model`. Theirs: `BasePruner` and `step`, as
its users have to call it. Every run has a process of its own, the two take turns; the clock runs over the pruning only,
and memory is the most that the process holds meanwhile, above what it held before: the model. Then each result is
saved, loaded and asked again: as it comes, and theirs also with the config set right by hand.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import make_parser, run_worker, write_result

SIDES = ("compress", "torch-pruning")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--side", choices=SIDES, help="one run of one side, in this process")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run(args.side)))
        return
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            found = run_worker([sys.executable, "-m", "benchmarks.prune_bert_base", "--side", side])
            runs[side].append(found)
            print(f"{side:14} {found['seconds']:6.2f} s  {found['extra_mb']:6.0f} MB above the model", flush=True)
    report(runs, args.out)


def run(side: str) -> dict[str, Any]:
    """Prune once, and see whether the result loads."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig()).eval()
    batch = {"input_ids": torch.randint(1000, 20_000, (1, 32)), "attention_mask": torch.ones(1, 32, dtype=torch.long)}
    prune = prepare_ours(model) if side == "compress" else prepare_torch_pruning(model, batch)
    before = reset_peak_mb()
    begun = time.perf_counter()
    small = prune()
    seconds, peak = time.perf_counter() - begun, memory_mb("VmHWM")
    facts = {"seconds": seconds, "model_mb": before, "extra_mb": peak - before, "parameters": small.num_parameters()}
    loads = {"as it comes": measure_difference(small, batch)}
    if side == "torch-pruning":
        mend_config(small)
        loads["config set by hand"] = measure_difference(small, batch)
    return facts | {"difference_when_loaded": loads, "threads": torch.get_num_threads()}


def prepare_ours(model: Any) -> Callable[[], Any]:
    from compress.slicing.cut import slice_model
    from compress.slicing.plan import SlicePlan
    from compress.slicing.select import choose, magnitude
    from compress.slicing.sizes import Sizes

    def prune() -> Any:
        plan = SlicePlan.from_model(model)
        sizes = Sizes.from_request(model.config, heads=0.5, ffn=0.5, hidden=0.5)
        return slice_model(model, choose(plan, magnitude(model, plan), sizes))

    return prune


def prepare_torch_pruning(model: Any, batch: dict[str, Any]) -> Callable[[], Any]:
    import torch_pruning
    from transformers.models.bert.modeling_bert import BertSelfAttention

    attentions = [module for module in model.modules() if isinstance(module, BertSelfAttention)]
    heads = {each: a.num_attention_heads for a in attentions for each in (a.query, a.key, a.value)}

    def prune() -> Any:
        pruner = torch_pruning.pruner.BasePruner(
            model, batch, importance=torch_pruning.importance.GroupMagnitudeImportance(), pruning_ratio=0.5,
            head_pruning_ratio=0.5, num_heads=heads, prune_num_heads=True, prune_head_dims=False,
            output_transform=lambda out: out.logits, ignored_layers=[model.classifier],
            in_channel_groups={}, out_channel_groups={},
        )  # fmt: skip
        pruner.step()
        for attention in attentions:  # without which it does not run
            attention.num_attention_heads = pruner.num_heads[attention.query]
            attention.all_head_size = attention.query.out_features
            attention.attention_head_size = attention.all_head_size // attention.num_attention_heads
        return model

    return prune


def mend_config(model: Any) -> None:
    layer = model.bert.encoder.layer[0]
    model.config.hidden_size = layer.attention.self.query.in_features
    model.config.num_attention_heads = layer.attention.self.num_attention_heads
    model.config.intermediate_size = layer.intermediate.dense.out_features


def measure_difference(model: Any, batch: dict[str, Any]) -> float | str:
    """Return the largest difference of any logit once the model is saved and loaded; or what the load says."""
    import torch

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        try:
            again = type(model).from_pretrained(folder).eval()
        except RuntimeError as error:
            return f"does not load: {str(error).partition('.')[0]}"
        return float((model(**batch).logits - again(**batch).logits).abs().max())


def reset_peak_mb() -> float:
    """Return what this process holds now; Linux forgets the most it has held before."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_mb("VmRSS")


def memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def report(runs: dict[str, list[dict[str, Any]]], out: Path | None) -> None:
    middle = {
        side: {fact: median(run[fact] for run in each) for fact in ("seconds", "extra_mb")}
        for side, each in runs.items()
    }
    for side, each in runs.items():
        low, high = (choose(run["seconds"] for run in each) for choose in (min, max))
        print(
            f"{side:14} median {middle[side]['seconds']:.2f} s ({low:.2f} to {high:.2f}), "
            f"{middle[side]['extra_mb']:.0f} MB above the model, {each[0]['parameters']:,} parameters, "
            f"loaded: {each[0]['difference_when_loaded']}"
        )
    ratios = {fact: middle["torch-pruning"][fact] / middle["compress"][fact] for fact in ("seconds", "extra_mb")}
    print(f"torch-pruning takes {ratios['seconds']:.1f}x the time and {ratios['extra_mb']:.1f}x the memory")
    facts = {"runs": runs, "median": middle, "ratios": ratios, "torch-pruning": version("torch-pruning")}
    write_result(out, facts)


if __name__ == "__main__":
    main()
