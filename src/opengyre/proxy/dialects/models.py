"""``GET /v1/models``: one policy, described so that the clients of both vendors can read it."""

from __future__ import annotations

from typing import Any

NAME = "policy"  # any name is answered; this one is for clients that pick from the list


def entry(name: str, context: int) -> dict[str, Any]:
    """A model of ``context`` tokens. Field names are OpenAI's, Anthropic's and (max_model_len) vLLM's."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 1,  # neither is known; both vendors want some time
        "created_at": "1970-01-01T00:00:01Z",
        "owned_by": "opengyre",
        "display_name": name,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "max_model_len": context,
    }


def listing(context: int) -> dict[str, Any]:
    """All models: one page of one."""
    return {"object": "list", "data": [entry(NAME, context)], "has_more": False, "first_id": NAME, "last_id": NAME}
