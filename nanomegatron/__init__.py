"""Large transformers on many GPUs in short, readable PyTorch."""

import sys

__version__ = "0.2.0"

# `python -m nanomegatron.tp` would import a module and do nothing: say so. While -m looks for its module,
# argv begins with "-m", and orig_argv has the module's name there.
if sys.argv[:1] == ["-m"]:
    _module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if _module.startswith("nanomegatron.") and not _module.endswith((".ops", ".__main__")):
        sys.exit(f"{_module} is a module to import, not a command; python -m nanomegatron lists the commands")
