"""`python -m nanomegatron VERB ...`, which is the command `nanomegatron VERB ...`."""

import sys

from nanomegatron.commands.verbs import main

if __name__ == "__main__":
    sys.exit(main())
