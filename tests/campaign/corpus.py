"""Bad input for every command: what is typed after the good words, and a piece of what must be said of it.

{bad}/NAME is one of FILES; of an option that is given twice, the second counts. `a | b` is one case: b must be in the
message, whatever its case.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.campaign.works import PROMPT, RECIPE

GOOD: Mapping[str, str] = {
    "distill": "--teacher {teacher} --recipe {recipe} --data {data} --out {out}",
    "pretrain": "--teacher {teacher} --recipe {general} --corpus {corpus} --out {out}",
    "label": "--teacher {speaker} --prompt {prompt} --data {texts} --out {out}/all.jsonl",
    "prune": "{model} --recipe {cuts} --data {data} --layers 2 --gate warn --out {out}",
    "export": "{bundle} --out {out}",
    "quantize": "{bundle} --data {data} --out {out}",
    "trim": "{bundle} --data {data} --out {out}",
    "predict": "{bundle} good",
    "bench": "{bundle} --seq 8 --rounds 2 --runs 1",
    "report": "{bundle}",
    "recipes": "",
    "students": "{teacher}",
    "search": "--teacher {teacher} --data {data} --space {space} --seq 16 --shapes 7 --trials 5 --out {out}",
    "search show": "",
    "clean": "",
}
HEAD = b"text\tlabel\n"
ROWS = HEAD + b"a good film\tpositive\na bad film\tnegative\n" * 12
SPOILT: Mapping[str, tuple[str, str, str]] = {
    "loss": ("tinybert.hidden", "tinybert.hiden", "hiden"),
    "loss-paper": ("tinybert.hidden", "tinybrt.hidden", "tinybrt"),
    "loss-dots": ("tinybert.hidden", "..a.b", "..a.b"),
    "loss-number": ("tinybert.hidden", "7", "7"),
    "loss-private": ("tinybert.hidden", "tinybert._hidden", "_hidden"),
    "loss-module": ("tinybert.hidden", "os.system", "os.system"),
    "loss-main": ("tinybert.hidden", "unittest.__main__.main", "unittest"),
    "loss-option": ("temperature: 2.0", "temprature: 2.0", "temprature"),
    "loss-value": ("temperature: 2.0", "temperature: hot", "hot"),
    "loss-negative": ("temperature: 2.0", "temperature: -1", "temperature"),
    "loss-layers": ("layers: last", "layers: lest", "lest"),
    "loss-heads": ("layers: last, heads: 2", "layers: last, heads: 0", "heads"),
    "key": ("steps: 12", "stpes: 12", "stpes"),
    "word": ("steps: 12", "steps: many", "steps"),
    "zero": ("steps: 12", "steps: 0", "steps"),
    "minus": ("steps: 12", "steps: -3", "steps"),
    "half": ("steps: 12", "steps: 1.5", "steps"),
    "batch": ("batch: 16", "batch: 0", "batch"),
    "nan": ("lr: 1.0e-3", "lr: .nan", "lr"),
    "inf": ("lr: 1.0e-3", "lr: .inf", "lr"),
    "rate": ("lr: 1.0e-3", "lr: -1", "lr"),
    "weight": ("weight: 0.5", "weight: much", "weight"),
    "same": ("distill: prediction", "distill: intermediate", "intermediate"),
    "path": ("distill: prediction", "distill: ../../prediction", "prediction"),
    "heads": ("heads: 2}", "heads: 3}", "heads"),
    "layers": ("layers: 1,", "layers: 0,", "layers"),
    "family": ("student: {", "student: {family: brt, ", "brt"),
    "init": ("student: {", "student: {init: nowhere, ", "nowhere"),
    "objective": ("objective:", "objectives:", "objectives"),
}
"""Recipes: what is replaced in a good one, by what, and what must be said of it."""
FILES: Mapping[str, bytes] = {
    # data
    "empty.tsv": b"",
    "header.tsv": HEAD,
    "one-cell.tsv": ROWS + b"alone\n",
    "three-cells.tsv": ROWS + b"a\tb\tc\n",
    "latin1.tsv": ROWS + b"caf\xe9\tpositive\n",
    "nul.parquet": b"PAR1" + bytes(64) + b"PAR1",
    "twice.tsv": b"text\ttext\tlabel\na\tb\tc\n",
    "one-class.tsv": HEAD + b"a good film\tpositive\n" * 20,
    "blank.tsv": HEAD + b" \tpositive\n\tnegative\n",
    "two-rows.tsv": HEAD + b"a\tx\nb\ty\n",
    "unlabelled.tsv": b"text\n" + b"a film\n" * 20,
    "open-quote.csv": b'text,label\nfine,a\n"never closed,b\nmore,c\n',
    "list.jsonl": b"[1, 2]\n",
    "cut.jsonl": b'{"text": "a", "label": 1}\n{"text"\n',
    "deep.jsonl": b"[" * 20_000,
    "deep.json": b'{"a":' * 20_000,
    "empty.json": b"[]",
    "scalar.json": b"7",
    "text.xlsx": b"PK\x03\x04",
    "broken.csv.gz": b"\x1f\x8b\x08\x00" + bytes(20),
    "nan.tsv": b"text\tlabel\na\t0.5\nb\tnan\nc\t0.75\n" * 6,
    "same-names.tsv": HEAD + b"a good film\tpositive\na bad film\tPositive \n" * 1,
    "bad.conll": b"a b c d\ne\n",
    "bad-squad.json": b'{"version": "1.1", "data": [{"paragraphs": 3}]}',
    # recipes
    "empty.yaml": b"",
    "list.yaml": b"[1, 2]",
    "open.yaml": b"stages: [",
    "tab.yaml": b"a:\n\tb: 1",
    "deep.yaml": b"[" * 20_000,
    "bomb.yaml": b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 122)),
    "python.yaml": b"a: !!python/object/apply:os.system ['true']",
    "latin1.yaml": b"about: caf\xe9",
    "twice.yaml": b"about: a\nabout: b\n",
    "self.yaml": b"extends: self.yaml\n",
    "above.yaml": b"extends: ../nowhere.yaml\n",
    "no-stages.yaml": RECIPE[: RECIPE.index("stages:")].encode() + b"stages: []\n",
    "no-paper.yaml": RECIPE[RECIPE.index("about:") :].encode(),
    **{f"{name}.yaml": RECIPE.replace(old, new, 1).encode() for name, (old, new, _) in SPOILT.items()},
    # prompts and endpoints
    "p-empty.yaml": b"",
    "p-label.yaml": b"template: '{{ text }}'\nlabels: {a: b, c: d}\n",
    "p-text.yaml": b"template: 'x {{ label }}'\nlabels: {a: b, c: d}\n",
    "p-jinja.yaml": b"template: '{{ text {{ label }}'\nlabels: {a: b, c: d}\n",
    "p-code.yaml": b"template: '{{ text.__class__.__mro__ }} {{ label }}'\nlabels: {a: b, c: d}\n",
    "p-name.yaml": b"template: '{{ txet }} {{ label }}'\nlabels: {a: b, c: d}\n",
    "p-one.yaml": b"template: '{{ text }} {{ label }}'\nlabels: {a: b}\n",
    "p-same.yaml": b"template: '{{ text }} {{ label }}'\nlabels: {a: b, c: b}\n",
    "p-key.yaml": PROMPT.encode() + b"normalize: none\n",
    "p-normalise.yaml": PROMPT.encode() + b"normalise: some\n",
    "p-examples.yaml": PROMPT.encode() + b"examples: -1\n",
    "e-url.yaml": b"url: ftp://x\nmodel: m\n",
    "e-query.yaml": b"url: http://x/v1?key=1\nmodel: m\n",
    "e-user.yaml": b"url: http://me:pass@x/v1\nmodel: m\n",
    "e-model.yaml": b"url: http://127.0.0.1:9/v1\n",
    "e-mode.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\nmode: ecko\n",
    "e-key.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\nkey: sk-1-2\n",
    "e-unset.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\nkey: SURELY_NOT_SET\n",
    "e-calls.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\nconcurrency: 1000\n",
    "e-timeout.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\ntimeout: 0\n",
    "e-down.yaml": b"url: http://127.0.0.1:9/v1\nmodel: m\nretries: 0\n",
    # others
    "file": b"mine",
    "no.onnx": b"PK\x03\x04 a zip",
    "empty.onnx": b"",
    "no.xml": b"<net>",
    "no.tflite": b"TFL",
    "no.json": b"{",
    "other.json": b"{}",
    "deep-result.json": b"[" * 20_000,
    "empty.txt": b"\n \n",
    "dir/notes.md": b"mine",
    "bundle/manifest.json": b"{}",
    "null/manifest.json": b"null",
    "deep/manifest.json": b"[" * 20_000,
    "checkpoint/config.json": b"{",
    "checkpoint-list/config.json": b"[]",
    "checkpoint-deep/config.json": b'{"a":' * 20_000,
    "checkpoint-alien/config.json": b'{"model_type": "alien"}',
    "checkpoint-bare/config.json": b'{"model_type": "bert"}',
    "checkpoint-code/config.json": b'{"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}}',
    "run/run.json": b"{}",
    "run/recipe.yaml": b"{}",
    "study/run.json": b"{}",
    "study/search.yaml": b"{}",
}
_DATA = """
    --data {bad}/nowhere.tsv | nowhere.tsv
    --data {bad}/dir | dir
    --data {bad}/empty.tsv | empty
    --data {bad}/header.tsv | header.tsv
    --data {bad}/one-cell.tsv | line 26
    --data {bad}/latin1.tsv | line 26
    --data {bad}/nul.parquet | nul.parquet
    --data {bad}/unlabelled.tsv | label
    --data {bad}/cut.jsonl | line 2
    --data {bad}/deep.jsonl | deep.jsonl
    --data "" | data
    --text nowhere | nowhere
    --label nowhere | nowhere
