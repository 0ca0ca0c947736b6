"""A site that is built once and served, and pages of it that complain of nothing and ask nobody else."""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts import site

SOURCES = site.ROOT / "site" / "src"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESK = {"width": 1280, "height": 900}
_PACKAGES = ("playwright", "axe_core_python", "material", "ml_dtypes")


def _missing() -> str:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    missing += [] if CHROMIUM else ["chromium"]
    missing += (
        [] if (site.ROOT / "site" / "node_modules" / "esbuild").exists() else ["npm's packages in site/node_modules"]
    )
    return ", ".join(missing)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser or a generator nothing here can be tested, and each test says what is missing."""
    missing = _missing()
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"the site needs {missing}: make test-site installs it"))


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and the sources of its scripts under /src."""

    def translate_path(self, path: str) -> str:
        if path == "/favicon.ico":  # a browser asks for it by itself where a page names none
            path = "/assets/favicon.svg"
        if path.startswith("/src/"):
            return str(SOURCES / path.removeprefix("/src/"))
        return super().translate_path(path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site.build(folder)
    return folder


@pytest.fixture(scope="session")
def address(built: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(built))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def context() -> Iterator[Any]:
    """One for all pages, because a new one reads every script again."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = running.new_context(reduced_motion="reduce")
        context.set_default_timeout(30_000)
        yield context
        running.close()


@pytest.fixture
def opened(context: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens a page of the site as wide as a desk, or as is asked for; in the end nothing may have gone wrong."""
    pages, asked, said = [], [], []

    def opened(path: str, origin: str = address, viewport: dict[str, int] = DESK) -> Any:
        page = context.new_page()
        page.set_viewport_size(viewport)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{origin}/{path}")
        pages.append((page, origin))
        return page

    yield opened
    for page, _ in pages:
        page.evaluate("localStorage.clear()")  # the colours that a reader chose
        page.close()
    origins = tuple({origin for _, origin in pages})
    assert [url for url in asked if not url.startswith((*origins, "data:", "blob:"))] == []
    assert said == []
