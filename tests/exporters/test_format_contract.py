"""Every format: what its record says is so, and what it writes is read back and answers as the bundle does. Skipped,
with the reason, where the runtime is not installed."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compress.commands.bench import choose_formats
from compress.commands.export import export
from compress.errors import ExportError
from compress.exporters import formats
from compress.exporters.artifact import Bundle
from compress.exporters.formats.format import ONNX_PRECISIONS, Format, Race
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.snippets import TEMPLATES
from compress.exporters.tokenizer.text_model import make_feeds
from compress.exporters.writers.context import ExportContext, ExportOptions, FixedOptions, RunFeeds
from compress.provenance import find_missing, list_requirements
from docs import reference
from tests import tiny
from tests.exporters.test_formats import BESIDE, bundle, names, rows

TEXTS = ("a good film", "this story was never fun !", "a very very very sad and dull plot , but the actor was so warm")
LIMITS = {"fp32": 1e-4, "fp16": 0.05, "w8": 0.2, "int8": 0.4, "q4": 0.6, "w8a16": 0.05, "w8a8": 0.4, "p6": 0.5, "p4": 1}
"""Largest difference from the fp32 logits, relative to the largest of them."""
every_format = pytest.mark.parametrize("format", formats.known(), ids=formats.names())


@every_format
def test_a_record_is_consistent(format: Format) -> None:
    assert formats.find(format.name) is format
    assert set(format.default) <= set(format.precisions) <= set(LIMITS)
    assert all(callable(formats.load(address)) for address in (format.writer, format.reader))
    if isinstance(format.race, Race):
        assert {*format.race.precisions, *format.race.with_data} <= set(format.precisions)
        assert format.runtime
    assert bool(format.snippets) is bool(format.library)
    assert all((TEMPLATES / f"{name}.jinja").is_file() for name in format.snippets)
    if format.extra is not None:
        assert list_requirements(format.extra.name)
        assert f"compress-kit[{format.extra.name}]" in format.needs


def test_a_name_without_a_file_is_refused() -> None:
    with pytest.raises(ExportError, match="Did you mean 'openvino'"):
        formats.find("openvin")
    assert tuple(BUNDLE_FILES) == ONNX_PRECISIONS


def test_the_table_in_the_documents_is_made_of_the_records() -> None:
    page = Path(reference.__file__).with_name("export.md").read_text(encoding="utf-8")
    assert reference.formats_table() in page


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, str]:
    folder = tmp_path_factory.mktemp("source")
    return bundle(folder / "bundle"), tiny.reviews(folder / "reviews", train=64, dev=16)


@every_format
def test_what_is_written_answers_as_the_bundle_does(format: Format, source: tuple[Bundle, str], tmp_path: Path) -> None:
    if format.extra is not None and format.extra.required and (missing := find_missing(format.extra.name)):
        pytest.skip(missing)
    own, data = source
    fixed = FixedOptions((24,), max_drop=1.0)
    precisions = format.default if format.fixed_length else format.precisions
    given = data if format.reads_data else None
    made = export(str(own.path), tmp_path / "out", to=format.name, precisions=precisions, data=given, fixed=fixed)
    context = ExportContext.open(own, tmp_path, options=ExportOptions(fixed=fixed))
    read: Callable[[ExportContext, Path], RunFeeds] = formats.load(format.reader)
    expected = own.logits([tiny.tokenizer()(text) for text in TEXTS], precision="fp32")
    takes_texts = format.reader.endswith("open_text_file")
    models = [each for each in made.files if each.difference is not None]
    assert [*dict.fromkeys(each.precision for each in models)] == [*precisions]
    for each in models:
        run = read(context, made.path / each.file)
        found = [run(make_feeds([text]) if takes_texts else rows(text))[0] for text in TEXTS]  # type: ignore[arg-type]
        difference = abs(np.concatenate(found) - expected).max()
        assert difference <= LIMITS[each.precision] * abs(expected).max(), each.file
        assert Path(each.file).suffix in format.suffixes or format.fixed_length
    if format.copies_tokenizer:
        files = {name for each in made.files for name in (each.file, *each.with_files)}
        assert names(made.path) == {*BESIDE, *files}


TOY = """
import shutil
from compress.exporters.formats.format import Extra, Format, Race

FORMAT = Format(
    name="toy", files="`.toy`", shapes="open", precisions=("fp32", "int8"), default=("fp32",), suffixes=(".toy",),
    writer="compress.exporters.formats.toy.write", reader="compress.exporters.writers.onnxruntime.open_file",
    runtime="onnxruntime", library="toys", snippets=("toys.python",),
    race=Race(precisions=("fp32",)),
)

def write(context, folder, precisions):
    from compress.exporters.writers.context import ExportedFile, ExportResult
    for precision in precisions:
        shutil.copyfile(context.onnx(precision), folder / f"{precision}.toy")
    return ExportResult(tuple(ExportedFile(f"{each}.toy", each, None) for each in precisions))
"""


def test_a_new_format_is_one_file_and_its_code(
    source: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toys.python.jinja").write_text("import toys\n\ntoys.play({{ file | quote }})\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    formats.known.cache_clear()
    try:
        assert "toy" in formats.names()
        assert "`.toy`" in reference.formats_table()
        assert choose_formats("toy", precision="", calibrated=False, rows=1) == ({"toy": ["fp32"]}, {})
        export(str(source[0].path), tmp_path / "out", to="toy")
        assert names(tmp_path / "out") == {*BESIDE, "fp32.toy"}
        assert 'toys.play("fp32.toy")' in (tmp_path / "out" / "README.md").read_text()
    finally:
        sys.modules.pop("compress.exporters.formats.toy", None)
        formats.known.cache_clear()
