"""Text: splitting, vocabularies, hashing, padding, as steps that work on whole batches through Arrow.

A step is a small picklable object that is called with text or with what another step made: with one string, or with
an array of them, as `Dataset.map` hands it out after `batch`. Steps chain::

    vocabulary = rd.text.Vocabulary.build(lines, split=rd.text.Split())
    encode = rd.text.Chain((rd.text.Split(), vocabulary, rd.text.Pad(32)))
    batches = lines.batch(256).map(encode)  # int64 of shape (256, 32)

Text is str, or bytes that hold UTF-8; tokens are str. One string becomes one array of tokens; an array of strings
becomes an object array of such arrays, which is no tensor: end a chain with `Pad` before an element leaves `map`.
"""

from __future__ import annotations

from raydist.text.step import Chain as Chain
from raydist.text.step import Characters as Characters
from raydist.text.step import Pad as Pad
from raydist.text.step import Split as Split
from raydist.text.step import TextStep as TextStep
from raydist.text.vocabulary import HashBuckets as HashBuckets
from raydist.text.vocabulary import Vocabulary as Vocabulary

__all__ = ["Chain", "Characters", "HashBuckets", "Pad", "Split", "TextStep", "Vocabulary"]
