"""Tokenizers that a library runs: Hugging Face's tokenizer.json, SentencePiece's tokenizer.model.

The library gets every text whole, many in one call. It may put special tokens around a text, such as the <s>
of Llama 2: `prefix_ids` and `suffix_ids`, if `include_special_tokens` says so.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nanomegatron.config.user_files import read_json
from nanomegatron.data.vocabulary import (
    EOD,
    Tokenizer,
    existing_file,
    import_extra,
    joined_ids,
    sha256_of,
)

# End-of-document tokens of Hugging Face vocabularies without a tokenizer_config.json.
_HF_EODS = (EOD, "<|end_of_text|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, run by the tokenizers library; no code from a model repository is executed.

    With the special tokens that its post-processor puts around a text, as in transformers and Megatron.
    """

    def __init__(self, model: str) -> None:
        library = import_extra("tokenizers", "HuggingFaceTokenizer")
        path = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(model)
        data = existing_file(str(path), "--tokenizer-model").read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(
                f"{path}: not a tokenizer.json that the tokenizers library reads ({error})"
            ) from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = self._find_eod(path, vocab)
        self.spec = {"type": "HuggingFaceTokenizer", "model": str(path.absolute())}
        self.fingerprint = sha256_of("HuggingFace", data, self.eod)
        found = self._tokenizer.encode("x".join(["", *list(vocab)[:50]]))  # any text that has a token
        self._added = [i for i, special in zip(found.ids, found.special_tokens_mask) if special]
        self._before = [*found.special_tokens_mask, 0].index(0)  # are before the text, the others behind
        self.include_special_tokens(True)

    def include_special_tokens(self, include: bool) -> None:
        """Put those of the post-processor around each text, or leave them out."""
        self._add = include and bool(self._added)
        added = self._added if self._add else []
        self.put_around(added[: self._before], added[self._before :])

    @staticmethod
    def _find_eod(path: Path, vocab: dict[str, int]) -> int:
        config = path.with_name("tokenizer_config.json")
        token = read_json(config).get("eos_token") if config.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise ValueError(f"{config}: eos_token {token!r:.60}: must be a string")
        names = [token] if token else _HF_EODS
        for name in names:
            if name in vocab:
                return vocab[name]
        raise ValueError(
            f"{path}: no end-of-document token ({', '.join(names)}); "
            'put a tokenizer_config.json with {"eos_token": "..."} beside it'
        )

    def encode_many(self, texts: Sequence[str], special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts, as every tokenizer does. Raises ValueError if one has half of a surrogate pair."""
        for text in texts:
            text.encode()
        self._tokenizer.encode_special_tokens = not special
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._add)
        return joined_ids(encoding.ids for encoding in found)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece tokenizer.model; </s> ends a document. As in Megatron nothing is put around a text."""

    def __init__(self, model: str) -> None:
        library = import_extra("sentencepiece", "SentencePieceTokenizer")
        path = existing_file(model, "--tokenizer-model")
        data = path.read_bytes()
        try:
            self._processor = library.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from None
        self.vocab_size, self.eod = self._processor.vocab_size(), self._processor.eos_id()
        if self.eod < 0:
            raise ValueError(f"{path}: the model has no </s>; train it with an eos_id")
        self.spec = {"type": "SentencePieceTokenizer", "model": str(path.absolute())}
        self.fingerprint = sha256_of("SentencePiece", data)
        self._config = path.with_name("tokenizer_config.json")
        self.include_special_tokens(False)

    def include_special_tokens(self, include: bool) -> None:
        """Put those around each text that the tokenizer_config.json beside the model asks for, or none."""
        asked = read_json(self._config) if include and self._config.is_file() else {}
        bos, eos = (asked.get(f"add_{name}_token") is True for name in ("bos", "eos"))
        self._add = {"add_bos": bos, "add_eos": eos}
        self.put_around([self._processor.bos_id()] * bos, [self.eod] * eos)

    def encode_many(self, texts: Sequence[str], special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts; special tokens are text either way. Raises as HuggingFaceTokenizer's."""
        for text in texts:
            text.encode()
        return joined_ids(self._processor.encode(list(texts), num_threads=1, **self._add) if texts else [])

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(list(ids))
