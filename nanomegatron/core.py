"""Megatron Core's package is not here: an import from it is answered with the name to use."""

from nanomegatron.config.keywords import answer_import as __getattr__  # noqa: F401
