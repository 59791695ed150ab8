"""The support contract of a wire format, as data: what is honoured, ignored, shown as a placeholder, refused.

    body ─▶ refuse(contract, body) ─▶ parse            contract ─▶ table ─▶ docs/wire.md

``parse`` of each dialect refuses by this data; tests drive every rule with its example, and hold the field names
against those of the vendors' own SDKs. A field that no rule names is ignored: clients send what their vendors add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from opengyre.proxy.refusals import Refusal


class Treatment(Enum):
    """What happens to a part of a request."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    SHOWN = "placeholder"  # replaced by a text that names it: the policy must not invent what it cannot see
    REFUSED = "refused"


class Part(Enum):
    """Where in a request a rule applies."""

    FIELD = "Request fields"
    ROLE = "Roles"
    CONTENT = "Content blocks"
    ITEM = "Input items"
    TOOL = "Tools"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a contract.

    Args:
        name: a field (dotted when inside an object), role, block type or tool type.
        why: what is done with it, or the reason why nothing is; for a refusal, what the client is told.
        example: a value that shows the rule; for a refusal, one that is refused.
        unless: for a refusal, values that ask for nothing and pass. Absent, null, false and empty ones always do.
        code: for a refusal, an error code that clients act on.
    """

    part: Part
    name: str
    treatment: Treatment
    why: str
    example: Any
    unless: tuple[Any, ...] = ()
    code: str | None = None


Contract = tuple[Rule, ...]

# Reasons that all three dialects share.
PINNED = "pinned by the run: only the untruncated distribution has log-probabilities that can be trained on"
UNFORCED = "the policy decides: forcing a call would change what it samples from"
UNCONSTRAINED = "sampling is never constrained"
BILLING = "who is billed, and where it runs, has no meaning here"
KNOWN_BY_KEY = "a session is known by its URL and key, never by content"
PREFIXES = "prefixes are found by content"
PROBE = "at most what the run pins; 1 is a client's probe and is not trained on"
LOGPROBS = "log-probabilities are recorded and exported, not sent"


def refuse(contract: Contract, body: Mapping[str, Any]) -> None:
    """Raise Refusal (400) for the first field of ``body`` that the contract refuses."""
    for rule in contract:
        if rule.part is Part.FIELD and rule.treatment is Treatment.REFUSED:
            value = dig(body, rule.name)
            if value and not any(value is v or (type(value) is type(v) and value == v) for v in rule.unless):
                raise Refusal(f"{rule.name}: {rule.why}", code=rule.code, param=rule.name)


def dig(body: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted field name; None where it, or an object above it, is absent."""
    value: Any = body
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def names(contract: Contract, part: Part, *treatments: Treatment) -> tuple[str, ...]:
    """Names of the rules of one part, of all treatments unless some are given."""
    return tuple(r.name for r in contract if r.part is part and (not treatments or r.treatment in treatments))


def table(contract: Contract) -> str:
    """The contract as Markdown: one list per treatment, by part."""
    lines: list[str] = []
    for treatment in Treatment:
        rules = [r for r in contract if r.treatment is treatment]
        if rules:
            lines += [f"#### {treatment.value.capitalize()}", "", "| where | what | |", "|---|---|---|"]
            lines += [f"| {r.part.value.lower()} | `{r.name}` | {_sentence(r)} |" for r in rules]
            lines += [""]
    return "\n".join(lines)


def _sentence(rule: Rule) -> str:
    passes: Iterable[str] = (f"`{str(v).lower() if isinstance(v, bool) else v}`" for v in rule.unless)
    accepted = f" (accepted: {', '.join(passes)})" if rule.unless else ""
    return rule.why.replace("|", "\\|") + accepted
