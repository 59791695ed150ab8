"""``python -m opengyre`` is the command line."""

import sys

from opengyre.cli import main

sys.exit(main())
