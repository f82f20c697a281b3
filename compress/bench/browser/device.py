"""From a link to a Device: the page is served, somebody opens it, and it is told when all is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.bench.browser.answers import Known, read
from compress.bench.browser.assets import runtime
from compress.bench.browser.feeding import probe
from compress.bench.browser.page import Browser
from compress.bench.browser.qr import code
from compress.bench.browser.server import WEB, Site, serving
from compress.bench.browser.visitor import Visitor
from compress.bench.protocol import DeviceError


@contextmanager
def browser(
    *,
    lan: bool = False,
    timeout: float = 60.0,
    say: Callable[[str], None] = print,
    visit: Callable[[str], None] | None = None,
    assets: Path | None = None,
    webgpu: bool = False,
) -> Iterator[Browser]:
    """A browser that opens the link this prints, as a Device. The page is told when it is over, whatever happens.

    lan      listen on this machine's network address instead of 127.0.0.1, and show the link as a QR code too
    timeout  seconds to wait for somebody to open the link
    say      is told what the user must do
    visit    opens or shows the link, instead of printing it
    assets   onnxruntime-web's tarball or folder, where npm cannot get it
    webgpu   run on the GPU what WebGPU has kernels for, the rest in WebAssembly
    Raises DeviceError when onnxruntime-web cannot be had, nobody comes, or the browser lacks what is asked for.
    """
    files = runtime(assets, webgpu=webgpu)
    site = Site(
        Visitor(), {"worker.js": WEB / "worker.js", "probe.onnx": probe(), **{path.name: path for path in files}}
    )
    with serving(site, lan=lan) as link:
        if visit is None:
            _print(link, lan, say)
        else:
            visit(link)
        if not site.visitor.arrives(timeout):
            raise DeviceError(_nobody(lan, timeout))
        last_words = "Stopped: the command ended early. Nothing runs here any more."
        try:
            yield _met(site, files[0].name, webgpu, say)
            last_words = "Done. You can close this page."
        finally:
            site.visitor.end(last_words)


def _met(site: Site, entry: str, webgpu: bool, say: Callable[[str], None]) -> Browser:
    known = read(site.visitor.ask({"do": "known", "webgpu": webgpu}), Known)
    say(f"Measuring in {known.agent}")
    if webgpu and not known.gpu:
        raise DeviceError(
            "browser: this browser gives the page no WebGPU. It needs one that has it, and a page from this machine "
            "itself: the link on 127.0.0.1, or a phone on a cable (--device adb), not --lan."
        )
    return Browser(site, known, entry, webgpu, say)


def _print(link: str, lan: bool, say: Callable[[str], None]) -> None:
    say(f"Open this link in the browser to be measured, and keep its page in front: {link}")
    if lan:
        say(code(link))
        say(
            "Over plain http from another machine, browsers give a page neither threads nor WebGPU: one thread only. "
            "A phone on a cable has both: --device adb."
        )


def _nobody(lan: bool, timeout: float) -> str:
    where = (
        "on a device in this machine's network, if no firewall keeps it out"
        if lan
        else "on this machine, or on another with --lan"
    )
    return (
        f"browser: nobody opened the link in {timeout:.0f} s. Open it in a browser {where}; for more time: "
        f"--timeout {max(120.0, 2 * timeout):.0f}."
    )
