"""GET /: the playground, a page to try the server. It is one file, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

_PAGE = Path(__file__).with_name("playground.html").read_text(encoding="utf-8")


def _source(tag: str) -> str:
    """Return the name of the page's own script or style in its content security policy."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    assert found is not None
    return f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


_FORBIDDEN = [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")]
_POLICY = "; ".join([*_FORBIDDEN, _source("script"), _source("style"), "connect-src 'self'", "img-src data:"])


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """Return the page. Its own requests need the API key."""
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(_PAGE, headers=headers)
