"""What makes ``opengyre train quickstart`` run out of the box: a harness, a family of tasks, a small policy, a config.

Only paths live here, so that importing it costs nothing. ``HARNESS_FILE`` is run as ``python -I -S HARNESS_FILE``.
"""

from pathlib import Path

_HERE = Path(__file__).parent
POLICY_DIR = _HERE / "policy"
HARNESS_FILE = _HERE / "harness.py"
CONFIG_FILE = _HERE / "quickstart.toml"
