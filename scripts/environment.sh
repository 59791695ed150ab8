# Sourced by ./quickstart and ./test: makes .venv with what is asked for, once per set of requirements.
# Usage: . scripts/environment.sh EXTRA     (torch | dev)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

_python=""
for _candidate in python3.11 python3.12 python3.13 python3; do
  if command -v "$_candidate" >/dev/null && "$_candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    _python=$_candidate
    break
  fi
done
if [ -z "$_python" ]; then
  echo "opengyre needs Python 3.11 or newer; none of python3.11, python3.12, python3.13, python3 is" >&2
  exit 2
fi

_stamp=".venv/.opengyre-$1-$(cat pyproject.toml scripts/environment.sh | cksum | cut -d' ' -f1)"
if [ ! -e "$_stamp" ]; then
  echo "setting up .venv ($1) ..." >&2
  if ! "$_python" -m venv .venv; then
    echo "$_python cannot make virtual environments; on Debian/Ubuntu: apt-get install python3-venv" >&2
    exit 2
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$1]" >&2
  # Large libraries start several times faster from byte code, also where PYTHONDONTWRITEBYTECODE is set.
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
  touch "$_stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
