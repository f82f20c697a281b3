"""What the command line refuses, in the words of tests/messages/cli.txt."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import command, messages, tiny

REFUSED = """
destill
recipes tinybrt
distill --techer minilm
distill --teacher minilm
distill --teacher minilm --data intents --kind clasification
distill --teacher minilm --data a --seed 1 --data b
distill --teacher minilm --data intents --set a=1 --set b=2 --plan
search --teacher minilm
search --data intents
inspect tinybertt
inspect tinybert --teacher minilm
inspect absent/folder/train.tsv
students bert-bsae
report nowhere --json
predict {empty} text
bench
bench {empty}
bench {bundle} --threads two
bench {bundle} --seq 8,
bench {bundle} --batch -1
bench {bundle} --batch 1000000000
bench {bundle} --seq 0
bench {bundle} --rounds 1
bench {bundle} --seq 4000
bench {bundle} --data intents
gate {bundle} {bundle} --max-slower 5
gate {bundle} {bundle} --max-drop 0.1
inspect {tmp}/windows.csv
gate {bundle} {bundle} --markdown {tmp}/same --junit {tmp}/same
gate {bundle} {bundle} --markdown {tmp}/same --junit {tmp}/empty/../same
bench {bundle} --device browser --visitors 2 --json
bench {bundle} --timeout 5
quantize {bundle} --data intents --method dynamic --form qdq
quantize {bundle} --data intents --calibration entropy --percentile 99
prune {bundle} --data intents --out {tmp}/out --layers 1 --threads 2
search --worker --storage {tmp}/x.db --plan --teacher nosuch
search --json show {tmp}
search show {tmp} --train
gate {bundle} {bundle} --text words
inspect tinybert --text words
export {bundle} --for ort --out {tmp}/out --text words
export {bundle} --for ort --out {tmp}/out --max-drop 3
trim {bundle} --corpus {tmp} --out {tmp}/out --text words
trim {bundle} --corpus {tmp} --out {tmp}/out --max-drop 3
gate {bundle} {file} --data intents
""".strip().splitlines()


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bundle = tiny.bundle(tmp_path / "bundle")
    (tmp_path / "lone.onnx").write_bytes(bundle.files()["fp32"].read_bytes())
    (tmp_path / "empty").mkdir()
    (tmp_path / "windows.csv").write_bytes(b"text,label\n\x93fine\x94,1\nbad,0\n")
    given = {"tmp": tmp_path, "empty": tmp_path / "empty", "bundle": bundle.path, "file": tmp_path / "lone.onnx"}

    def refusal(line: str) -> Callable[[], str]:
        def call() -> str:
            result = command.run(*line.format(**given).split())
            assert (result.code, result.out) == (2, ""), line
            return result.err.strip()

        return call

    messages.check("cli", {line: refusal(line) for line in REFUSED}, {str(tmp_path): "TMP"})
    assert not (tmp_path / "same").exists()
