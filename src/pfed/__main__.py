"""`python -m pfed`."""

import sys

from pfed.cli import main

sys.exit(main())
