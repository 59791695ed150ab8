"""What a Hugging Face model folder says about its text: tokenizer, chat template, stop tokens, context length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from opengyre.errors import ConfigError
from opengyre.proxy.template import ChatTemplate


@dataclass(frozen=True)
class Folder:
    """A model folder as rendering needs it. ``context`` is None if the folder does not say."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: list[int]
    context: int | None


def read_folder(model_dir: Path) -> Folder:
    """Read a folder. Raises ConfigError naming the file that is missing or broken."""
    if not (model_dir / "tokenizer.json").is_file():
        raise ConfigError("has no tokenizer.json", where=str(model_dir), right="a Hugging Face model folder")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config, own = _json(model_dir / "config.json"), _json(model_dir / "tokenizer_config.json")
    tokens = {k: t for k, v in own.items() if k.endswith("_token") and (t := _content(v))}
    eos = _json(model_dir / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    stops = {i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)}
    if (i := tokenizer.token_to_id(tokens.get("eos_token", ""))) is not None:
        stops.add(i)
    limit = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return Folder(tokenizer, ChatTemplate(_template_source(model_dir, own), tokens), sorted(stops), limit)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(error), where=str(path), right="JSON") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    """A special token is a string or {"content": ...}."""
    return token.get("content", "") if isinstance(token, dict) else token if isinstance(token, str) else ""


def _template_source(model_dir: Path, own: dict[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = own.get("chat_template")
    if isinstance(source, list):  # several named ones; the tool-aware one serves plain chats too
        named = {t["name"]: t["template"] for t in source}
        source = named.get("tool_use") or named.get("default")
    if not isinstance(source, str):
        raise ConfigError("has no chat template", where=str(model_dir), right="chat_template.jinja")
    return source
