"""`rd.summary`: scalars, histograms, images, audio and texts for TensorBoard, from the driver and from steps.

Names and arguments are those of tf.summary, where tf.summary has them::

    writer = rd.summary.create_file_writer("logs")
    with writer.as_default():
        for batch in strategy.distribute_dataset(data):
            strategy.run(train_step, args=(batch,))  # calls rd.summary.scalar("loss", loss)
    writer.close()

Without a writer calls do nothing. The records of a step on several replicas are sent with its results and merged into
one value: no collective, no wait, one event file. Records of a loop in the replicas are written when its `run` ends.
"""

from __future__ import annotations

from raydist.summary.histograms import histogram as histogram
from raydist.summary.media import audio as audio
from raydist.summary.media import image as image
from raydist.summary.media import text as text
from raydist.summary.projector import embedding as embedding
from raydist.summary.recording import flush as flush
from raydist.summary.recording import record_if as record_if
from raydist.summary.runs import graph as graph
from raydist.summary.runs import hparams as hparams
from raydist.summary.scalars import scalar as scalar
from raydist.summary.writer import SummaryWriter as SummaryWriter
from raydist.summary.writer import create_file_writer as create_file_writer

__all__ = [
    "SummaryWriter",
    "audio",
    "create_file_writer",
    "embedding",
    "flush",
    "graph",
    "histogram",
    "hparams",
    "image",
    "record_if",
    "scalar",
    "text",
]
