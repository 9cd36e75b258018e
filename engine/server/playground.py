"""GET /: the playground, a page to try the server. It is one file, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

_FILE = Path(__file__).with_name("playground.html")


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """Return the page. Its own requests need the API key."""
    page, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(page, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the page, and the policy that allows its own script and style, and requests to this server."""
    page = _FILE.read_text(encoding="utf-8")

    def source(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    allowed = {f"{tag}-src": source(tag) for tag in ("script", "style")}
    allowed |= {"connect-src": "'self'", "img-src": "data:"}
    forbidden = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    return page, "; ".join(f"{name} {value}" for name, value in {**forbidden, **allowed}.items())
