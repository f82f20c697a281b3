"""Get onnxruntime-web, of one version and these very bytes, by the user's own npm or from disk."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from compress.data.cache import cached, home, note
from compress.io import sha256
from compress.records.latency import DeviceError

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web@{VERSION}"
TARBALL = f"onnxruntime-web-{VERSION}.tgz"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""The tarball's hash, as the package's `dist.integrity` gives it."""

WASM: Mapping[str, str] = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""The files the page loads, and their SHA-256. The first is the entry. 14 MB."""

WEBGPU: Mapping[str, str] = {
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs": "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
    "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}
"""The same for the build that can use WebGPU. 27 MB."""

PATIENCE = 600
"""Seconds for npm: the tarball has 33 MB."""

BY_HAND = (
    f"Where npm is: npm pack {PACKAGE}. Then give the file it wrote, or the folder it unpacks to: --assets {TARBALL}"
)


def runtime(source: Path | None = None, *, webgpu: bool = False) -> list[Path]:
    """Return the files of onnxruntime-web that the page loads, entry first, checked byte for byte.

    source  None: those kept under $COMPRESS_HOME/web, got by npm the first time; a file: the package's tarball; a
            folder: one that has the files, itself or in `dist` or `package/dist`.
    Raises DeviceError: no npm, npm fails, or the files are not those of VERSION.
    """
    needed = WEBGPU if webgpu else WASM
    if source is not None and source.is_dir():
        for place in (source, source / "dist", source / "package" / "dist"):
            if all((place / name).is_file() for name in needed):
                return _check(place, needed)
        raise DeviceError(f"--assets {source}: a folder without {', '.join(needed)}. {BY_HAND}")
    if source is not None:
        return _unpack(source, needed)
    kept = _place(needed)
    if kept.exists():
        if not (changed := _list_changed(kept, needed)):
            return [kept / name for name in needed]
        note(f"{kept}: {', '.join(changed)} is damaged or missing; getting {PACKAGE} again")
    with tempfile.TemporaryDirectory() as folder:
        return _unpack(packed(Path(folder)), needed)


def _place(needed: Mapping[str, str]) -> Path:
    return home() / "web" / VERSION / ("webgpu" if needed is WEBGPU else "wasm")


def packed(folder: Path) -> Path:
    """Let npm fetch the tarball into `folder`, and return its path."""
    npm = shutil.which("npm")
    if npm is None:
        raise DeviceError(
            f"browser: {PACKAGE} is needed, and npm, which gets it, is not on the PATH. Install Node.js. {BY_HAND}"
        )
    command = [npm, "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel", "error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"browser: npm pack {PACKAGE} took over {PATIENCE} s. {BY_HAND}") from None
    if done.returncode != 0 or not (folder / TARBALL).is_file():
        words = " ".join(done.stderr.split())[:600] or "it said nothing"
        raise DeviceError(f"browser: npm pack {PACKAGE} ended with code {done.returncode}: {words}. {BY_HAND}")
    return folder / TARBALL


def _unpack(tarball: Path, needed: Mapping[str, str]) -> list[Path]:
    """Unpack the needed files of the tarball, once it is known to be the right one, to where they are kept."""
    if not tarball.is_file():
        raise DeviceError(f"--assets {tarball}: no such file or folder; expected {TARBALL}. {BY_HAND}")
    with tarball.open("rb") as file:
        found = "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != INTEGRITY:
        raise DeviceError(f"{tarball}: not {PACKAGE}: its integrity is {found}; expected {INTEGRITY}. {BY_HAND}")

    def unpack(folder: Path) -> None:
        with tarfile.open(tarball) as package:
            for name in needed:
                member = package.extractfile(f"package/dist/{name}")
                assert member is not None  # its integrity says so
                with member, (folder / name).open("wb") as target:
                    shutil.copyfileobj(member, target)

    return _check(cached(_place(needed), unpack), needed)


def _check(folder: Path, needed: Mapping[str, str]) -> list[Path]:
    for name in _list_changed(folder, needed):
        raise DeviceError(f"{folder / name}: another version than {PACKAGE}, or damaged. Remove it. {BY_HAND}")
    return [folder / name for name in needed]


def _list_changed(folder: Path, needed: Mapping[str, str]) -> list[str]:
    """List the files that are missing, or are not those that are needed."""
    paths = ((folder / name, expected) for name, expected in needed.items())
    return [path.name for path, expected in paths if not path.is_file() or sha256(path) != expected]
