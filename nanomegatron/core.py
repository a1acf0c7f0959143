"""Megatron Core's package is not here: an import from it is answered with the name to use.

Tests: tests/config/test_keywords.py. Page: docs/from-megatron.md.
"""

from nanomegatron.config.keywords import answer_import as __getattr__  # noqa: F401
