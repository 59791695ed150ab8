"""``opengyre proxy`` on the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opengyre.arguments import positive, say

if TYPE_CHECKING:
    from opengyre.proxy.standalone import Running

PORT = 8788  # fixed, so that a proxy that starts again is found by its harnesses
ADMIN_KEY, ENGINE_KEY = "OPENGYRE_ADMIN_KEY", "OPENGYRE_ENGINE_KEY"


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "proxy",
        parents=[common],
        help="record any harness in front of any engine, for a trainer of your own",
        description="Serves Anthropic Messages, OpenAI Chat Completions and Responses in front of SGLang or vLLM"
        " servers, and records every token with its log-probability. Without --engine it serves the model folder"
        " itself. docs/proxy.md shows how a trainer opens sessions and fetches samples.",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder, or quickstart")
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="a server; repeat it for more")
    parser.add_argument("--kind", choices=("auto", "sglang", "vllm"), default="auto", help="auto: it is asked")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free one")
    parser.add_argument("--public-url", default="", metavar="URL", help="where harnesses reach it, if elsewhere")
    parser.add_argument("--dir", type=Path, default=Path("proxy-record"), metavar="RECORD_DIR", help="where it records")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens a call may have; default: what fits")
    parser.add_argument("--format", metavar="NAME", help="how the model writes turns; default: as its template does")
    parser.add_argument("--temperature", type=float, default=1.0, help="of every call, whatever the harness asks")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="cap on one reply")
    parser.add_argument("--max-calls", type=positive, default=100_000, metavar="N", help="model calls per session")
    parser.add_argument("--slots", type=positive, default=256, metavar="N", help="calls one server gets at once")
    parser.add_argument("--keepalive", type=float, default=10.0, metavar="S", help="longest silence on a stream")
    parser.add_argument("--stream-tokens", action="store_true", help="as they come; default: a turn is sent whole")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="how long a server may take to come up")
    parser.add_argument("--poll", type=float, default=5.0, metavar="S", help="how often a server is asked if it lives")
    parser.add_argument("--admin-key", help=f"of the trainer's door; better: {ADMIN_KEY}; default: one is made")
    parser.add_argument("--engine-key", help=f"bearer token the servers want; better: {ENGINE_KEY}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from opengyre.config import ModelConfig, ProxyConfig, RunConfig, SamplingConfig
    from opengyre.proxy.standalone import Settings, serve
    from opengyre.run.preflight import resolve_model

    model = resolve_model(RunConfig(model=ModelConfig(path=args.model)))
    settings = Settings(
        model=model,
        folder=args.dir,
        engines=tuple(args.engine),
        kind=args.kind,
        engine_key=args.engine_key or os.environ.get(ENGINE_KEY),
        admin_key=args.admin_key or os.environ.get(ADMIN_KEY, ""),
        context=args.context,
        format=args.format,
        pins=SamplingConfig(temperature=args.temperature, max_tokens=args.max_tokens),
        slots=args.slots,
        max_calls=args.max_calls,
        wait_s=args.wait,
        poll_s=args.poll,
        public_url=args.public_url,
        proxy=ProxyConfig(host=args.host, port=args.port, keepalive_s=args.keepalive, stream_tokens=args.stream_tokens),
    )
    serve(settings, say, lambda running: _ready(running, settings.folder, given=bool(settings.admin_key)))
    return 0


def _ready(running: Running, folder: Path, *, given: bool) -> None:
    key = "as given" if given else running.admin_key
    again = f"\n{running.reopened} sessions of the record are open again" if running.reopened else ""
    say(f"proxy:     {running.url}\nadmin key: {key}\nrecord:    {folder}{again}")
