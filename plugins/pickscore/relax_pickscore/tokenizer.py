"""CLIP's tokenizer as the published processor runs it, from the vocabulary that open_clip ships.

open_clip's own cleaning differs from the processor that PickScore was trained and published with: it repairs
mis-decoded text, straightens curly quotes and unescapes HTML, which gives other tokens for such prompts. Here a prompt
is put into Unicode NFC, white space is collapsed and letters are lowered one by one, as Hugging Face's CLIPTokenizer
does, and control words such as ``<end_of_text>`` inside a prompt are ordinary text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import regex
import torch
from open_clip import SimpleTokenizer
from torch import Tensor

__all__ = ["ClipTokenizer"]

_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")


def _normalise(text: str) -> str:
    text = regex.sub(r"\s+", " ", unicodedata.normalize("NFC", text))
    # Letter by letter: str.lower() of a whole word would write a final Greek sigma differently.
    return "".join(letter.lower() for letter in text)


class ClipTokenizer:
    """Turns prompts into rows of ``context_length`` token ids: start, words, end, zeros.

    The padding value does not matter: attention is causal and the embedding is read at the end token.
    """

    def __init__(self, *, context_length: int) -> None:
        self.context_length = context_length
        self._bpe = SimpleTokenizer()
        self._bpe.clean_fn = _normalise
        self._bpe.pat = _WORDS

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Tokenise.

        Returns:
            Ids [B, context_length] int64, and for each prompt whether it was cut to fit (start and end included).
        """
        ids = torch.zeros(len(prompts), self.context_length, dtype=torch.int64)
        truncated = []
        for row, prompt in enumerate(prompts):
            words = self._bpe.encode(prompt)
            truncated.append(len(words) > self.context_length - 2)
            tokens = [self._bpe.sot_token_id, *words[: self.context_length - 2], self._bpe.eot_token_id]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return ids, truncated
