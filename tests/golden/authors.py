"""Compute authors.json: what the authors' own files, unmodified, return on the inputs that stand beside the values.

    python tests/golden/authors.py FOLDER > tests/golden/authors.json

FOLDER has these files, which are not part of this repository:

    l0_module.py                 princeton-nlp/CoFiPruning at da855a8, models/
    minilmv2.py                  bloomberg/minilmv2.bb at 0d78e20, minilmv2/
    data_augmentation.py         huawei-noah/Pretrained-Language-Model at 0598f02, TinyBERT/
    tokenization.py              the same, TinyBERT/transformer/
    mobilebert/distill_util.py   google-research/google-research at 0c1bbe5; these two call a dozen functions of
    mobilebert/lamb_optimizer.py TensorFlow 1, whose documented values `tensorflow` below gives by NumPy; the values
                                 here came from their code without licence headers and some comments

Microsoft published no code of MiniLM's distillation. Bloomberg's of version 2 has the two losses of version 1 as
special cases: as many relation heads as attention heads, the relations query-key and value-value.
"""

import json
import random
import sys
import tempfile
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent


def module(name: str, **attributes: Any) -> ModuleType:
    """Put a module of these attributes where `import` finds it."""
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(attributes)
    return made


# CoFi


def cofi() -> dict[str, Any]:
    """Hard concrete gates of two layers of six neurons; the Lagrangian with each layer's gates held by themselves."""
    module("black", main=None)
    l0 = import_module("l0_module")
    log_alpha = [[-4.0, -1.5, -0.2, 0.3, 1.1, 3.7], [0.9, -0.6, 2.4, -2.8, 4.5, 0.1]]
    inputs = {
        "log_alpha": log_alpha,
        "uniform": [[0.03, 0.91, 0.5, 0.22, 0.64, 0.48], [0.15, 0.77, 0.35, 0.99, 0.08, 0.57]],
        "multipliers": [[0.3, -0.2], [1.7, 0.6]],
        "left": 0.5,
        "warm_up": 40,
        "step": 30,
    }
    config = SimpleNamespace(
        hidden_size=8, intermediate_size=6, num_attention_heads=2, num_hidden_layers=1, vocab_size=9
    )
    total, gradients = 0.0, []
    found: dict[str, list[Any]] = {"active": [], "drawn": [], "settled": [], "gone": [], "target": []}
    for layer, row in enumerate(log_alpha):
        kind = "structured_heads+structured_mlp+layer"
        made = l0.L0Module(config, lagrangian_warmup=inputs["warm_up"], target_sparsity=0.5, pruning_type=kind)
        made.int_loga.data = torch.tensor([row])
        made.intlayer_loga.data.fill_(100.0)
        made.parameters_per_dim |= {"head": 0, "intermediate": 1}  # neurons alone are counted
        made.prunable_model_size = len(row)
        made.lambda_1.data, made.lambda_2.data = torch.tensor([pair[layer] for pair in inputs["multipliers"]]).unbind()
        held, gone, target = made.lagrangian_regularization(inputs["step"])
        held.backward()
        total += held.item()
        gradients.append(made.int_loga.grad[0].tolist())
        alone, noise = torch.tensor(row), torch.tensor(inputs["uniform"][layer])
        made.get_eps = lambda _, noise=noise: noise
        found["active"].append((1 - made.cdf_qz(0, alone)).tolist())
        found["drawn"].append(made._sample_z(alone).tolist())
        found["settled"].append(made._deterministic_z(len(row), alone).tolist())
        found["gone"].append(gone.item())
        found["target"].append(target)
    return {"inputs": inputs, "values": found | {"lagrangian": total, "gradient": gradients}}


# MiniLM, version 1


class Told(nn.Module):
    """Stand for a model of one layer, whose queries, keys and values are its states rolled by 0, 1 and 2 dimensions."""

    def __init__(self, states_BLD: torch.Tensor) -> None:
        super().__init__()
        self.states_BLD = states_BLD
        self.config = SimpleNamespace(hidden_size=states_BLD.shape[-1])
        own = SimpleNamespace(
            **{name: lambda x, by=by: x.roll(by, -1) for by, name in enumerate(("query", "key", "value"))}
        )
        self.encoder = SimpleNamespace(layer=[SimpleNamespace(attention=SimpleNamespace(self=own))])

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=[self.states_BLD])


def minilm() -> dict[str, Any]:
    """Four heads; the student's are 8 of hidden_student's 16 dimensions, the teacher's all of hidden_teacher's."""
    official = import_module("minilmv2")
    with np.load(HERE / "losses.npz") as stored:
        student, teacher, mask = (
            torch.from_numpy(stored[name]) for name in ("hidden_student", "hidden_teacher", "mask")
        )
    values = {}
    for name, pair in (("attention", (1, 2)), ("value_relation", (3, 3))):
        made = official.MiniLM(Told(teacher), Told(student[..., :8]), L=1, M=1, relations={pair: 1.0}, A_r=4)
        values[name] = made(None, None, mask)[0].item()
    return {"inputs": {"heads": 4, "student_width": 8, "rolled": [0, 1, 2]}, "values": values}


# MobileBERT


