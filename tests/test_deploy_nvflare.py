"""What pfed uses of NVFlare, much of it not public, is there as it is used: another version shows here first."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from nvflare.apis.controller_spec import ControllerSpec
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.fuel.hci.proto import MetaKey
from nvflare.private.aux_runner import AuxRunner
from nvflare.private.fed.client.client_run_manager import ClientRunManager
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.tool.cert import cert_cli, cert_commands
from nvflare.tool.cert.fingerprint import cert_fingerprint_sha256
from nvflare.tool.package import package_cli, package_commands
from nvflare.utils.job_launcher_utils import get_client_job_args, get_server_job_args

ROOT = Path(__file__).parent.parent
ME = object()  # stands for self
USED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (ServerEngine.send_aux_request, (ME, ["site"], "topic", None, 1.0, None), {"optional": True}),
    (ServerEngine.new_context, (ME,), {}),
    (ServerEngine.get_workspace, (ME,), {}),
    (ClientRunManager.register_aux_message_handler, (ME,), {"topic": "", "message_handle_func": None}),
    (FLContext.get_run_abort_signal, (ME,), {}),
    (Executor.execute, (ME, "task", None, None, None), {}),
    (Controller.start_controller, (ME, None), {}),
    (Controller.stop_controller, (ME, None), {}),
    (ControllerSpec.control_flow, (ME, None, None), {}),
    (ServerProcessJobLauncher.get_command, (ME, {}, None), {}),
    (ClientProcessJobLauncher.get_command, (ME, {}, None), {}),
    (get_server_job_args, (), {}),
    (get_client_job_args, (), {}),
    (new_secure_session, ("user", "kit"), {"timeout": 5.0}),
    (Session.list_jobs, (ME,), {"name_prefix": "run"}),
    (Session.submit_job, (ME, "folder"), {}),
    (Session.abort_job, (ME, "id"), {}),
    (Session.get_job_meta, (ME, "id"), {}),
    (Session.get_system_info, (ME,), {}),
    (Session.close, (ME,), {}),
    (cert_cli.def_cert_cli_parser, (None,), {}),
    (package_cli.def_package_cli_parser, (None,), {}),
    (cert_commands.handle_cert_init, (None,), {}),
    (cert_commands.handle_cert_request, (None,), {}),
    (cert_commands.handle_cert_approve, (None,), {}),
    (package_commands.handle_package, (None,), {}),
    (cert_fingerprint_sha256, (None,), {}),
]


def test_the_version_is_the_one_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = {**project["project"]["optional-dependencies"], **project.get("dependency-groups", {})}
    pins = {text for group in groups.values() for text in group if isinstance(text, str) and "nvflare" in text}
    assert pins == {f"nvflare=={metadata.version('nvflare')}"}


@pytest.mark.parametrize(("function", "words", "named"), USED, ids=lambda value: getattr(value, "__qualname__", ""))
def test_it_can_be_called_as_we_do(function: Callable[..., Any], words: Any, named: Any) -> None:
    inspect.signature(function).bind(*words, **named)


def test_names_are_where_we_look_for_them() -> None:
    events = ("START_RUN", "END_RUN", "AFTER_CLIENT_REGISTER", "CLIENT_REGISTER_RECEIVED")
    assert all(hasattr(EventType, name) for name in events)
    assert all(hasattr(ReturnCode, name) for name in ("OK", "TIMEOUT", "TASK_ABORTED"))
    assert all(hasattr(FLContextKey, name) for name in ("WORKSPACE_OBJECT", "JOB_PROCESS_ARGS"))
    assert all(hasattr(ReservedHeaderKey, name) for name in ("TASK_NAME", "TASK_ID"))
    assert hasattr(ReservedTopic, "DO_TASK")
    assert (MetaKey.JOB_ID, MetaKey.JOB_NAME, MetaKey.STATUS) == ("job_id", "job_name", "status")
    for module in ("client.client_train", "server.server_train", "client.worker_process", "server.runner_process"):
        assert util.find_spec(f"nvflare.private.fed.app.{module}") is not None


def test_a_question_that_was_given_up_ends_by_its_contexts_signal() -> None:
    """The engine sets the signal of a context; who sends must look at that one."""
    assert "get_run_abort_signal" in inspect.getsource(inspect.getmodule(AuxRunner))  # type: ignore[arg-type]
    assert "self._engine" in inspect.getsource(Controller)
