"""Every work, uninterrupted and undamaged, once: what the campaign compares with."""

import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.campaign import process, works
from tests.campaign.accidents import Dies, Watch, events
from tests.campaign.works import AFTER, DISTILL, WORKS


@dataclass(frozen=True)
class Whole:
    """An uninterrupted work: its folder, its caches, the digests of its results, and what it took."""

    out: Path
    home: Path
    results: dict[str, str]
    seconds: float
    events: int


@dataclass(frozen=True)
class Reference:
    """Whole works, each done when it is first asked for."""

    folder: Path
    given: dict[str, str]
    _done: dict[str, Whole] = field(default_factory=dict)
    _after: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    @staticmethod
    def fill(folder: Path) -> "Reference":
        """Make what commands are given, and a bundle."""
        given = works.fill(folder / "given")
        out = folder / "shipped"
        ended = process.run(DISTILL.format(**given, out=out).split(), home=folder / "home")
        assert ended.code == 0, ended.err
        return Reference(folder, given | {"run": str(out), "bundle": str(out / "bundle")})

    def whole(self, name: str) -> Whole:
        """Return the work `name`, done without an accident."""
        if name not in self._done:
            work, out, home = WORKS[name], self.folder / name, self.folder / f"{name}-home"
            self.begin(name, out)
            watch = Watch(self.folder / f"{name}-events", before=work.before)
            ended = process.run(work.arguments(self.given, out), home=home, before=watch)
            assert ended.code == 0, ended.err
            self._done[name] = Whole(out, home, works.results(out), ended.seconds, events(watch.record))
        return self._done[name]

    def begin(self, name: str, out: Path) -> None:
        """Make what the work begins with: nothing, a bundle, or the result of another work."""
        begins = WORKS[name].begins
        if begins:
            shutil.copytree(Path(self.given["bundle"]) if begins == "bundle" else self.whole(begins).out, out)

    def stopped(self, name: str, dies: Dies | None) -> Path:
        """Return the folder of a work's `out` and `home` after it was killed; without `dies`, of its `home` alone."""
        place = self.folder / f"{name}-{'whole' if dies is None else dies.stage}-stopped"
        if dies is None and not place.exists():
            shutil.copytree(self.whole(name).home, place / "home")
        elif not place.exists():
            work, out = WORKS[name], place / "out"
            self.begin(name, out)
            ended = process.run(
                work.arguments(self.given, out), home=place / "home", before=replace(dies, before=work.before)
            )
            assert ended.code == -signal.SIGKILL, ended.err
        return place

    def after(self, command: str) -> tuple[str, dict[str, str]]:
        """Return what a command for bundles prints and makes of the undamaged one."""
        out = self.folder / f"after-{command}"
        if command not in self._after:
            words = AFTER[command].format(**self.given, out=out).split()
            ended = process.run(words, home=self.folder / "home")
            assert ended.code == 0, ended.err
            self._after[command] = works.plain(ended.out, self.given["bundle"], out), works.results(out)
        return self._after[command]