"""
_SHARED = """
    --seed -5 | seed
    --seed 99999999999999999999999 | seed
    --seed x | seed
    --precision fp64 | precision
    --gate perhaps | gate
    --nonsense | nonsense
    --out {bad}/file | file
    --out {bad}/file/run | file
    --out {bad}/dir | dir
    --resume --out {out} | resume
"""
_TEACHERS = """
    --teacher {bad}/nowhere | nowhere
    --teacher ./nowhere | nowhere
    --teacher bert-bse | bert-base
    --teacher {bad}/file | file
    --teacher {bad}/dir | config.json
    --teacher {bad}/checkpoint | config.json
    --teacher {bad}/checkpoint-list | config.json
    --teacher {bad}/checkpoint-deep | config.json
    --teacher {bad}/checkpoint-alien | alien
    --teacher {bad}/checkpoint-bare | checkpoint-bare
    --teacher {bad}/checkpoint-code | checkpoint-code
    --teacher "" | config.json
"""
_RECIPES = "".join(f"--recipe {{bad}}/{name}.yaml | {word}\n" for name, word in {
    "empty": "mapping", "list": "list.yaml", "open": "yaml", "tab": "yaml", "deep": "deep.yaml", "bomb": "bomb.yaml",
    "python": "python.yaml", "latin1": "latin1.yaml", "twice": "about", "self": "self", "above": "nowhere",
    "no-stages": "stages", "no-paper": "paper", "nowhere": "nowhere.yaml",
    **{name: word for name, (*_, word) in SPOILT.items()},
}.items())  # fmt: skip
_BUNDLES = """
    {bad}/nowhere | nowhere
    {bad}/file | file
    {bad}/dir | dir
    {bad}/bundle | manifest
    {bad}/null | manifest
    {bad}/deep | manifest
