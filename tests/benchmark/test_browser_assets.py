"""onnxruntime-web is taken from wherever it is to be had, if it is the very one."""

import base64
import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest

from compress.benchmark.browser import device
from compress.io import CHECKSUMS
from compress.records.latency import DeviceError
from tests.damage import KINDS, damaged

FILES = {"entry.mjs": b"export {}", "runtime.wasm": b"\0asm"}


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two files as npm unpacks it, and a third that nobody needs; the pins are theirs."""
    dist = tmp_path / "unpacked" / "package" / "dist"
    dist.mkdir(parents=True)
    for name, content in FILES.items():
        (dist / name).write_bytes(content)
    (dist / "other.wasm").write_bytes(b"not needed")
    pins = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(device, "WASM", pins)
    return tmp_path / "unpacked"


@pytest.fixture
def tarball(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / device.TARBALL
    with tarfile.open(made, "w:gz") as package:
        package.add(unpacked / "package", "package")
    digest = base64.b64encode(hashlib.sha512(made.read_bytes()).digest()).decode()
    monkeypatch.setattr(device, "INTEGRITY", f"sha512-{digest}")
    return made


def npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for npm, the only program on the PATH besides the shell's own."""
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    (folder / "npm").chmod(0o755)
    cp = shutil.which("cp")
    assert cp is not None
    if not (folder / "cp").exists():
        (folder / "cp").symlink_to(cp)
    monkeypatch.setenv("PATH", str(folder))


def test_npm_fetches_once(tarball: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm(
        tmp_path / "bin",
        f'[ "$1 $2 $3" = "pack {device.WEB_PACKAGE} --pack-destination" ] && cp "{tarball}" "$4"',
        monkeypatch,
    )
    first = device.load_runtime()
    assert [path.name for path in first] == list(FILES)
    assert [path.read_bytes() for path in first] == list(FILES.values())
    assert sorted(path.name for path in home.rglob("*") if path.is_file()) == sorted([*FILES, CHECKSUMS])
    npm(tmp_path / "bin", "exit 1", monkeypatch)
    assert device.load_runtime() == first


def test_only_the_pinned_tarball_is_accepted(tarball: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.name for path in device.load_runtime(tarball)] == list(FILES)
    shutil.rmtree(home)
    tarball.write_bytes(tarball.read_bytes() + b"\0")
    with pytest.raises(DeviceError, match="its integrity is"):
        device.load_runtime(tarball)
    assert not home.exists()


@pytest.mark.parametrize("inside", [".", "package", "package/dist"])
def test_a_folder_may_hold_the_files_at_three_levels(unpacked: Path, home: Path, inside: str) -> None:
    assert [path.read_bytes() for path in device.load_runtime(unpacked / inside)] == list(FILES.values())
    assert not home.exists()  # used where they are


def test_files_that_are_not_the_pinned_ones_are_refused(unpacked: Path) -> None:
    (unpacked / "package" / "dist" / "runtime.wasm").write_bytes(b"\0asm tampered")
    with pytest.raises(DeviceError, match=r"runtime\.wasm: not onnxruntime-web@"):
        device.load_runtime(unpacked)


@pytest.mark.parametrize("damage", KINDS)
def test_cached_files_are_checked_again(
    damage: str, tarball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = device.load_runtime(tarball)
    damaged(found[1], damage)
    npm(tmp_path / "bin", "exit 1", monkeypatch)
    with pytest.raises(DeviceError, match="code 1"):
        device.load_runtime()
    assert "runtime.wasm" in capsys.readouterr().err
    npm(tmp_path / "bin", f'cp "{tarball}" "$4"', monkeypatch)
    assert [path.read_bytes() for path in device.load_runtime()] == list(FILES.values())


def test_a_cache_without_checksums_is_used(tarball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = device.load_runtime(tarball)
    (found[0].parent / CHECKSUMS).unlink()
    monkeypatch.setenv("PATH", "")
    assert device.load_runtime() == found


def test_pins_are_whole() -> None:
    for pins in (device.WASM, device.WEBGPU):
        assert len(pins) == 3
        assert all(len(bytes.fromhex(digest)) == 32 for digest in pins.values())
    assert len(base64.b64decode(device.INTEGRITY.removeprefix("sha512-"))) == 64
