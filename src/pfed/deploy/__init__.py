"""Real federations: sites with their own data, a server without any, NVFlare between them.

`kits` makes certificates, `parents` starts and ends NVFlare's processes, `jobs` sends runs to the server. There the
`controller` runs the ordinary session; at a site the `executor` hands every step to a `worker`, whose `site` has the
data, the private state and the `manifest` of what may leave.
"""

from __future__ import annotations

from importlib.util import find_spec

from pfed.errors import UserError


class Refused(Exception):
    """A site does not do what it was asked, for a reason that is one word of a list."""


def check_installed() -> None:
    """Say which extra is missing, if so."""
    if find_spec("nvflare") is None:
        raise UserError("pfed deploy needs NVFlare, which is not installed. Install pfed[deploy].")
