"""Build hook: compiles the native copies into the package, where there is a C compiler.

Without one the build goes on and the wheel is pure Python; kvcore then copies with torch, several
times slower, and says so when it starts.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCopies(BuildHookInterface):  # type: ignore[misc]  # hatchling ships no types
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        script = Path(self.root) / "kvcore" / "memory" / "copy" / "build_native.py"
        build = runpy.run_path(str(script))["build"]
        try:
            build()
        except RuntimeError as error:
            self.app.display_warning(f"kvcore is built without native copies: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append("kvcore/memory/copy/_copy.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
