"""`kvbridge space`: the demonstration page on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from .bundled import space_folder
from .errors import KVBridgeError

# What the page imports that the package itself does not need.
NEEDED = ("gradio", "plotly")


class SpaceUnavailableError(KVBridgeError, ImportError):
    """The page, or something that it needs, is not installed."""


def check_needed() -> None:
    """Raise SpaceUnavailableError where something is missing that the page imports."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SpaceUnavailableError(
            f"The page needs {' and '.join(missing)}. Install with: pip install 'kvbridge_hf[space]'"
        )


def space(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    family: Annotated[Path | None, typer.Option(help="Folder of another family instead of the bundled one.")] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the demonstration page: handoff and full prefill side by side, a conversation, the guard, latency."""
    check_needed()
    if family is not None and not (family / "models").is_dir():
        raise SpaceUnavailableError(f"--family {family} is no family: it has no folder named models.")
    sys.path.insert(0, str(space_folder()))
    importlib.import_module("app").launch(family, server_name=host, server_port=port, inbrowser=browser)


__all__ = ["check_needed", "space"]