class Variable(np.lib.mixins.NDArrayOperatorsMixin):
    """Stand for a TensorFlow variable."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, np.array(value, np.float64)
        self.shape = SimpleNamespace(as_list=lambda: self.value.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(function, method)(*(np.asarray(each) for each in inputs), **options)

    def assign(self, value: Any) -> None:
        self.value = np.array(value)


def tensorflow() -> Any:
    """Give the functions of TensorFlow 1 that MobileBERT's schedule and optimiser call; `tf.now` is the global step."""
    kept: dict[str, Variable] = {}

    def polynomial_decay(rate: float, step: float, steps: float, end_learning_rate: float, power: float) -> float:
        return (rate - end_learning_rate) * (1 - min(step, steps) / steps) ** power + end_learning_rate

    def piecewise_constant(x: float, boundaries: list[float], values: list[float]) -> float:
        return values[sum(x > each for each in boundaries)]

    tf = module("tensorflow.compat.v1", now=0, float32=None, mod=np.mod, minimum=np.minimum, where=np.where)
    vars(tf).update(multiply=np.multiply, square=np.square, sqrt=np.sqrt, zeros_initializer=lambda: None)
    vars(tf).update(math=SimpleNamespace(greater=np.greater), group=lambda *_, name: None)
    vars(tf).update(linalg=SimpleNamespace(norm=lambda x, ord: np.sqrt(np.square(np.asarray(x)).sum())))
    vars(tf).update(get_variable=lambda name, shape, **_: kept.setdefault(name, Variable(name, np.zeros(shape))))
    tf.train = SimpleNamespace(
        get_or_create_global_step=lambda: tf.now,
        polynomial_decay=polynomial_decay,
        piecewise_constant=piecewise_constant,
        Optimizer=type("Optimizer", (), {"__init__": lambda self, *_: None}),
    )
    module("tensorflow", compat=SimpleNamespace(v1=tf))
    module("tensorflow.compat", v1=tf)
    return tf


def mobilebert() -> dict[str, Any]:
    """Factors of the rate of three layers in each step, and the layers that LAMB makes of given gradients with them."""
    tf = tensorflow()
    util, lamb = import_module("mobilebert.distill_util"), import_module("mobilebert.lamb_optimizer")
    layers, total, rate = 2, 40, 0.05
    factors = []
    for tf.now in range(total + 1):
        base = util.get_background_lr(tf.now, total // layers)
        factors.append(
            [float(util.layer_wise_learning_rate(n, total // layers, background_lr=base)) for n in range(layers)]
        )
    first = [[[0.5, -1.0], [2.0, 0.25 * (n + 1)]] for n in range(layers)]
    gradients = [
        [np.sin([[s, n + 2], [s * n, s + 3 * n]]).round(2).tolist() for n in range(layers)] for s in range(total + 1)
    ]
    variables = [Variable(f"bert/encoder/layer_{n}/kernel:0", first[n]) for n in range(layers)]
    optimiser = lamb.LAMBOptimizer(
        rate, weight_decay_rate=0.01, use_layer_wise_warmup=True, total_warmup_phases=layers, num_train_steps=total
    )
    weights = []
    for tf.now in range(total + 1):
        optimiser.apply_gradients(zip(map(np.array, gradients[tf.now]), variables, strict=True), tf.now)
        weights.append([each.value.tolist() for each in variables])
    inputs = {"layers": layers, "total": total, "rate": rate, "weights": first, "gradients": gradients}
    return {"inputs": inputs, "values": {"factors": factors, "weights": weights}}


# TinyBERT's augmentation


def tinybert(folder: Path) -> dict[str, Any]:
    """Say which words of a text are asked about, what is near them, and what variants are made of given candidates."""
    package = module("transformer", __path__=[str(folder)], BertForMaskedLM=None)
    module("transformer.file_utils", cached_path=None)
    package.BertTokenizer = import_module("transformer.tokenization").BertTokenizer
    np.Inf = np.inf
    official, tokenization = import_module("data_augmentation"), import_module("transformer.tokenization")

    text = (
        "i 've seen the café 's well-made film , a 1984 debut by naïve u.s. actors : it doesn't bore , didn 't it ? "
        "they'll just love having this serious story 2nd"
    )
    glove = "badly 1 0.1\npoorly 2 0.3\n, 0.9 0.1\nwell -1 0\nawfully 0.7 0.9\nmp3 0.5 0.1"
    candidates = {"film": ["movie", "story", "play"], "good": ["fine", "great"], "slow": ["dull"]}
    short, copies, probability = "the film is good but slow", 6, 0.4
    draws = {"picked": [0, 1, 0, 2, 0, 0, 1, 1, 0], "chance": [0.1, 0.7, 0.39, 0.41, 0.2, 0.9, 0.95, 0.6]}

    asked: list[str] = []

    class Asked(official.DataAugmentor):
        def _word_augment(self, sentence: str, mask_token_idx: int, mask_token: str) -> list[str]:
            asked.append(mask_token)
            return list(candidates.get(mask_token, [mask_token]))

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(glove)
        file.flush()
        near = official.prepare_embedding_retrieval(file.name, vocab_size=6)
    tokenizer = SimpleNamespace(basic_tokenizer=tokenization.BasicTokenizer(do_lower_case=True))
    made = Asked(None, tokenizer, *near, 4, 0, probability)
    made.augment(text)
    picked, chances = cycle(draws["picked"]), cycle(draws["chance"])
    random.choice = lambda some: some[next(picked) % len(some)]
    random.random = lambda: next(chances)
    made.N = copies
    inputs = {"text": text, "glove": glove, "near": "badly", "most": 4, "short": short, "candidates": candidates}
    inputs |= {"copies": copies, "probability": probability, **draws}
    values = {"words": list(asked), "near": made._word_distance("badly"), "variants": made.augment(short)}
    return {"inputs": inputs, "values": values}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    found = {"cofi": cofi(), "minilm": minilm(), "mobilebert": mobilebert(), "tinybert": tinybert(folder)}
    lines = (f"{json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in found.items())
    print("{" + ",\n".join(lines) + "}")
