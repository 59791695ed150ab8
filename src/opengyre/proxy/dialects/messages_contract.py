"""What of an Anthropic Messages request is honoured, ignored, shown as a placeholder, refused."""

from __future__ import annotations

from opengyre.proxy.dialects.contract import BILLING, PINNED, PROBE, UNFORCED, Contract, Part, Rule, Treatment

_FIELD, _ROLE, _CONTENT, _TOOL = Part.FIELD, Part.ROLE, Part.CONTENT, Part.TOOL
_YES, _NO, _SHOWN, _REFUSED = Treatment.HONOURED, Treatment.IGNORED, Treatment.SHOWN, Treatment.REFUSED
NO_THREADS = "thread_unsupported_request"  # on this code Anthropic's SDK goes on without threads
_STORED = "nothing is stored here; send the whole conversation"
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
_PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "done", "is_error": True}

CONTRACT: Contract = (
    Rule(_FIELD, "model", _YES, "any name; the answer carries it, since clients drop signed thinking of another", "m2"),
    Rule(_FIELD, "messages", _YES, "the conversation, in full", [{"role": "user", "content": "other"}]),
    Rule(_FIELD, "system", _YES, "the first message; billing lines, which change from call to call, are left out", "S"),
    Rule(_FIELD, "tools", _YES, "shown to the policy by its chat template", [{"name": "f", "input_schema": {}}]),
    Rule(_FIELD, "max_tokens", _YES, PROBE, 7),
    Rule(_FIELD, "stop_sequences", _YES, "end the turn, and are named in `stop_sequence`", ["END"]),
    Rule(_FIELD, "stream", _YES, "server-sent events, or one JSON body", True),
    Rule(_FIELD, "thinking.type", _YES, "`enabled` and `adaptive` turn reasoning on, `disabled` off", "disabled"),
    Rule(_FIELD, "thinking.budget_tokens", _NO, "the policy decides how long it thinks", 2048),
    Rule(_FIELD, "thinking.display", _NO, "reasoning is always sent; it is a key to its tokens", "omitted"),
    Rule(_FIELD, "temperature", _NO, PINNED, 0.1),
    Rule(_FIELD, "top_p", _NO, PINNED, 0.5),
    Rule(_FIELD, "top_k", _NO, PINNED, 5),
    Rule(_FIELD, "tool_choice", _NO, UNFORCED, {"type": "any"}),
    Rule(_FIELD, "output_config", _NO, "effort and format: sampling is never constrained", {"effort": "high"}),
    Rule(_FIELD, "context_management", _NO, "history is read as it is sent; the harness edits it", {"edits": []}),
    Rule(_FIELD, "compaction", _NO, "history is read as it is sent; the harness compacts it", {"enabled": True}),
    Rule(_FIELD, "cache_control", _NO, "taken off wherever it stands, also inside blocks", {"type": "ephemeral"}),
    Rule(_FIELD, "metadata", _NO, "a session is known by its URL and key, never by content", {"user_id": "u"}),
    Rule(_FIELD, "betas", _NO, "all that is read is read without being announced", ["b"]),
    Rule(_FIELD, "service_tier", _NO, BILLING, "auto"),
    Rule(_FIELD, "speed", _NO, BILLING, "fast"),
    Rule(_FIELD, "inference_geo", _NO, BILLING, "eu"),
    Rule(_FIELD, "user_profile_id", _NO, BILLING, "p"),
    Rule(_FIELD, "workspace_id", _NO, BILLING, "w"),
    Rule(_FIELD, "billing_policy", _NO, BILLING, {"x": 1}),
    Rule(_FIELD, "fallbacks", _NO, "there is one policy", [{"model": "m"}]),
    Rule(_FIELD, "fallback_credit_token", _NO, BILLING, "t"),
    Rule(_FIELD, "diagnostics", _NO, "the record holds more, and is not shown to harnesses", {"x": True}),
    Rule(_FIELD, "container", _REFUSED, "no code runs on this side; give the policy a tool for it", "c1"),
    Rule(_FIELD, "mcp_servers", _REFUSED, "no tools run on this side; connect the harness to them", [{"name": "s"}]),
    Rule(_FIELD, "thread", _REFUSED, _STORED, {"type": "create"}, code=NO_THREADS),
    Rule(_ROLE, "user", _YES, "text and tool results; each tool result becomes a message", "hello"),
    Rule(_ROLE, "assistant", _YES, "as the last message it is history, no prefill: a new turn follows it", "hello"),
    Rule(_ROLE, "system", _YES, "in any position, and stays there", "hello"),
    Rule(_CONTENT, "text", _YES, "also as a plain string", {"type": "text", "text": "hello"}),
    Rule(_CONTENT, "thinking", _YES, "found again by its signature, whatever became of its text",
         {"type": "thinking", "thinking": "hm", "signature": "s"}),
    Rule(_CONTENT, "redacted_thinking", _YES, "like thinking, by its data", {"type": "redacted_thinking", "data": "s"}),
    Rule(_CONTENT, "tool_use", _YES, "any id; found again by it",
         {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}),
    Rule(_CONTENT, "tool_result", _YES, "a string or blocks; in any order, by their ids", _RESULT),
    Rule(_CONTENT, "image", _SHOWN, "also inside a tool result", _IMAGE),
    Rule(_CONTENT, "document", _SHOWN, "also inside a tool result", _PDF),
    Rule(_CONTENT, "server_tool_use", _SHOWN, "like any block of a type not named here",
         {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}),
    Rule(_TOOL, "custom", _YES, "a name, a description and an input_schema; `strict` is not enforced",
         {"type": "custom", "name": "f", "description": "d", "input_schema": {"type": "object"}}),
    Rule(_TOOL, "web_search_20250305", _NO, "and all others without an input_schema: they run elsewhere, or are known "
         "to one vendor's models only. The record names the tools that were shown",
         {"type": "web_search_20250305", "name": "web_search"}),
)  # fmt: skip
