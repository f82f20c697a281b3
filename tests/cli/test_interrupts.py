"""SIGTERM is a Ctrl-C with an exit code of its own, for the command's own process and the first time only."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from compress.cli.interrupts import Terminated, exit_code, interrupt_on_sigterm
from compress.cli.options import user_errors
from tests import forks


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_exit_codes(interrupt: type[BaseException], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BaseException) as ended, user_errors(hint="Run it again."):
        raise interrupt
    assert getattr(ended.value, "exit_code", None) == code
    assert capsys.readouterr().err == "\ninterrupted. Run it again.\n"


@pytest.mark.parametrize("begun", [False, True])
def test_what_an_interrupted_run_asks_for(
    begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of which nothing is there yet cannot be resumed."""
    monkeypatch.setattr("sys.argv", ["compress", "distill"])
    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")):
        with pytest.raises(typer.Exit), user_errors(hint=tmp_path):
            if begun:
                (tmp_path / "run.json").write_text("{}")
            raise error
        said = capsys.readouterr().err
        assert ("--resume" in said, "Nothing was written. Run the same command again." in said) == (begun, not begun)


def test_an_interrupt_that_a_library_raises_instead() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise Terminated
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert exit_code(caught.value) == 143


def test_an_ignored_sigterm_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupt_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_main_thread_can_catch_signals() -> None:
    found: list[object] = []

    def enter() -> None:
        with interrupt_on_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def _end_once(folder: Path) -> None:
    """Be ended in the middle of a command; the handler of before returns."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with interrupt_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    except Terminated:
        (folder / "ended").write_text(f"caught, returned: {signal.getsignal(signal.SIGTERM) is before}")


def _fork_and_end(folder: Path) -> None:
    """Fork a child that sleeps, and end it by SIGTERM in the middle of a command."""
    with interrupt_on_sigterm():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        (folder / "ended").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def _end_twice(folder: Path) -> None:
    """Be ended again while the first end is cleaned up."""
    try:
        with interrupt_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (folder / "ended").write_text("once")
    try:
        with interrupt_on_sigterm():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                (folder / "ended").write_text("cleaning")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
    finally:
        (folder / "ended").write_text("not reached")


@pytest.mark.parametrize(
    ("act", "ended", "code"),
    [(_end_once, "caught, returned: True", 0), (_fork_and_end, "-15", 0), (_end_twice, "cleaning", -signal.SIGTERM)],
)
def test_first_signals_are_raised_and_children_and_second_ones_end_at_once(
    act: Callable[[Path], None], ended: str, code: int, tmp_path: Path
) -> None:
    process = forks.context().Process(target=act, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == code
    assert (tmp_path / "ended").read_text() == ended


def test_a_served_page_ends_as_on_ctrl_c(tmp_path: Path) -> None:
    """The command of a script that another process ends."""
    program = (
        "import time\nfrom compress.cli.interrupts import interrupt_on_sigterm\n"
        "from compress.cli.options import user_errors\n"
        "with interrupt_on_sigterm(), user_errors(hint='Again.'):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert "interrupted. Again." in err


LOADING = """
import runpy, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
runpy.run_module("compress", run_name="__main__")
"""


def test_an_interrupt_while_the_command_line_loads_ends_it_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