"""
BAD: Mapping[str, str] = {
    "distill": f"""{_DATA}{_SHARED}{_TEACHERS}{_RECIPES}
    --data {{bad}}/three-cells.tsv | line 26
    --data {{bad}}/twice.tsv | text
    --data {{bad}}/one-class.tsv | positive
    --data {{bad}}/blank.tsv | empty
    --data {{bad}}/two-rows.tsv | rows
    --data {{bad}}/open-quote.csv | line 3
    --data {{bad}}/list.jsonl | line 1
    --data {{bad}}/deep.json | deep.json
    --data {{bad}}/empty.json | empty
    --data {{bad}}/scalar.json | scalar.json
    --data {{bad}}/text.xlsx | xlsx
    --data {{bad}}/broken.csv.gz | broken.csv.gz
    --data {{bad}}/nan.tsv | label
    --data {{bad}}/bad.conll | bad.conll
    --data {{bad}}/bad-squad.json | bad-squad.json
    --data /dev/null | /dev/null
    --data intnets | intents
    --recipe distilbrt | distilbert
    --recipe "" | recipe
    --set stages.0.stpes=1 | steps
    --set stages.7.lr=1 | 2 entries
    --set stages.0.lr | =
    --set =1 | =
    --set stages.0.lr=-1 | lr
    --set stages.0.lr=nan | lr
    --set stages.0.steps=1e99 | steps
    --set stages.0.epochs=1e9 --set stages.0.steps= | stages
    --set stages.0.micro_batch=3 | micro_batch
    --set stages.1.max_length=100000 | max_length
    --set stages.1.max_length=0 | max_length
    --set student.heads=3 --set teacher.steps=1 --gate warn | heads
    --set teacher.steps=1 --set teacher.lr=1e-9 | teacher
    --corpus {{bad}}/nowhere | nowhere
    --prompt sentimet | sentiment
    --metric acuracy | accuracy
    --metric pearson | pearson
    --kind regression | number
    --kind tagging | validation
    --kind weather | kind
    --text text --text label --text text | text""",
    "pretrain": f"""{_SHARED.replace("--gate perhaps | gate", "")}{_TEACHERS}
    --corpus {{bad}}/nowhere | nowhere
    --corpus {{bad}}/empty.txt | empty.txt
    --recipe {{recipe}} | task
    --recipe {{bad}}/key.yaml | stpes
    --recipe {{bad}}/deep.yaml | deep.yaml
    --set stages.0.lr=x | lr""",
    "label": """
    --teacher {bad}/nowhere | nowhere
    --teacher {teacher} | teacher
    --teacher {bad}/checkpoint-deep | config.json
    --teacher gtp2 | gpt2
    --prompt sentimet | sentiment
    --prompt {bad}/nowhere.yaml | nowhere.yaml
    --prompt {bad}/p-empty.yaml | p-empty
    --prompt {bad}/p-label.yaml | label
    --prompt {bad}/p-text.yaml | text
    --prompt {bad}/p-jinja.yaml | template
    --prompt {bad}/p-code.yaml | p-code
    --prompt {bad}/p-name.yaml | txet
    --prompt {bad}/p-one.yaml | labels
    --prompt {bad}/p-same.yaml | labels
    --prompt {bad}/p-key.yaml | normalise
    --prompt {bad}/p-normalise.yaml | normalise
    --prompt {bad}/p-examples.yaml | examples
    --prompt {bad}/deep.yaml | deep.yaml
    --data {bad}/nowhere.txt | nowhere.txt
    --data {bad}/empty.txt | empty.txt
    --data {bad}/latin1.tsv | line 26
    --teacher {bad}/e-url.yaml | url
    --teacher {bad}/e-query.yaml | url
    --teacher {bad}/e-user.yaml | url
    --teacher {bad}/e-model.yaml | model
    --teacher {bad}/e-mode.yaml | mode
    --teacher {bad}/e-key.yaml | key
    --teacher {bad}/e-unset.yaml | surely_not_set
    --teacher {bad}/e-calls.yaml | concurrency
    --teacher {bad}/e-timeout.yaml | timeout
    --teacher {bad}/e-down.yaml | 127.0.0.1
    --out {bad}/file | exists
    --out {bad}/file/all.jsonl | file
    --seed -5 | seed
    --text nowhere | nowhere""",
    "prune": f"""{_SHARED}
    --data {{bad}}/nowhere.tsv | nowhere.tsv
    --data {{bad}}/deep.jsonl | deep.jsonl
    --recipe prune-tailor | prune-taylor
    --recipe {{recipe}} | prune
    --layers 0 | layers
    --layers -1 | layers
    --layers nan | layers
    --layers 9 | layers
    --heads 99 | heads
    --hidden 1e9 | hidden
    --bottleneck 4 | bottleneck
    --speedup 0.5 | speedup
    --max-latency-ms -1 | max-latency-ms
    --max-params 0 | max-params
    --speedup 2 --max-latency-ms 3 | speedup
    --threads 0 | threads
    --seq 0 | seq
    --metric acuracy | accuracy""",
    "export": """
    --for tensorrt | for
    --precision int3 | int3
    --precision , | precision
    --opset 3 | opset
    --opset 999 | opset
    --out {bad}/dir | dir
    --out {bad}/file | file
    --out {bundle} | bundle
    --device browser | tune
    --threads 4 | tune
    --tune --device nowhere | nowhere
    --tune --seq x | seq
    --tune --threads 0 | threads
    --max-length 0 | max
    --pool sum | pool
    --tune --data {bad}/nowhere.tsv | nowhere.tsv""",
    "quantize": f"""{_DATA}
    --method best | method
    --calibration mean | calibration
    --percentile 10 | percentile
    --percentile 100.1 | percentile
    --rows 0 | rows
    --max-drop -1 | max-drop
    --max-drop nan | max-drop
    --form round | form
    --device nowhere | nowhere
    --device ssh: | ssh
    --out {{bad}}/dir | dir
    --out {{bad}}/file | file
    --set stages.0.lr=1 --method static | set
    --timeout -1 | timeout""",
    "trim": """
    --data {bad}/nowhere.tsv | nowhere.tsv
    --corpus {bad}/nowhere | nowhere
    --corpus {bad}/empty.txt | empty.txt
    --min-count 0 | min-count
    --max-drop -1 | max-drop
    --max-drop nan | max-drop
    --out {bad}/dir | dir
    --out {bad}/file | file
    --out {bad}/file/x | file
    --label nowhere | nowhere""",
    "predict": """
    --precision fp8 | precision
    --precision w8 | w8
    --pair | pair
    --nonsense | nonsense""",
    "bench": """
    {bad}/nowhere | nowhere
    {bad}/dir | dir
    {bad}/no.onnx | no.onnx
    {bad}/empty.onnx | empty.onnx
    {bad}/no.xml | no.bin
    {bad}/no.tflite | no.tflite
    {bad}/bundle | manifest
    {bad}/deep | manifest
    --device nowhere | nowhere
    --device ssh: | ssh
    --device ssh:-oProxyCommand=x | ssh
    --precision int3 | int3
    --threads 0 | threads
    --threads 9999 | threads
    --threads x | threads
    --batch -1 | batch
    --seq 0 | seq
    --seq 9999 | 9999
    --seq 8,x | seq
    --rounds 0 | rounds
    --runs 0 | runs
    --sustain 5 | sustain
    --sustain -1m | sustain
    --affinity 999 | 999
    --affinity x | affinity
    --timeout 0 | timeout
    --webgpu | webgpu
    --lan | lan
    --out {bad}/file/x.json | file""",
    "report": """
    {bad}/nowhere | nowhere
    {bad}/dir | dir
    {bad}/no.json | no.json
    {bad}/other.json | other.json
    {bad}/deep-result.json | deep-result.json
    {bad}/bundle | bundle
    {bad}/run | run
    --at nowhere | nowhere
    --budget-ms -1 | budget-ms
    --budget-ms nan | budget-ms
    --max-mb -1 | max-mb
    --min-score 95 | min-score
    --html {bad}/file/x.html | file""",
    "recipes": """
    distilbrt | distilbert
    {bad}/nowhere.yaml | nowhere.yaml
    {bad}/deep.yaml | deep.yaml
    {bad}/key.yaml | stpes
    {bad}/self.yaml | self
    --nonsense | nonsense""",
    "search": f"""{_SHARED.replace("--resume --out {out} | resume", "")}
    --teacher {{bad}}/nowhere | nowhere
    --teacher {{bad}}/checkpoint-deep | config.json
    --data {{bad}}/nowhere.tsv | nowhere.tsv
    --space width-dept | width-depth
    --space {{bad}}/empty.yaml | mapping
    --space {{bad}}/deep.yaml | deep.yaml
    --space {{recipe}} | axes
    --objective latenci | latency
    --sampler tpx | tpe
    --trials 0 | trials
    --trials -1 | trials
    --minutes -1 | minutes
    --shapes 2 | shapes
    --shapes 1000 | shapes
    --rounds 1 | rounds
    --finalists 0 | finalists
    --max-latency-ms -1 | max-latency-ms
    --max-params 0 | max-params
    --max-file-mb -1 | max-file-mb
    --min-score 95 | min-score
    --speedup 0 | speedup
    --device nowhere | nowhere
    --storage grpc://nowhere | nowhere
    --storage mysql://me:pass@host/db | mysql
    --worker | storage
    --anchor {{bad}}/nowhere | nowhere
    --set nonsense=1 | nonsense""",
}
ALONE: Mapping[str, str] = {
    "distill": "| teacher",
    "predict": _BUNDLES.replace(" |", " x |") + "{bundle} | texts",
    "quantize": _BUNDLES.replace(" |", " --data {data} |") + "{bundle} | data",
    "trim": _BUNDLES.replace(" |", " --data {data} --out {out} |") + "{bundle} --out {out} | data",
    "students": "{bad}/nowhere | nowhere\n{bad}/dir | config.json\n{bad}/checkpoint | checkpoint\n"
    "bert-bse | bert-base\n"
    "{bad}/checkpoint-deep | checkpoint-deep\n{bad}/checkpoint-alien | alien\n{bad}/checkpoint-code | checkpoint-code",
    "search": "| teacher\n--teacher {teacher} | data",
    "search show": "{bad}/nowhere | nowhere\n{bad}/dir | dir\n{bad}/study | study\n{run} | search.json\n"
    "{bad}/study 3 | bundle\n"
    "{bad}/study x --bundle {out} | trial",
    "export": _BUNDLES.replace(" |", " --out {out} |")
    + "{bad}/checkpoint-deep --out {out} | config.json\n{teacher} | out",
    "prune": "{bad}/nowhere --data {data} --layers 2 --out {out} | nowhere\n"
    "{model} --data {data} --out {out} | layers\n"
    "{model} --recipe {cuts} --data {data} --gate warn --speedup 2 --device nowhere --out {out} | nowhere\n"
    "{model} --recipe {cuts} --data {data} --gate warn --speedup 2 --threads 9999 --out {out} | threads",
    "clean": "{bad}/nowhere | nowhere\n{bad}/dir | dir\n--nonsense | nonsense",
    "nonsense": "| nonsense",
}
"""The same without the good words before them."""


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield command, the rest of the words, and what must be said, of each case."""
    for table, good in ((BAD, GOOD), (ALONE, {})):
        for command, text in table.items():
            for line in filter(str.strip, text.splitlines()):
                words, _, said = line.rpartition("|")
                yield command, f"{good.get(command, '')} {words}".strip(), said.strip()


def write(folder: Path) -> None:
    """Write FILES."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
