"""A headless browser that tests speak to, and HTML taken apart."""

import json
import os
import select
import signal
import time
from fcntl import F_DUPFD_CLOEXEC, fcntl
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
PATIENCE = 60  # seconds for anything that a browser is asked


class Parsed(HTMLParser):
    """Elements of a page with their attributes, and the text within each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.within = self.texts.setdefault(tag, [])
        self.within.append("")

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.within[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.within = [""]


def pipe() -> tuple[int, int]:
    """Both ends of a pipe, as descriptors above those that a browser speaks on."""
    low = os.pipe()
    ends = fcntl(low[0], F_DUPFD_CLOEXEC, 10), fcntl(low[1], F_DUPFD_CLOEXEC, 10)
    for each in low:
        os.close(each)
    return ends


class Browser:
    """A headless browser with one tab, spoken to in the DevTools protocol over a pair of pipes."""

    def __init__(self, binary: str, profile: Path) -> None:
        (theirs, self.requests), (self.answers, mine) = pipe(), pipe()
        pipes = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, mine, 4)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, str(profile / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600)
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = os.posix_spawn(binary, command, os.environ, file_actions=[*pipes, quiet], setpgroup=0)
        for each in (theirs, mine):
            os.close(each)
        self.number, self.heard, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """What the browser answers; events that come before are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        session = {"sessionId": self.session} if self.session else {}
        os.write(self.requests, json.dumps({**message, **session}).encode() + b"\0")
        while (answer := self.next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next(self) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self.heard:
            assert select.select([self.answers], [], [], PATIENCE)[0], "the browser does not answer"
            part = os.read(self.answers, 2**16)
            assert part, "the browser has ended"
            self.heard += part
        first, self.heard = self.heard.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, address: str) -> None:
        """Goes to a page, and waits until it is loaded."""
        for each in ("about:blank", address):
            self.events.clear()
            self.call("Page.navigate", url=each)
            self.until(f"location.href === {json.dumps(each)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of an expression in the page; `all(selector)` has the elements."""
        helper = "const all = (selector) => [...document.querySelectorAll(selector)]; "
        code = f"(() => {{ {helper} return {expression}; }})()"
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of elements."""
        found: list[str] = self.value(f"all({json.dumps(selector)}).map((each) => each.textContent)")
        return found

    def until(self, expression: str) -> None:
        """Waits until an expression holds in the page."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def search(self, text: str) -> None:
        """Types into the search field in place of what stands there, and presses Enter."""
        self.value("(all('#query')[0].focus(), all('#query')[0].select())")
        self.call("Input.insertText", text=text)
        self.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
        self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", windowsVirtualKeyCode=13)

    def reset(self) -> None:
        """As a browser is at first: wide, light, on a screen."""
        self.call("Emulation.clearDeviceMetricsOverride")
        self.call("Emulation.setEmulatedMedia", media="", features=[])

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """What the events of some kinds say, since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, warnings and messages of the page."""
        return self.told("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

    def close(self) -> None:
        """Ends the browser and its children."""
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        for each in (self.requests, self.answers):
            os.close(each)
