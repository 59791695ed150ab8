# Sourced by ./test: installs the pinned agent harnesses into .harnesses, once per set of pins.
# OPENGYRE_NO_HARNESSES=1 leaves them out; the tests that need them are skipped then.

if [ "${OPENGYRE_NO_HARNESSES:-}" != 1 ]; then
  export OPENGYRE_HARNESSES="$PWD/.harnesses"
  if ! opengyre harness install all --dir "$OPENGYRE_HARNESSES" >&2; then
    echo "the client tests need npm and these harnesses; to leave them out: OPENGYRE_NO_HARNESSES=1 ./test" >&2
    exit 2
  fi
fi
