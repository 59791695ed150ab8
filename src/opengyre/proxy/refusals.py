"""The answers "no" a harness can get. Each dialect writes them in its own words; nobody else sees them."""

from __future__ import annotations

from opengyre.errors import OpenGyreError


class Refusal(OpenGyreError):
    """A request that is answered with an error.

    Args:
        what: text for the harness.
        status: HTTP status.
        kind: error type in Anthropic's vocabulary (``invalid_request_error``, ``authentication_error``, ...).
        code: OpenAI's error code, where its clients act on one (``context_length_exceeded``).
        param: the field that is wrong, for clients that show one.
    """

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        self.status, self.kind, self.code, self.param = status, kind, code, param
        super().__init__(what)
