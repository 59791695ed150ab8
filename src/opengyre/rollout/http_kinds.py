"""Which kind of server is at a URL: SGLang and vLLM both say so in ``/v1/models``."""

from __future__ import annotations

from typing import Literal

import aiohttp
import msgspec

from opengyre.errors import ConfigError
from opengyre.rollout.http import CONNECT_S, HttpEngine
from opengyre.rollout.sglang import SglangEngine
from opengyre.rollout.vllm import VllmEngine

Kind = Literal["auto", "sglang", "vllm"]
KINDS: dict[str, type[HttpEngine]] = {"sglang": SglangEngine, "vllm": VllmEngine}


async def connect(urls: list[str], kind: Kind, *, api_key: str | None = None) -> list[HttpEngine]:
    """An engine per URL, named ``host:port``. Nothing is sampled; a server that is still loading is fine if another one
    of the same kind answers, or ``kind`` is given.

    Raises:
        ConfigError: a URL that is none or is given twice; no server answers with a kind that is known.
    """
    names = [_name(url) for url in urls]
    if twice := {url for url, name in zip(urls, names, strict=True) if names.count(name) > 1}:
        raise ConfigError(f"{min(twice)} is given twice", where="--engine", right="each server once")
    found = [kind if kind != "auto" else await _ask_kind(url, api_key) for url in urls]
    known = next((k for k in found if k in KINDS), None)
    if known is None:
        said = "; ".join(f"{url} {what}" for url, what in zip(urls, found, strict=True))
        raise ConfigError(said, where="--engine", right="a running SGLang or vLLM server, or --kind for one that loads")
    return [
        KINDS[what if what in KINDS else known](name, url, api_key=api_key)
        for url, name, what in zip(urls, names, found, strict=True)
    ]


def _name(url: str) -> str:
    scheme, found, rest = url.partition("://")
    name = rest.rstrip("/")
    if not found or scheme not in ("http", "https") or not name or any(mark in name for mark in "?# "):
        raise ConfigError(repr(url), where="--engine", right="http://host:port")
    return name


async def _ask_kind(url: str, api_key: str | None) -> str:
    """``sglang``, ``vllm``, or why it is not known."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/v1/models") as response,
        ):
            if response.status != 200:
                return f"answers {response.status}"
            models = msgspec.json.decode(await response.read(), type=_Models)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        return f"does not answer ({type(error).__name__}: {error})"
    owner = models.data[0].owned_by.lower() if models.data else ""
    return owner if owner in KINDS else f"is owned by {owner!r}"


class _Model(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []
