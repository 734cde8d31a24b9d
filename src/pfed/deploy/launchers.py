"""How a server and a site start the process of a run: as NVFlare does, but paths may have spaces in them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.utils.job_launcher_utils import get_client_job_args, get_server_job_args


class ServerLauncher(ServerProcessJobLauncher):  # type: ignore[misc]
    """Of the server."""

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        return _command(fl_ctx, get_server_job_args())


class SiteLauncher(ClientProcessJobLauncher):  # type: ignore[misc]
    """Of a site."""

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        return _command(fl_ctx, get_client_job_args())


def _command(fl_ctx: FLContext, names: Sequence[str]) -> str:
    given = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
    words = [shlex.quote(sys.executable)]
    for name in names:
        if given.get(name):
            flag, value = given[name]
            # Options are several words, and stay so.
            words += [flag, str(value) if name == JobProcessArgs.OPTIONS else shlex.quote(str(value))]
    return " ".join(words)
