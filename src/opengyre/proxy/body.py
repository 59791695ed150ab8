"""The bytes of a request's body as they were meant: whole, of a size we take, unpacked.

The HTTP server is told to leave encodings alone: it answers those it does not know in words of its own, even to HEAD,
and waits for ever on a broken deflate stream.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from opengyre.proxy.refusals import Refusal

MAX_BODY_BYTES = 64 << 20  # 1M tokens are about 4 MB of text; images in a history take the rest
ENCODINGS = ("identity", "gzip")
GZIP = 16 + zlib.MAX_WBITS  # zlib's name for a gzip stream
ASIDE_BYTES = 64 << 10  # unpacking more than this takes milliseconds and is done in a thread


async def read_body(request: web.Request) -> bytes:
    """Raises Refusal: 415 an encoding we do not take, 413 too large, 400 broken."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise Refusal(f"Content-Encoding: {encoding!r} is none of {', '.join(ENCODINGS)}", status=415)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise Refusal(f"the body cannot be read: {' '.join(str(error).split())}") from None
    if encoding == "identity" or not body:
        return body
    return unpacked(body) if len(body) <= ASIDE_BYTES else await asyncio.to_thread(unpacked, body)


def unpacked(packed: bytes) -> bytes:
    """What a gzip stream holds. Raises Refusal: 413, and 400 if it is none, or does not end where the body does."""
    stream = zlib.decompressobj(GZIP)
    try:
        body = stream.decompress(packed, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise Refusal(f"the body is no gzip stream: {error}") from None
    if len(body) > MAX_BODY_BYTES:
        raise _too_large()
    if not stream.eof or stream.unused_data:
        raise Refusal("the body is not one whole gzip stream")
    return body


def _too_large() -> Refusal:
    return Refusal(f"more than {MAX_BODY_BYTES} bytes", status=413, kind="request_too_large")
