"""Who is in: the server notes when a site comes, a site when it was let in.

A run that a site dropped out of takes it in again once it has come back.
"""

from __future__ import annotations

import re
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.widgets.widget import Widget

from pfed.deploy.parents import ARRIVALS, JOINED


class Arrivals(Widget):  # type: ignore[misc]
    """Touches a file in the kit for every site that registers, or when this site has."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_CLIENT_REGISTER:
            (Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()) / JOINED).touch()
        elif event_type == EventType.CLIENT_REGISTER_RECEIVED:
            name = fl_ctx.get_peer_context().get_identity_name()
            if re.fullmatch(r"[a-z0-9-]+", name or ""):
                folder = Path(fl_ctx.get_workspace().get_root_dir()) / ARRIVALS
                folder.mkdir(exist_ok=True)
                (folder / name).touch()
