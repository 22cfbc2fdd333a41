"""SGLang's HTTP application as it is, with plugins loaded first.

SGLang starts each extra tokenizer worker by importing the application that SGLANG_HTTP_SERVER_APP_PATH names, and loads
no plugins there: without them the worker does not know the algorithm of the server that it belongs to.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

load_plugins()

from c2t_plugin.engines.sglang.patches import PATCHES  # noqa: E402

PATCHES.require()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
