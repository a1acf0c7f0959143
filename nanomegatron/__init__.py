"""Large transformers on many GPUs in short, readable PyTorch."""

import importlib
import sys

__version__ = "0.2.0"

# `python -m nanomegatron.tp` would do nothing: say so. Until -m has it, argv[0] is "-m"; orig_argv names it.
if sys.argv[:1] == ["-m"]:
    _module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if _module.startswith("nanomegatron.") and not _module.endswith((".ops", ".__main__")):
        sys.exit(f"{_module} is a module to import, not a command; python -m nanomegatron lists the commands")


def __getattr__(name: str) -> None:  # imports of Megatron's names are answered with ours
    importlib.import_module("nanomegatron.config.keywords").answer_import(name)
